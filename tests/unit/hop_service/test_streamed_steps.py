"""Decode steps that go to the next hop over a real lean stream, which breaks, hangs or ends in mid-step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import pytest

from hop_line import PATIENCE_S, PROMPT, RANGES, SESSION, STEPS, Gate, Line, decode_frame, settle, until
from in_process_mesh import FINGERPRINT, MODEL
from meshnet_cli.serving import listen, port_of, serving_aiohttp
from meshnet_core.clock import SystemClock
from meshnet_core.errors import CacheMissError, DeadlineError, HopUnreachableError, MissReason
from meshnet_core.frames import Frame, FrameReply
from meshnet_core.route import Hop, Route
from meshnet_core.stream_transport import StreamTransport, transport_for
from meshnet_core.wire_form import WireForm
from meshnet_node import frame_delivery, torch_server
from tcp_relay import TcpRelay, tcp_relay


@dataclass
class Streamed:
    """The two nodes, the second one behind a door and a relay; what ends the door, and frames that had to wait."""

    line: Line
    relay: TcpRelay
    door: AsyncExitStack
    waited: list[int] = field(default_factory=list)

    async def begin(self, session: str = SESSION) -> Frame:
        """Open and prefill a session, by which the stream has served; its first decode step."""
        hops = (Hop("n0", "http://node-0", RANGES[0]), Hop("n1", self.relay.url, RANGES[1]))
        await self.line.open(session=session, route=Route(MODEL, FINGERPRINT, 4, hops))
        reply = await self.line.prefill(PROMPT, session=session)
        self.waited.clear()
        return decode_frame(reply.tokens[0].id, 12, session=session)


@pytest.fixture
async def streamed(line: Line, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Streamed]:
    monkeypatch.setattr(torch_server, "SHUTDOWN_S", PATIENCE_S)
    transport = transport_for(WireForm.STREAM, SystemClock())
    assert isinstance(transport, StreamTransport)
    delivery = line.hops[0]._runs._delivery
    delivery._transport = delivery._prompt = transport
    tail = line.hops[1]
    app = torch_server.create_app(tail, boot=tail.boot, status=tail.status, text_files=lambda _: None, max_body=2**20)
    door = AsyncExitStack()
    sock = listen("127.0.0.1", 0)
    await door.enter_async_context(
        serving_aiohttp(torch_server.runner_for(app), sock, None, torch_server.new_doorkeeper())
    )
    async with door, tcp_relay(port_of(sock)) as relay:
        streamed = Streamed(line, relay, door)
        patiently = transport._patiently

        async def noted(url: str, frame: Frame) -> FrameReply:
            streamed.waited.append(frame.position)
            return await patiently(url, frame)

        monkeypatch.setattr(transport, "_patiently", noted)
        yield streamed
        await transport.close()


async def test_steps_are_sent_at_once_on_a_stream_that_served(streamed: Streamed, expected: list[int]) -> None:
    step = await streamed.begin()
    reply = await streamed.line.send(step)
    assert await streamed.line.decode(reply, STEPS - 1) == expected[1:]
    assert streamed.waited == []


async def test_a_step_whose_connection_breaks_is_sent_again_and_runs_once(
    streamed: Streamed, expected: list[int], gate: Gate
) -> None:
    line, step = streamed.line, await streamed.begin()
    beside = await streamed.begin("s-beside")
    line.shards[1].before = gate
    sent = [asyncio.create_task(line.send(frame)) for frame in (step, beside)]
    await gate.reached()
    await until(lambda: line.hops[1]._lane.queued == 2)
    assert streamed.relay.cut()
    await until(lambda: streamed.waited == [12, 12])
    gate.open()
    assert [(await one).tokens[0].id for one in sent] == [expected[1]] * 2
    for shard in line.shards:
        assert shard.forwards.count((12, 1)) == 2
    assert await line.decode(await sent[0], STEPS - 1) == expected[1:]


async def test_a_step_whose_answer_does_not_come_is_blamed_on_the_next_hop_and_its_retry_joins_it(
    streamed: Streamed, expected: list[int], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_delivery, "DOWNSTREAM_MARGIN", 0.5)
    line, step = streamed.line, await streamed.begin()
    line.shards[1].before = gate
    error = await line.refusal(replace(step, deadline_ms=3000))
    assert (type(error), error.hop_index) == (DeadlineError, 1)
    assert line.session().in_flight == 0
    again = asyncio.create_task(line.send(step))
    await settle()
    gate.open()
    assert (await again).tokens[0].id == expected[1]
    assert [shard.forwards.count((12, 1)) for shard in line.shards] == [1, 1]


async def test_a_release_while_the_next_hop_works_is_told_at_once_and_the_stream_goes_on(
    streamed: Streamed, expected: list[int], gate: Gate
) -> None:
    line, step = streamed.line, await streamed.begin()
    beside = await streamed.begin("s-beside")
    line.shards[1].before = gate
    sent = asyncio.create_task(line.send(step))
    await gate.reached()
    assert await line.hops[0].release(SESSION) == 1
    with pytest.raises(CacheMissError) as caught:
        await asyncio.wait_for(sent, PATIENCE_S / 2)
    assert (caught.value.reason, caught.value.hop_index) == (MissReason.RELEASED, 0)
    gate.open()
    assert (await line.send(beside)).tokens[0].id == expected[1]
    assert streamed.waited == []
    assert streamed.relay.connections == 1


async def test_a_next_hop_that_loses_the_session_in_mid_step_is_named(streamed: Streamed, gate: Gate) -> None:
    line, step = streamed.line, await streamed.begin()
    line.shards[1].before = gate
    sent = asyncio.create_task(line.send(step))
    await gate.reached()
    await line.hops[1].release(SESSION)
    with pytest.raises(CacheMissError) as caught:
        await asyncio.wait_for(sent, PATIENCE_S / 2)
    assert (caught.value.reason, caught.value.hop_index, caught.value.boot) == (MissReason.RELEASED, 1, "b-1")
    gate.open()
    assert streamed.waited == []


async def test_a_door_that_closes_answers_the_steps_it_took_in(
    streamed: Streamed, expected: list[int], gate: Gate
) -> None:
    line, step = streamed.line, await streamed.begin()
    line.shards[1].before = gate
    sent = asyncio.create_task(line.send(step))
    await gate.reached()
    closing = asyncio.create_task(streamed.door.aclose())
    await settle()
    gate.open()
    reply = await sent
    assert reply.tokens[0].id == expected[1]
    await asyncio.wait_for(closing, 2 * PATIENCE_S)
    error = await line.refusal(decode_frame(reply.tokens[0].id, 13))
    assert (type(error), error.hop_index) == (HopUnreachableError, 1)
    assert line.session().in_flight == 0
