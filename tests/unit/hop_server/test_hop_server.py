"""Frames and calls through a node's door, over real sockets: what comes through, and errors on their way back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from golden_frames import DECODE, GOLDEN, PREFILL, SESSION, Golden
from meshnet_core import http_codec
from meshnet_core.errors import (
    ERRORS_BY_CODE,
    CacheMissError,
    HopError,
    HopFailedError,
    HopUnreachableError,
    MeshnetError,
    MissReason,
    RequestRefusedError,
)
from meshnet_core.open_document import OpenReply, ProbeReply
from meshnet_core.stream_transport import WireTransport
from meshnet_core.transport import HopTransport
from meshnet_node.readiness import why_not_ready
from meshnet_node.registration import RegistrationState
from served_hop import BOOT, OPEN, Node, refusal

# -- what goes through ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
async def test_a_frame_arrives_whole_and_its_reply_comes_back(
    node: Node, transport: WireTransport, golden: Golden
) -> None:
    node.endpoint.reply = golden.reply
    reply = await transport.forward(node.url, replace(golden.frame, body=memoryview(bytes(golden.frame.body))))
    assert node.endpoint.frames == [golden.frame]
    assert (reply, reply.boot) == (golden.reply, BOOT)


async def test_open_release_and_probe_come_through(node: Node, transport: WireTransport) -> None:
    port: HopTransport = transport  # the type checker compares the two
    assert await port.open(node.url + "/", OPEN.for_hop(1)) == OpenReply(BOOT, 4096)
    assert node.endpoint.opened == [OPEN.for_hop(1)]
    assert await port.probe(node.url, SESSION) == ProbeReply(BOOT, 261, 3)
    assert await port.probe(node.url, None) == ProbeReply(BOOT, None, 3)
    assert [await port.release(node.url, SESSION), await port.release(node.url, SESSION, 3)] == [2, 0]
    assert node.endpoint.released == [(SESSION, None), (SESSION, 3)]


async def test_many_frames_share_the_transport(node: Node, transport: WireTransport) -> None:
    node.endpoint.gate, node.endpoint.opens_at = asyncio.Event(), 50
    replies = await asyncio.gather(*(transport.forward(node.url, PREFILL.frame) for _ in range(50)))
    assert {reply.boot for reply in replies} == {BOOT}


async def test_a_proxy_in_the_environment_is_not_used(
    node: Node, transport: WireTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert (await transport.forward(node.url, PREFILL.frame)).position == 261


# -- errors on their way back -----------------------------------------------------------------------------------------


def sample_error(code: str) -> MeshnetError:
    cls = ERRORS_BY_CODE[code]
    if issubclass(cls, CacheMissError):
        return cls("gone", reason=MissReason.EVICTED, hop_index=0, position=17, boot="b-1")
    if issubclass(cls, HopError):
        return cls("no", hop_index=0, position=17, boot="b-1")
    if issubclass(cls, RequestRefusedError):
        return cls("no", param="n")
    return cls("no")


@pytest.mark.parametrize("code", sorted(ERRORS_BY_CODE))
async def test_every_error_arrives_as_what_was_raised(node: Node, transport: WireTransport, code: str) -> None:
    node.endpoint.error = raised = sample_error(code)
    arrived = await refusal(transport.forward(node.url, PREFILL.frame))
    assert type(arrived) is type(raised)
    assert arrived.to_wire() == raised.to_wire()
    async with aiohttp.ClientSession() as session, session.get(node.url + "/hop/probe") as response:
        assert response.status == raised.http_status
        assert await response.json() == raised.to_wire()


async def test_an_error_without_an_address_gets_the_hop_and_the_boot_of_who_answered(
    node: Node, transport: WireTransport
) -> None:
    node.endpoint.error = CacheMissError("gone", reason=MissReason.EXPIRED)
    error = await refusal(transport.forward(node.url, DECODE.frame))
    assert isinstance(error, CacheMissError)
    assert (error.hop_index, error.boot) == (1, BOOT)


async def test_an_error_about_a_later_hop_is_not_given_this_ones_boot(node: Node, transport: WireTransport) -> None:
    node.endpoint.error = HopUnreachableError("nothing answers", hop_index=2)
    error = await refusal(transport.forward(node.url, DECODE.frame))
    assert isinstance(error, HopUnreachableError)
    assert (error.hop_index, error.boot) == (2, None)


async def test_a_foreign_exception_is_a_failed_hop_with_its_traceback_kept_on_the_node(
    node: Node, transport: WireTransport, caplog: pytest.LogCaptureFixture
) -> None:
    node.endpoint.error = ZeroDivisionError("a secret of the node")
    error = await refusal(transport.forward(node.url, DECODE.frame))
    assert isinstance(error, HopFailedError)
    assert error.message == "ZeroDivisionError in /hop/forward; the node's log has the traceback"
    assert "a secret of the node" in caplog.text
    assert "Traceback" in caplog.text


# -- the other paths --------------------------------------------------------------------------------------------------


async def test_status_text_files_and_metrics_are_told(node: Node, transport: WireTransport) -> None:
    await transport.forward(node.url, PREFILL.frame)
    node.endpoint.error = CacheMissError("gone", reason=MissReason.EVICTED)
    await refusal(transport.forward(node.url, PREFILL.frame))
    async with aiohttp.ClientSession(node.url) as session:
        async with session.get("/healthz") as response:
            assert (await response.json())["sessions"] == 1
            assert response.headers[http_codec.BOOT] == BOOT
        async with session.get("/text/f-1") as response:
            files: dict[str, Any] = await response.json()
            assert files["config.json"] == "e30="
            assert sorted(files) == ["config.json", "tokenizer.json"]
        async with session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'meshnet_node_calls_total{call="/hop/forward",result="ok"} 1.0' in lines
    assert 'meshnet_node_calls_total{call="/hop/forward",result="cache_miss"} 1.0' in lines
    assert 'meshnet_node_sessions_dropped_total{reason="evicted"} 2.0' in lines
    assert 'meshnet_node_received_bytes_total{call="/hop/forward"} 40.0' in lines
    assert "meshnet_node_state_bytes 4096.0" in lines
    assert 'meshnet_node_frame_seconds_count{part="forward"} 1.0' in lines
    assert 'meshnet_node_frame_seconds_sum{part="queue"} 0.000125' in lines


async def test_readiness_is_told_with_its_reason(node: Node) -> None:
    async with aiohttp.ClientSession(node.url) as session:
        async with session.get("/readyz") as response:
            assert (response.status, await response.json()) == (200, {"status": "ready"})
        node.not_ready.append("no layers are loaded")
        async with session.get("/readyz") as response:
            assert (response.status, await response.json()) == (
                503,
                {"status": "not ready", "reason": "no layers are loaded"},
            )
        async with session.get("/healthz") as response:
            assert response.status == 200  # alive it is


@pytest.mark.parametrize(
    ("state", "loaded", "draining", "why"),
    [
        (RegistrationState.REGISTERED, 1, False, None),
        (RegistrationState.REGISTERED, 1, True, "draining"),
        (RegistrationState.REGISTERED, 0, False, "no layers are loaded"),
        (RegistrationState.NEW, 2, False, "not registered"),
        (RegistrationState.UNREACHABLE, 2, False, "unreachable"),
        (RegistrationState.REFUSED, 2, False, "refused"),
        (RegistrationState.FAILED, 2, False, "failed"),
    ],
)
def test_a_node_is_ready_once_it_is_registered_with_layers_loaded(
    state: RegistrationState, loaded: int, draining: bool, why: str | None
) -> None:
    said = why_not_ready(state, loaded_shards=loaded, draining=draining)
    assert (said is None) if why is None else (why in (said or ""))


async def test_a_small_frame_is_not_held_back(node: Node, transport: WireTransport) -> None:
    """Nagle's delay against delayed acknowledgements would cost every step some 40 ms, a busy machine only some."""
    quickest = float("inf")
    async with asyncio.timeout(60):
        while quickest >= 0.03:
            began = time.perf_counter()
            await transport.forward(node.url, DECODE.frame)
            quickest = min(quickest, time.perf_counter() - began)
