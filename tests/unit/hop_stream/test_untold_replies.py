"""A reply that cannot be told over a stream: whoever asked hears that the hop failed, and the connection goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

import served_stream
from meshnet_core.errors import HopFailedError
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.sampling import SampledToken
from meshnet_core.stream_transport import StreamTransport
from meshnet_core.transport import FrameAnswered
from served_stream import PATIENCE_S, Endpoint, at, serving

UNTOLD = FrameReply(2, (SampledToken(7, float("nan")),))  # logprobs go as JSON, which has no NaN


def answer_to(frame: Frame) -> FrameReply:
    return UNTOLD if frame.position == 1 else FrameReply(frame.position + 1)


class Patient(Endpoint):
    """Has frames wait."""

    async def forward(self, frame: Frame) -> FrameReply:
        return answer_to(frame)


class Prompt(Patient):
    """Begins on frames at once."""

    async def open(self, document: object) -> None: ...
    async def release(self, session: str) -> None: ...
    async def probe(self, session: str | None) -> None: ...

    def begin(self, frame: Frame, answered: FrameAnswered) -> bool:
        asyncio.get_running_loop().call_soon(answered, answer_to(frame))
        return True


@pytest.mark.parametrize("endpoint", [Patient, Prompt])
async def test_a_reply_that_cannot_be_told_is_the_hops_failure(
    transport: StreamTransport, monkeypatch: pytest.MonkeyPatch, endpoint: type[Endpoint]
) -> None:
    monkeypatch.setattr(served_stream, "Endpoint", endpoint)
    async with serving() as node:
        assert (await transport.forward(node.url, at(4))).position == 5
        with pytest.raises(HopFailedError, match="ValueError"):
            await transport.forward(node.url, replace(at(1), deadline_ms=1000 * PATIENCE_S))
        assert (await transport.forward(node.url, at(5))).position == 6
        assert node.count("meshnet_node_calls_total", call="/hop/forward", result="hop_failed") == 1
        assert node.count("meshnet_node_calls_total", call="/hop/stream", result="ok") == 1  # on the same connection
