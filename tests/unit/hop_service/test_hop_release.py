"""A release ends a session whatever it is doing; what a node says of itself."""

from __future__ import annotations

import asyncio
import json

import pytest

from hop_line import EPOCH, GOOD, HIDDEN, PATIENCE_S, PROMPT, SESSION, STEPS, Gate, Line, settle, until
from in_process_mesh import random_prompt
from meshnet_core.clock import SystemClock
from meshnet_core.errors import CacheMissError, MissReason
from meshnet_core.frames import Frame
from meshnet_node.shard_work import ShardBackend

# -- release -----------------------------------------------------------------------------------------------------------


async def test_a_release_stops_the_frame_that_runs_between_layers_and_its_caller_gets_a_miss(
    line: Line, gate: Gate
) -> None:
    line.shards[0].before_layer = lambda: gate() if line.shards[0].layers_run == 1 else None
    await line.open()
    sent = asyncio.create_task(line.prefill(PROMPT))
    await gate.reached()  # before the second of two layers
    assert await line.hops[0].release(SESSION) == 1
    with pytest.raises(CacheMissError) as caught:
        await asyncio.wait_for(sent, PATIENCE_S / 2)  # at once, not when the layer is done
    assert (caught.value.reason, caught.value.hop_index, caught.value.boot) == (MissReason.RELEASED, 0, "b-0")
    gate.open()
    line.shards[0].before_layer = lambda: None
    await line.open(session="s-next")
    await line.prefill(PROMPT, session="s-next")  # the lane has left the other frame when it runs this one
    assert line.shards[0].layers_run == 1 + 2
    assert line.shards[0].forwards == [(0, 12)] * 2
    assert line.shards[1].forwards == [(0, 12)]


async def test_what_a_frame_runs_on_is_held_until_it_has_stopped(line: Line, gate: Gate) -> None:
    """Its caller is gone at once; its memory is not, and counts."""
    line.shards[0].before_layer = gate
    await line.open()
    sent = asyncio.create_task(line.prefill(PROMPT))
    await gate.reached()
    store = line.hops[0].store
    await line.hops[0].release(SESSION)
    with pytest.raises(CacheMissError):
        await asyncio.wait_for(sent, PATIENCE_S / 2)
    await settle()
    assert (len(store), store.nbytes > 0) == (0, True)
    gate.open()
    await until(lambda: store.nbytes == 0)


async def test_a_frame_that_only_waits_gives_its_room_back_at_once(line: Line, gate: Gate) -> None:
    line.shards[0].before = gate
    await line.open(session="s-runs")
    await line.open()
    runs = asyncio.create_task(line.prefill(PROMPT, session="s-runs"))
    await gate.reached()
    waits = asyncio.create_task(line.prefill(PROMPT))
    await until(lambda: line.session().in_flight == 1)
    await settle()
    store = line.hops[0].store
    room = store.nbytes
    await line.hops[0].release(SESSION)
    with pytest.raises(CacheMissError):
        await asyncio.wait_for(waits, PATIENCE_S / 2)
    await settle()
    assert store.nbytes <= room / 2
    gate.open()
    await runs
    assert line.shards[0].forwards == [(0, 12)]


async def test_a_release_stops_a_frame_that_waits_for_the_next_hop(line: Line) -> None:
    asked = asyncio.Event()

    async def hang(_: Frame) -> None:
        asked.set()
        await asyncio.Event().wait()

    line.wire.before = hang
    await line.open()
    sent = asyncio.create_task(line.prefill(PROMPT))
    await asyncio.wait_for(asked.wait(), 20)
    await line.hops[0].release(SESSION)
    with pytest.raises(CacheMissError) as caught:
        await asyncio.wait_for(sent, PATIENCE_S / 2)
    assert caught.value.reason is MissReason.RELEASED


async def test_a_release_ends_the_session_for_good(line: Line) -> None:
    await line.begin()
    await until(lambda: line.session(1).in_flight == 0)
    for hop in line.hops:
        assert await hop.release(SESSION) == 1
        assert await hop.release(SESSION) == 0
        assert hop.store.nbytes == 0
    error = await line.refusal(GOOD)
    assert isinstance(error, CacheMissError)
    assert error.reason is MissReason.RELEASED
    with pytest.raises(CacheMissError) as caught:
        await line.open(epoch=EPOCH + 1)
    assert caught.value.reason is MissReason.RELEASED


async def test_a_release_before_the_open_wins(line: Line) -> None:
    assert await line.hops[0].release(SESSION) == 0
    with pytest.raises(CacheMissError) as caught:
        await line.open()
    assert caught.value.reason is MissReason.RELEASED


async def test_a_release_of_older_epochs_leaves_the_newer_one_alone(line: Line, expected: list[int]) -> None:
    await line.open()
    reply = await line.prefill(PROMPT)
    for hop in line.hops:
        assert await hop.release(SESSION, EPOCH - 1) == 0
        assert len(hop.recent) == 0
    assert await line.decode(reply) == expected
    for hop in line.hops:
        assert await hop.release(SESSION, EPOCH) == 1
        assert [ended["positions"] for ended in hop.recent] == [len(PROMPT) + STEPS - 1]


async def test_closing_ends_what_waits(backends: list[ShardBackend], gate: Gate) -> None:
    line = Line(backends, SystemClock())
    line.shards[0].before = gate
    await line.open()
    sent = asyncio.create_task(line.prefill(PROMPT))
    await gate.reached()
    gate.open()
    await line.close()
    with pytest.raises(CacheMissError):
        await sent


# -- what it says of itself --------------------------------------------------------------------------------------------


async def test_a_probe_tells_how_far_a_session_is_and_how_busy_the_node(line: Line, gate: Gate) -> None:
    assert (await line.hops[0].probe(SESSION)).position is None
    await line.begin()
    probed = await line.hops[0].probe(SESSION)
    assert (probed.boot, probed.position, probed.queued) == ("b-0", 8, 0)
    assert (await line.hops[0].probe(None)).position is None
    line.shards[0].before = gate
    await line.open(session="s-other")
    sent = [asyncio.create_task(line.send(GOOD)), asyncio.create_task(line.prefill(PROMPT, session="s-other"))]
    await gate.reached()
    await settle()
    assert (await line.hops[0].probe(SESSION)).queued == 2  # one waits, one runs
    gate.open()
    await asyncio.gather(*sent)


async def test_timings_name_each_hop_and_the_bytes_it_passed_on(line: Line) -> None:
    await line.open()
    reply = await line.prefill(PROMPT)
    assert [(timing.hop_index, timing.sent_bytes) for timing in reply.timings] == [(0, 12 * HIDDEN * 4), (1, 0)]
    assert all(0 < timing.forward_ms <= timing.total_ms for timing in reply.timings)
    assert reply.timings[1].total_ms <= reply.timings[0].total_ms


async def test_the_status_is_json_and_counts(line: Line) -> None:
    await line.open()
    await line.decode(await line.prefill(PROMPT, chunk=5), 3)
    status = json.loads(json.dumps(line.hops[0].status()))
    running = status["running"][0]
    assert (running["session"], running["epoch"], running["layers"]) == (SESSION, EPOCH, "0-1")
    assert running["frames"] == {"prefill": 3, "decode": 2}
    assert running["received_bytes"] == 4 * (len(PROMPT) + 2)
    assert 0 < status["state_bytes"] <= status["reserved_bytes"]
    state = line.session().state
    assert state is not None
    assert status["state_bytes"] == state.nbytes


async def test_the_next_session_is_not_kept_waiting_for_steps_of_one_that_is_over(line: Line) -> None:
    await line.open()
    await line.decode(await line.prefill(PROMPT))
    for hop in line.hops:
        await hop.release(SESSION)
    for shard in line.shards:
        shard.forwards.clear()
    prompt = random_prompt(200)
    await line.open(session="s-next", prompt=prompt)
    await line.prefill(prompt, session="s-next")
    assert [shard.forwards for shard in line.shards] == [[(0, 200)]] * 2  # not in pieces
