"""A node that moves from some layers to others: what is loaded and announced when, and what sessions keep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from meshnet_core.clock import ManualClock
from meshnet_core.errors import CacheMissError, HopFailedError
from meshnet_core.layer_range import LayerRange
from meshnet_core.placeable import Wish
from meshnet_node.offered_shard import OfferedShard
from meshnet_node.shard_mover import FAILURE_HOLD_S, RELEASE_S, ShardMover
from meshnet_node.shard_pool import ShardPool
from scripted_shards import ScriptedShards, fingerprint

FIRST, SECOND, ALL = LayerRange(0, 2), LayerRange(2, 4), LayerRange(0, 4)


class Node:
    """One node with layers 0-1 of model "m" loaded; what it announces is written down, after each of its steps."""

    def __init__(self, *, beside: bool = True) -> None:
        self.shards = ScriptedShards(["m"])
        self.pool = ShardPool([self.shards.offer("m", FIRST)])
        self.pool.load_first(lambda offer, done, total: None)
        self.clock = ManualClock()
        self.told: list[tuple[str, list[str]]] = []  # target, layers served
        self.beside = beside
        self.prepared: list[LayerRange] = []
        self.mover = ShardMover(
            self.pool,
            FIRST,
            make_offer=self.make_offer,
            fits_beside=lambda offer: self.beside or self.pool.loaded == 0,
            announce=self.announce,
            clock=self.clock,
            sleep=self.sleep,
        )

    def make_offer(self, layers: LayerRange) -> OfferedShard:
        self.prepared.append(layers)
        return self.shards.offer("m", layers)

    async def announce(self) -> None:
        self.told.append((str(self.mover.target), [str(offer.layers) for offer in self.pool]))

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await asyncio.sleep(0.001)

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not what():  # noqa: ASYNC110  what is waited for has no event
                await asyncio.sleep(0.001)

    async def move(self, layers: LayerRange) -> None:
        self.mover.told(Wish(layers))
        self.mover.told(Wish(layers))
        await self.until(lambda: not self.mover.is_moving)

    @property
    def ranges(self) -> list[str]:
        """In memory."""
        return [str(backend.layers) for _, backend in self.shards.made if not backend.closed]


async def test_the_new_shard_is_loaded_and_announced_before_the_old_one_goes() -> None:
    node = Node()
    await node.move(SECOND)
    await node.until(lambda: node.ranges == ["2-3"])
    assert node.told == [("2-3", ["0-1"]), ("2-3", ["0-1", "2-3"]), ("2-3", ["2-3"])]
    assert (node.mover.moves, node.mover.failures, node.pool.max_loaded, node.pool.loaded) == (1, 0, 1, 1)


async def test_sessions_run_to_their_end_on_the_old_shard() -> None:
    node = Node()
    lease = await node.pool.acquire(fingerprint("m"), FIRST, wait_s=1)
    await node.move(SECOND)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert node.ranges == ["0-1", "2-3"]
    again = await node.pool.acquire(fingerprint("m"), FIRST, wait_s=1, in_use=True)  # a newer epoch of it
    again.end()
    lease.end()
    await node.until(lambda: node.ranges == ["2-3"])
    with pytest.raises(CacheMissError, match="0-1 asked for, 2-3 held"):
        await node.pool.acquire(fingerprint("m"), FIRST, wait_s=1)


async def test_the_old_shard_is_offered_until_the_others_serve_their_part() -> None:
    node = Node()
    node.mover.told(Wish(SECOND))
    await node.until(lambda: len(node.told) == 2)
    node.mover.told(Wish(SECOND, may_release=False))
    await node.until(lambda: node.clock.now() > RELEASE_S / 2)
    assert node.told[-1] == ("2-3", ["0-1", "2-3"])
    node.mover.told(Wish(SECOND, may_release=True))
    await node.until(lambda: node.ranges == ["2-3"])
    assert node.clock.now() < RELEASE_S


async def test_the_others_are_not_waited_for_without_end() -> None:
    node = Node()
    node.mover.told(Wish(SECOND))
    await node.until(lambda: node.ranges == ["2-3"])
    assert node.clock.now() >= RELEASE_S


async def test_without_memory_for_both_the_old_one_is_drained_and_dropped_first() -> None:
    node = Node(beside=False)
    lease = await node.pool.acquire(fingerprint("m"), FIRST, wait_s=1)
    node.mover.told(Wish(SECOND))
    await node.until(lambda: len(node.told) == 2)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert (node.ranges, node.told[-1]) == (["0-1"], ("2-3", []))
    lease.end()
    await node.until(lambda: node.ranges == ["2-3"])
    await node.until(lambda: node.told[-1] == ("2-3", ["2-3"]))


async def test_what_cannot_be_loaded_leaves_all_as_it_was_and_is_not_tried_again_at_once() -> None:
    node = Node()
    node.shards.failures["m"] = RuntimeError("no such file")
    await node.move(SECOND)
    assert (node.mover.target, node.mover.failures, node.ranges) == (FIRST, 1, ["0-1"])
    assert node.told[-1] == ("0-1", ["0-1"])
    assert node.pool.max_loaded == 1
    del node.shards.failures["m"]
    await node.move(SECOND)
    assert node.prepared == [SECOND]
    node.clock.advance(FAILURE_HOLD_S)
    await node.move(SECOND)
    await node.until(lambda: node.ranges == ["2-3"])


async def test_a_node_that_dropped_its_layers_for_others_and_failed_asks_anew() -> None:
    node = Node(beside=False)
    node.shards.failures["m"] = RuntimeError("no such file")
    await node.move(SECOND)
    assert (node.mover.target, node.told[-1]) == (None, ("None", []))


async def test_a_move_back_finds_the_old_shard_still_there() -> None:
    node = Node()
    lease = await node.pool.acquire(fingerprint("m"), FIRST, wait_s=1)
    await node.move(SECOND)
    await node.move(FIRST)
    assert node.told[-1] == ("0-1", ["0-1"])
    assert node.shards.loads("m") == 2
    lease.end()
    await node.until(lambda: node.ranges == ["0-1"])


async def test_one_wish_at_a_time_and_none_for_what_is_held() -> None:
    node = Node()
    node.mover.told(Wish(FIRST))
    node.mover.told(Wish(None))
    assert not node.mover.is_moving
    node.shards.gate.clear()
    node.mover.told(Wish(SECOND))
    node.mover.told(Wish(ALL))
    await node.until(lambda: node.prepared == [SECOND])
    node.shards.gate.set()
    node.mover.told(Wish(SECOND))
    await node.until(lambda: node.ranges == ["2-3"])
    assert node.prepared == [SECOND]


async def test_closing_stops_a_move() -> None:
    node = Node()
    node.shards.gate.clear()
    node.mover.told(Wish(SECOND))
    await node.until(lambda: node.prepared == [SECOND])
    await node.mover.close()
    node.shards.gate.set()
    await node.pool.close()
    assert [str(offer.layers) for offer in node.pool] == ["0-1"]


async def test_a_load_that_fails_is_told_to_whoever_adds_it() -> None:
    node = Node()
    node.shards.failures["m"] = RuntimeError("disk gone")
    with pytest.raises(HopFailedError, match="layers 2-3 of m could not be loaded: disk gone"):
        await node.pool.add(node.shards.offer("m", SECOND))
    assert [str(offer.layers) for offer in node.pool] == ["0-1"]
