"""What a node measures off the users' path: shards that nobody uses, links that nobody sends over; and how it tells."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from announcements import node, shard
from in_process_mesh import FINGERPRINT, MODEL
from meshnet_core.clock import ManualClock
from meshnet_core.errors import HopUnreachableError, TrackerUnreachableError
from meshnet_core.layer_range import LayerRange
from meshnet_core.link_info import Neighbour
from meshnet_core.link_times import LinkTimes
from meshnet_core.membership import NodeInfo
from meshnet_core.open_document import ProbeReply
from meshnet_core.transport import InProcessTransport
from meshnet_node.forward_lane import ForwardLane
from meshnet_node.link_probes import STALE_S as LINK_STALE_S
from meshnet_node.link_probes import LinkProbes
from meshnet_node.shard_loader import load_shard
from meshnet_node.shard_pool import LoadedShard, ShardPool
from meshnet_node.shard_probes import MEASURED_STEPS, STALE_S, ShardProbes
from meshnet_node.shard_work import ShardResult, ShardWork
from meshnet_node.speed_watch import SpeedWatch

# -- shards -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def lane() -> AsyncIterator[ForwardLane]:
    lane = ForwardLane()
    yield lane
    lane.close()


@pytest.mark.parametrize("layers", ["0-1", "1-2", "2-3", "0-3"])
async def test_a_shard_that_nobody_used_is_measured_wherever_it_lies(
    llama: Path, lane: ForwardLane, layers: str
) -> None:
    held = LoadedShard(load_shard(llama, LayerRange.parse(layers), dtype="float32"), MODEL, FINGERPRINT, 512)
    await ShardProbes(ShardPool([held]), lane, ManualClock()).round()
    info = held.info()
    assert info.decode_ms is not None
    assert info.decode_ms > 0
    assert info.decode_evidence is not None
    assert info.decode_evidence.count == MEASURED_STEPS


async def test_a_shard_is_measured_again_when_its_measurement_is_old(llama: Path, lane: ForwardLane) -> None:
    clock = ManualClock()
    held = LoadedShard(load_shard(llama, LayerRange(0, 2), dtype="float32"), MODEL, FINGERPRINT, 512)
    probes = ShardProbes(ShardPool([held]), lane, clock)
    counts = []
    for waited_s in (0.0, STALE_S - 1, 1.0):
        clock.advance(waited_s)
        await probes.round()
        counts.append(held.decode_ms.count)
    assert counts == [MEASURED_STEPS, MEASURED_STEPS, 2 * MEASURED_STEPS]


async def test_no_shard_is_measured_while_frames_wait(llama: Path, lane: ForwardLane) -> None:
    held = LoadedShard(load_shard(llama, LayerRange(0, 2), dtype="float32"), MODEL, FINGERPRINT, 512)
    gate = threading.Event()

    begun = threading.Event()

    class Blocked:
        batch_limit = 1

        def forward(self, works: list[ShardWork]) -> list[ShardResult]:
            begun.set()
            assert gate.wait(60), "it was measured, or nobody opened the gate"
            return [ShardResult(None, None, 0.0) for _ in works]

    work = ShardWork(0, None, 0, 1, bytes(4), "float32")

    running = [asyncio.create_task(lane.run(turn, Blocked(), work, lambda result: result)) for turn in range(2)]  # type: ignore[arg-type]
    await asyncio.to_thread(begun.wait, 10)
    assert lane.queued == 2  # the one that runs, and the one behind it
    await ShardProbes(ShardPool([held]), lane, ManualClock()).round()
    gate.set()
    await asyncio.gather(*running)
    assert held.decode_ms.value is None


async def test_whoever_comes_right_after_a_measurement_has_the_lane_alone(llama: Path) -> None:
    """A prompt runs whole, and no step waits for one more of the measurement's."""
    backend = load_shard(llama, LayerRange(0, 2), dtype="float32")
    lane = ForwardLane(now=lambda: 0.0)
    try:
        await ShardProbes(ShardPool([LoadedShard(backend, MODEL, FINGERPRINT, 512)]), lane, ManualClock()).round()
        ran: list[int] = []
        forward = backend.forward

        def counted(works: Sequence[ShardWork]) -> list[ShardResult | Exception]:
            ran.extend(work.seq_len for work in works)
            return forward(works)

        backend.forward = counted  # type: ignore[method-assign]
        work = ShardWork(0, backend.new_state(0), 0, 200, bytes(4 * 200), "float32")
        await lane.run("prompt", backend, work, lambda result: result)
    finally:
        lane.close()
    assert ran == [200]


# -- links ------------------------------------------------------------------------------------------------------------


class SlowWay(InProcessTransport):
    """Every probe takes ``ms`` of a manual clock, the first one ten times that; nodes not named are gone."""

    def __init__(self, clock: ManualClock, ms: dict[str, float]) -> None:
        super().__init__()
        self.clock, self.ms = clock, ms
        self.probed: list[str] = []

    async def probe(self, url: str, session: str | None) -> ProbeReply:
        assert session is None
        if url not in self.ms:
            raise HopUnreachableError("gone")
        self.clock.advance(self.ms[url] / 1000 * (10 if url not in self.probed else 1))
        self.probed.append(url)
        return ProbeReply("boot", None, 0)


def probes_of(*named: str, ms: dict[str, float]) -> tuple[LinkProbes, LinkTimes, SlowWay, ManualClock]:
    clock = ManualClock()
    links, way = LinkTimes(clock), SlowWay(clock, ms)

    async def neighbours() -> list[Neighbour]:
        return [Neighbour(name, f"http://{name}") for name in named]

    return LinkProbes(neighbours, way, links, clock), links, way, clock


async def test_links_to_neighbours_are_measured_once_their_connection_is_open() -> None:
    probes, links, _, _ = probes_of("b", "c", ms={"http://b": 0.5, "http://c": 20.0})
    await probes.round()
    assert {link.node_id: round(link.rtt_ms, 6) for link in links.told()} == {"b": 0.5, "c": 20.0}


async def test_a_link_that_frames_went_over_lately_is_not_probed() -> None:
    probes, links, way, clock = probes_of("b", ms={"http://b": 0.5})
    links.took("b", 3.0, 2.0)
    await probes.round()
    assert way.probed == []
    clock.advance(LINK_STALE_S)
    await probes.round()
    assert way.probed == ["http://b", "http://b"]


async def test_a_neighbour_that_is_gone_keeps_nobody_from_the_others() -> None:
    probes, links, _, _ = probes_of("gone", "b", ms={"http://b": 0.5})
    await probes.round()
    assert [link.node_id for link in links.told()] == ["b"]


async def test_while_no_tracker_answers_nobody_is_probed() -> None:
    clock = ManualClock()

    async def nobody() -> list[Neighbour]:
        raise TrackerUnreachableError("no tracker answers")

    links = LinkTimes(clock)
    await LinkProbes(nobody, SlowWay(clock, {}), links, clock).round()
    assert links.told() == ()


# -- telling ----------------------------------------------------------------------------------------------------------


async def test_a_speed_that_changed_is_told_at_once_and_one_that_did_not_is_not() -> None:
    now = node("a", shard("0-3", decode_ms=None))
    told: list[NodeInfo] = []

    async def announce() -> None:
        told.append(now)

    watch = SpeedWatch(lambda: now, announce)
    speeds = []
    for ms in (None, 1.0, 1.2, 1.29, 1.4, 1.1, 1.0, 9.0):
        now = replace(now, shards=(replace(now.shards[0], decode_ms=ms),))
        await watch.look()
        speeds.append(len(told))
    assert speeds == [0, 1, 1, 1, 2, 2, 3, 4]
