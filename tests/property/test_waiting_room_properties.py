"""The waiting room under any traffic: oldest first, one try of a waiter at a time, nobody lost, within its bounds."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshnet_core.errors import CacheFullError
from meshnet_gateway.waiting_room import NoRoomError, WaitingRoom
from virtual_time import LoopClock, run_virtually

MAX_WAITING, MAX_WAIT_S = 4, 20.0


@dataclass(frozen=True)
class Visit:
    """One generation: when it comes, how old it is, how long it runs, and after how long its client leaves."""

    at: float
    arrival: int
    runs: float
    leaves: float | None
    needs: int
    silent: bool  # a session of another gateway: nobody hears of its end


@dataclass
class Watch:
    """Visits to a room, and what the rules are checked on."""

    room: WaitingRoom
    places: int
    took: float
    taken: int = 0
    trying: int = 0  # of those that waited
    waiting: dict[int, int] = field(default_factory=dict)  # arrivals by number of the visit
    faults: list[str] = field(default_factory=list)
    ended: dict[int, str] = field(default_factory=dict)

    async def come(self, number: int, visit: Visit) -> None:
        await asyncio.sleep(visit.at)
        self.ended[number] = await self.outcome(number, visit)
        if self.ended[number] == "served":
            await asyncio.sleep(visit.runs)
            self.taken -= visit.needs
            if not visit.silent:
                self.room.freed()

    async def outcome(self, number: int, visit: Visit) -> str:
        clock = LoopClock()
        began = clock.now()
        if self.room.waiting:
            self.waiting[number] = visit.arrival
        try:
            async with asyncio.timeout(visit.leaves):
                await self.room.admit("m", visit.arrival, lambda: self.attempt(number, visit))
        except NoRoomError:
            if clock.now() - began > MAX_WAIT_S + 2 * self.took + 0.01:
                self.faults.append("it waited beyond the limit")
            return "turned away"
        except CacheFullError as error:
            return "never" if error.never else "a refusal came through"
        except TimeoutError:
            return "left"
        finally:
            self.waiting.pop(number, None)
        return "served"

    async def attempt(self, number: int, visit: Visit) -> None:
        waited = number in self.waiting
        self.trying += waited
        self.check_turn(number, visit, waited)
        try:
            await asyncio.sleep(self.took)
            if self.taken + visit.needs > self.places:
                if visit.needs <= self.places:
                    self.waiting[number] = visit.arrival
                raise CacheFullError("full", never=visit.needs > self.places)
            self.taken += visit.needs
        finally:
            self.trying -= waited

    def check_turn(self, number: int, visit: Visit, waited: bool) -> None:
        if not waited and self.waiting:
            self.faults.append("a newcomer overtook those who wait")
        if waited and self.trying > 1:
            self.faults.append("two waiters tried at once")
        older = [arrival for other, arrival in self.waiting.items() if other != number and arrival < visit.arrival]
        if waited and older:
            self.faults.append(f"{visit.arrival} tried before {min(older)}")

    async def measure(self) -> None:
        while True:  # at moments when nothing else happens: who is turned away leaves within the same moment
            await asyncio.sleep(0.05071)
            if self.room.waiting > MAX_WAITING:
                self.faults.append("the line is beyond its bound")


visits = st.builds(
    Visit,
    at=st.floats(0, 10).map(lambda value: round(value, 2)),
    arrival=st.integers(0, 1000),
    runs=st.floats(0, 6).map(lambda value: round(value, 2)),
    leaves=st.none() | st.floats(0, 8).map(lambda value: round(value, 2)),
    needs=st.integers(1, 3),
    silent=st.booleans(),
)


@settings(deadline=None)
@given(
    crowd=st.lists(visits, min_size=1, max_size=14, unique_by=lambda visit: visit.arrival),
    places=st.integers(1, 4),
    took=st.sampled_from([0.0, 0.01, 1.5]),
    draws=st.lists(st.floats(0, 0.999), min_size=1, max_size=4),
)
@example(crowd=[Visit(0, n, 1, None, 1, False) for n in range(8)], places=1, took=0.0, draws=[0.5])
def test_oldest_first_one_at_a_time_and_nobody_lost(
    crowd: list[Visit], places: int, took: float, draws: list[float]
) -> None:
    async def scene() -> Watch:
        drawn = itertools.cycle(draws)
        room = WaitingRoom(LoopClock(), max_waiting=MAX_WAITING, max_wait_s=MAX_WAIT_S, draw=lambda: next(drawn))
        watch = Watch(room, places, took)
        measuring = asyncio.create_task(watch.measure())
        await asyncio.gather(*(watch.come(number, visit) for number, visit in enumerate(crowd)))
        measuring.cancel()
        return watch

    watch = run_virtually(scene)
    assert watch.faults == []
    assert watch.room.waiting == 0
    assert watch.taken == 0
    assert set(watch.ended.values()) <= {"served", "turned away", "never", "left"}
    for number, visit in enumerate(crowd):
        assert (watch.ended[number] == "never") <= (visit.needs > places)
        assert (watch.ended[number] == "left") <= (visit.leaves is not None)
