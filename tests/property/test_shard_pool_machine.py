"""The pool of shards under any order of asking, ending and waiting: its bookkeeping against a plain list."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st

from meshnet_core.clock import ManualClock
from meshnet_core.errors import CacheFullError, HopFailedError
from meshnet_node.shard_line import IN_LINE_S
from meshnet_node.shard_pool import ShardLease, ShardPool
from meshnet_node.shard_swaps import FAILURE_HOLD_S
from scripted_shards import LAYERS, ScriptedShards, fingerprint

NAMES = "abcd"
names = st.sampled_from(NAMES)


class PoolMachine(stateful.RuleBasedStateMachine):
    """Checks after every step: never more in memory than allowed, nothing leased dropped, nothing in memory twice."""

    @stateful.initialize(max_loaded=st.integers(1, len(NAMES)))
    def begin(self, max_loaded: int) -> None:
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.shards = ScriptedShards(NAMES)
        self.pool = ShardPool(self.shards.offers(), max_loaded=max_loaded, clock=self.clock)
        self.leases: list[ShardLease] = []
        self.used: list[str] = []  # those in memory, least recently used first
        self.line_is_empty = True

    @stateful.rule(name=names)
    def ask(self, name: str) -> None:
        leased = {lease.shard.model for lease in self.leases}
        in_memory = set(self.used)
        idle = [model for model in self.used if model not in leased]
        free = name in in_memory or len(in_memory) < self.pool.max_loaded or idle
        try:
            lease = self.runner.run(self._acquire(name))
        except CacheFullError:
            assert not (free and self.line_is_empty)
            self.line_is_empty = False
            return
        assert free
        assert lease.shard.model == name
        if name not in in_memory and len(in_memory) == self.pool.max_loaded:
            self.used.remove(idle[0])  # the least recently used of those that nobody leases, and no other
        self.leases.append(lease)
        self._note_use(name)

    @stateful.rule(data=st.data())
    @stateful.precondition(lambda self: self.leases)
    def end(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.runner.run(self._end(lease))
        self._note_use(lease.shard.model)

    @stateful.rule(name=names)
    def fail_to_load(self, name: str) -> None:
        """Of one that is not in memory; what gave way for it is gone."""
        leased = {lease.shard.model for lease in self.leases}
        idle = [model for model in self.used if model not in leased]
        full = len(self.used) == self.pool.max_loaded
        if name in self.used or not self.line_is_empty or (full and not idle):
            return
        self.shards.failures[name] = OSError("no such file")
        with pytest.raises(HopFailedError):
            self.runner.run(self._acquire(name))
        del self.shards.failures[name]
        if full:
            self.used.remove(idle[0])
        self.clock.advance(FAILURE_HOLD_S + 1)

    @stateful.rule()
    def let_the_line_lapse(self) -> None:
        self.clock.advance(IN_LINE_S)
        self.line_is_empty = True

    @stateful.invariant()
    def memory_is_as_the_list_says(self) -> None:
        if not hasattr(self, "pool"):
            return
        live = self.shards.live()
        assert len(live) == len(set(live)) <= self.pool.max_loaded
        assert set(live) == set(self.used) == {o.known.model for o in self.pool if o.shard is not None}
        assert self.pool.loaded == len(live)
        assert self.pool.leases == len(self.leases)
        for lease in self.leases:
            assert not lease.shard.backend.closed  # type: ignore[attr-defined]

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for lease in self.leases:
            lease.end()
        self.leases.clear()
        self.let_the_line_lapse()
        for name in NAMES:  # whatever happened, each can still be had
            self.runner.run(self._acquire(name)).end()
        self.runner.close()

    async def _acquire(self, name: str) -> ShardLease:
        return await self.pool.acquire(fingerprint(name), LAYERS, wait_s=20)

    async def _end(self, lease: ShardLease) -> None:
        lease.end()

    def _note_use(self, name: str) -> None:
        if name in self.used:
            self.used.remove(name)
        self.used.append(name)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
