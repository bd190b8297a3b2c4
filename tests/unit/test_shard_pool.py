"""The pool of offered shards: what is loaded, what is dropped for it, who waits and who is refused."""

from __future__ import annotations

import asyncio

import pytest

from meshnet_core.clock import ManualClock
from meshnet_core.errors import CacheFullError, CacheMissError, HopFailedError, InvalidInputError, MissReason
from meshnet_core.layer_range import LayerRange
from meshnet_node.shard_line import IN_LINE_S, TURN_S
from meshnet_node.shard_pool import LoadedShard, ShardLease, ShardPool
from meshnet_node.shard_swaps import FAILURE_HOLD_S
from scripted_shards import LAYERS, ScriptedShards, fingerprint


def ask(pool: ShardPool, name: str, wait_s: float = 10.0, **options: object) -> asyncio.Task[ShardLease]:
    return asyncio.ensure_future(pool.acquire(fingerprint(name), LAYERS, wait_s=wait_s, **options))  # type: ignore[arg-type]


async def use(pool: ShardPool, name: str) -> None:
    """A session that opens and ends."""
    (await ask(pool, name)).end()


async def test_three_shards_asked_in_turn_are_two_in_memory_at_any_time() -> None:
    shards = ScriptedShards("abc")
    pool = ShardPool(shards.offers(), max_loaded=2)
    for name in "abcabc":
        await use(pool, name)
        assert len(shards.live()) <= 2
        assert shards.live()[-1] == name
    assert (pool.loads, pool.drops, pool.loaded) == (6, 4, 2)


async def test_the_least_recently_used_one_is_dropped() -> None:
    shards = ScriptedShards("abc")
    pool = ShardPool(shards.offers(), max_loaded=2)
    for name in "abac":
        await use(pool, name)
    assert shards.live() == ["a", "c"]


async def test_a_shard_in_use_is_not_dropped_for_being_used_long_ago() -> None:
    shards = ScriptedShards("abc")
    pool = ShardPool(shards.offers(), max_loaded=2)
    lease = await ask(pool, "a")
    await use(pool, "b")
    await use(pool, "c")
    assert shards.live() == ["a", "c"]
    lease.end()


async def test_with_all_in_use_the_next_is_refused_and_comes_in_when_one_is_free() -> None:
    shards = ScriptedShards("abc")
    pool = ShardPool(shards.offers(), max_loaded=2)
    first, second = await ask(pool, "a"), await ask(pool, "b")
    with pytest.raises(CacheFullError, match=r"layers 0-3 of c has to wait: all of the 2 shards .* are in use"):
        await ask(pool, "c")
    assert shards.live() == ["a", "b"]
    second.end()
    await use(pool, "c")
    assert shards.live() == ["a", "c"]
    first.end()


async def test_a_lease_ends_once() -> None:
    shards = ScriptedShards("ab")
    pool = ShardPool(shards.offers(), max_loaded=1)
    one, other = await ask(pool, "a"), await ask(pool, "a")
    one.end()
    one.end()
    assert pool.leases == 1
    with pytest.raises(CacheFullError):
        await ask(pool, "b")
    other.end()
    await use(pool, "b")


async def test_those_who_ask_for_one_shard_at_once_have_it_loaded_once() -> None:
    shards = ScriptedShards("a")
    pool = ShardPool(shards.offers(), max_loaded=1)
    shards.gate.clear()
    asked = [ask(pool, "a") for _ in range(8)]
    await asyncio.sleep(0.02)
    shards.gate.set()
    leases = await asyncio.gather(*asked)
    assert shards.loads("a") == 1
    assert len({id(lease.shard) for lease in leases}) == 1
    assert pool.leases == 8


async def test_others_go_on_while_one_is_loaded() -> None:
    shards = ScriptedShards("ab")
    pool = ShardPool(shards.offers())
    await use(pool, "a")
    shards.gate.clear()
    waiting = ask(pool, "b")
    await asyncio.sleep(0.02)
    async with asyncio.timeout(20):
        await use(pool, "a")
    assert not waiting.done()
    shards.gate.set()
    (await waiting).end()


async def test_a_shard_that_takes_long_is_refused_for_now_and_there_the_next_time() -> None:
    shards = ScriptedShards("a")
    pool = ShardPool(shards.offers())
    shards.gate.clear()
    with pytest.raises(CacheFullError, match="still being loaded, 25 % so far"):
        await ask(pool, "a", wait_s=0.05)
    shards.gate.set()
    await use(pool, "a")
    assert shards.loads("a") == 1


async def test_one_loaded_for_somebody_is_not_dropped_before_they_have_it() -> None:
    shards = ScriptedShards("abc")
    pool = ShardPool(shards.offers(), max_loaded=1)
    leases = await asyncio.gather(ask(pool, "a"), ask(pool, "b"), ask(pool, "c"), return_exceptions=True)
    taken = [lease for lease in leases if isinstance(lease, ShardLease)]
    assert len(taken) == 1
    assert len(shards.made) == 1


async def test_a_load_that_fails_is_told_to_all_who_wait_and_leaves_the_pool_usable() -> None:
    clock = ManualClock()
    shards = ScriptedShards("ab")
    pool = ShardPool(shards.offers(), max_loaded=1, clock=clock)
    await use(pool, "a")
    shards.failures["b"] = OSError("disk on fire")
    for error in await asyncio.gather(ask(pool, "b"), ask(pool, "b"), return_exceptions=True):
        assert isinstance(error, HopFailedError)
        assert error.message == "layers 0-3 of b could not be loaded: disk on fire"
    await use(pool, "a")
    with pytest.raises(HopFailedError):  # at once, and not at the cost of a
        await ask(pool, "b")
    assert shards.live() == ["a"]
    del shards.failures["b"]
    clock.advance(FAILURE_HOLD_S + 1)
    await use(pool, "b")
    assert shards.live() == ["b"]


async def test_a_stream_of_newcomers_does_not_keep_another_shard_out() -> None:
    clock = ManualClock()
    shards = ScriptedShards("abc")
    pool = ShardPool(shards.offers(), max_loaded=2, clock=clock)
    first = await ask(pool, "a")
    clock.advance(TURN_S)
    second = await ask(pool, "b")
    with pytest.raises(CacheFullError):
        await ask(pool, "c")
    with pytest.raises(CacheFullError):  # longest in memory, so it has to become free
        await ask(pool, "a")
    await use(pool, "b")
    again = await ask(pool, "a", in_use=True)  # a session that is there already goes on
    again.end()
    first.end()
    await use(pool, "c")
    assert shards.live() == ["b", "c"]
    second.end()


async def test_a_place_in_line_lapses() -> None:
    clock = ManualClock()
    shards = ScriptedShards("ab")
    pool = ShardPool(shards.offers(), max_loaded=1, clock=clock)
    lease = await ask(pool, "a")
    clock.advance(TURN_S)
    with pytest.raises(CacheFullError):
        await ask(pool, "b")
    with pytest.raises(CacheFullError):
        await ask(pool, "a")
    clock.advance(IN_LINE_S)
    await use(pool, "a")
    lease.end()


async def test_sessions_that_idle_are_asked_to_leave_before_anyone_is_refused() -> None:
    shards = ScriptedShards("ab")
    pool = ShardPool(shards.offers(), max_loaded=1)
    lease = await ask(pool, "a")
    asked: list[LoadedShard] = []

    def make_idle(shard: LoadedShard) -> bool:
        asked.append(shard)
        lease.end()
        return True

    (await ask(pool, "b", make_idle=make_idle)).end()
    assert [shard.model for shard in asked] == ["a"]


async def test_what_is_announced_of_a_shard_that_is_not_loaded() -> None:
    shards = ScriptedShards("ab", weight_bytes=5)
    pool = ShardPool(shards.offers(), max_loaded=1)
    assert [(offer.info().loaded, offer.info().weight_bytes) for offer in pool] == [(False, 5), (False, 5)]
    lease = await ask(pool, "a")
    lease.shard.measure(2, 1, decode=True, forward_s=0.004)
    lease.end()
    await use(pool, "b")
    assert [(offer.info().loaded, offer.info().decode_ms) for offer in pool] == [(False, 2.0), (True, None)]
    await use(pool, "a")
    assert next(iter(pool)).info().decode_ms == 2.0


async def test_a_range_is_found_by_its_end_and_a_loaded_shard_comes_first() -> None:
    shards = ScriptedShards("a")
    wide, narrow, other = (shards.offer("a", LayerRange.parse(layers)) for layers in ("0-3", "2-3", "0-1"))
    pool = ShardPool([wide, narrow, other], max_loaded=2)
    wanted = LayerRange.parse("3-3")
    assert pool.find(fingerprint("a"), wanted) is narrow
    await use(pool, "a")
    assert pool.find(fingerprint("a"), wanted) is wide
    assert pool.count(fingerprint("a"), [LayerRange(0, 2), wanted, LayerRange(0, 9)]) == 2
    for name, layers, reason in (("b", "0-3", MissReason.MODEL_MISMATCH), ("a", "0-2", MissReason.RANGE_MISMATCH)):
        with pytest.raises(CacheMissError) as caught:
            await pool.acquire(fingerprint(name), LayerRange.parse(layers), wait_s=1)
        assert caught.value.reason is reason


def test_at_the_start_as_many_as_fit_the_number_are_loaded() -> None:
    shards = ScriptedShards("abc")
    pool = ShardPool(shards.offers(), max_loaded=2)
    told: list[tuple[str, int, int]] = []
    pool.load_first(lambda offer, done, total: told.append((str(offer), done, total)))
    assert shards.live() == ["a", "b"]
    assert told[:2] == [("layers 0-3 of a", 0, 1), ("layers 0-3 of a", 1, 4)]


def test_a_node_whose_memory_does_not_do_says_what_would() -> None:
    shards = ScriptedShards("abc", weight_bytes=2**30)
    pool = ShardPool(shards.offers(), max_loaded=2, free_bytes=lambda: 2**30)
    with pytest.raises(InvalidInputError, match=r"take 2.00 GiB, and 1.00 GiB .* free.*fewer layers.*shards 1"):
        pool.load_first(lambda offer, done, total: None)
    assert shards.made == []
    ShardPool(shards.offers(), max_loaded=1, free_bytes=lambda: 2**30).load_first(lambda offer, done, total: None)


async def test_where_memory_is_short_idle_shards_give_way_and_those_in_use_do_not() -> None:
    shards = ScriptedShards("abc", weight_bytes=10)
    pool = ShardPool(shards.offers(), free_bytes=lambda: 20 - 10 * len(shards.live()))
    await use(pool, "a")
    lease = await ask(pool, "b")
    await use(pool, "c")
    assert shards.live() == ["b", "c"]
    another = await ask(pool, "c")
    with pytest.raises(CacheFullError, match="no memory for layers 0-3 of a"):
        await ask(pool, "a")
    lease.end()
    another.end()


async def test_one_that_would_not_fit_alone_says_so() -> None:
    shards = ScriptedShards("ab", weight_bytes=10)
    pool = ShardPool(shards.offers(), free_bytes=lambda: 5)
    with pytest.raises(HopFailedError, match=r"could not be loaded: the weights .* Serve fewer layers"):
        await ask(pool, "a")


def test_no_place_for_any_shard_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least 1"):
        ShardPool(ScriptedShards("a").offers(), max_loaded=0)


async def test_closing_stops_what_is_being_loaded() -> None:
    shards = ScriptedShards("a")
    pool = ShardPool(shards.offers())
    shards.gate.clear()
    waiting = ask(pool, "a", wait_s=0.2)
    await asyncio.sleep(0.02)
    await pool.close()
    shards.gate.set()
    with pytest.raises(CacheFullError):
        await waiting
    assert pool.loaded == 0
