"""A node that takes lean streams, and the transport that makes them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from meshnet_core.clock import SystemClock
from meshnet_core.stream_transport import StreamTransport, transport_for
from meshnet_core.wire_form import WireForm
from served_stream import (
    Node,
    serving,
)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with serving() as node:
        yield node


@pytest.fixture
async def transport() -> AsyncIterator[StreamTransport]:
    transport = transport_for(WireForm.STREAM, SystemClock())
    assert isinstance(transport, StreamTransport)
    yield transport
    await transport.close()
