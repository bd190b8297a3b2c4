"""A node to call over real sockets, and transports to call it with."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from meshnet_cli.serving import listen, port_of, serving_aiohttp
from meshnet_core.clock import SystemClock
from meshnet_core.http_transport import HttpTransport
from meshnet_core.stream_transport import WireTransport, transport_for
from meshnet_core.wire_form import WireForm
from meshnet_node.torch_server import create_app, new_doorkeeper, runner_for
from served_hop import BODY_TIMEOUT_S, BOOT, MAX_BODY, FakeEndpoint, Node


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    endpoint, not_ready = FakeEndpoint(), list[str]()
    texts = {"f-1": {"config.json": b"{}", "tokenizer.json": bytes(range(256))}}
    app = create_app(
        endpoint,
        boot=BOOT,
        status=lambda: {"sessions": len(endpoint.held), "state_bytes": 4096, "queued": 3, "dropped": {"evicted": 2}},
        text_files=texts.get,
        max_body=MAX_BODY,
        body_timeout_s=BODY_TIMEOUT_S,
        not_ready=lambda: not_ready[-1] if not_ready else None,
    )
    sock = listen("127.0.0.1", 0)
    async with serving_aiohttp(runner_for(app), sock, None, new_doorkeeper()):
        yield Node(endpoint, port_of(sock), not_ready)


@pytest.fixture
async def http() -> AsyncIterator[HttpTransport]:
    transport = HttpTransport()
    yield transport
    await transport.close()


@pytest.fixture(params=["stream", "http"])
async def transport(request: pytest.FixtureRequest) -> AsyncIterator[WireTransport]:
    """Of either form."""
    transport = transport_for(WireForm(request.param), SystemClock())
    yield transport
    await transport.close()
