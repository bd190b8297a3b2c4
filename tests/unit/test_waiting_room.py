"""The waiting room: who tries when, who goes first, and who is turned away. Time is virtual, nothing sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from meshnet_core.errors import CacheFullError, DeadlineError
from meshnet_gateway.waiting_room import NoRoomError, WaitingRoom
from virtual_time import LoopClock, run_virtually


@dataclass
class Room:
    """A waiting room before so many places, with a note of every try."""

    places: int
    max_waiting: int = 256
    max_wait_s: float = 120.0
    draw: float = 0.0
    held: list[str] = field(default_factory=list)
    tries: list[tuple[float, str]] = field(default_factory=list)
    clock: LoopClock = field(default_factory=LoopClock)

    def __post_init__(self) -> None:
        self.waiting = WaitingRoom(
            self.clock, max_waiting=self.max_waiting, max_wait_s=self.max_wait_s, draw=lambda: self.draw
        )

    def attempt(self, name: str, error: Exception | None = None) -> Callable[[], Awaitable[str]]:
        async def attempt() -> str:
            self.tries.append((self.clock.now(), name))
            await asyncio.sleep(0.001)
            if error is not None:
                raise error
            if len(self.held) >= self.places:
                raise CacheFullError(f"no room for {name}", hop_index=1)
            self.held.append(name)
            return name

        return attempt

    def start(self, name: str, arrival: int, model: str = "m", error: Exception | None = None) -> asyncio.Task[str]:
        return asyncio.create_task(self.waiting.admit(model, arrival, self.attempt(name, error)), name=name)

    def end(self, name: str) -> None:
        self.held.remove(name)
        self.waiting.freed()

    def tried(self, name: str) -> list[float]:
        return [round(at, 2) for at, who in self.tries if who == name]


def test_with_room_a_generation_is_admitted_at_once() -> None:
    async def scene() -> None:
        room = Room(2)
        assert await asyncio.gather(*(room.start(name, 0) for name in "ab")) == ["a", "b"]
        assert room.clock.now() < 0.01
        assert (room.waiting.waits, room.waiting.waiting) == (0, 0)

    run_virtually(scene)


def test_the_oldest_tries_when_a_generation_ends_and_the_others_in_their_turn() -> None:
    async def scene() -> None:
        room = Room(1, draw=0.999)
        await room.start("a", 0)
        b, c = room.start("b", 1), room.start("c", 2)
        await asyncio.sleep(0.1)
        assert room.waiting.waiting == 2
        room.end("a")
        assert await b == "b"
        assert round(room.clock.now(), 2) == 0.1
        await asyncio.sleep(0.1)
        assert not c.done()
        room.end("b")
        assert await c == "c"
        assert room.held == ["c"]
        assert room.waiting.waits == 2

    run_virtually(scene)


def test_without_a_word_the_oldest_alone_tries_after_a_drawn_while() -> None:
    async def scene() -> None:
        room = Room(1, draw=0.5)  # between two tries 0.6 s
        await room.start("a", 0)
        b, c = room.start("b", 1), room.start("c", 2)
        await asyncio.sleep(1.9)
        assert room.tried("b") == [0.0, 0.6, 1.2, 1.8]
        assert room.tried("c") == [0.0]
        room.held.clear()  # a session of another gateway ended
        assert await b == "b"
        assert round(room.clock.now(), 1) == 2.4
        c.cancel()

    run_virtually(scene)


def test_a_newcomer_does_not_overtake_who_waits() -> None:
    async def scene() -> None:
        room = Room(1, draw=0.999)
        await room.start("a", 0)
        b = room.start("b", 1)
        await asyncio.sleep(0.5)
        room.held.clear()  # there is room, but nobody has noticed yet
        c = room.start("c", 2)
        assert await b == "b"
        assert room.tried("c") == []
        await asyncio.sleep(0.1)
        room.end("b")
        assert await c == "c"

    run_virtually(scene)


def test_an_older_generation_that_lost_its_room_goes_ahead() -> None:
    async def scene() -> None:
        room = Room(1, draw=0.999)
        await room.start("young", 5)
        first, second = room.start("b", 6), room.start("c", 7)
        await asyncio.sleep(0.1)
        old = room.start("old", 1)
        await asyncio.sleep(0.1)
        room.end("young")
        assert await old == "old"
        await asyncio.sleep(0.1)
        assert not first.done()
        room.end("old")
        assert await first == "b"
        second.cancel()

    run_virtually(scene)


def test_a_cancelled_waiter_leaves_at_once_and_wakes_the_next() -> None:
    async def scene() -> None:
        room = Room(1, draw=0.999)
        await room.start("a", 0)
        b, c = room.start("b", 1), room.start("c", 2)
        await asyncio.sleep(0.1)
        room.held.clear()
        b.cancel()
        assert await c == "c"
        assert round(room.clock.now(), 2) == 0.1
        assert b.cancelled()
        assert room.waiting.waiting == 0

    run_virtually(scene)


def test_a_full_line_turns_the_youngest_away() -> None:
    async def scene() -> None:
        room = Room(1, max_waiting=2)
        await room.start("a", 1)
        b, c, d = (room.start(name, arrival) for name, arrival in (("b", 2), ("c", 3), ("d", 4)))
        with pytest.raises(NoRoomError, match=r"2 generations are waiting.*no room for d") as caught:
            await d
        assert caught.value.hop_index == 1
        assert caught.value.to_wire()["error"]["code"] == "cache_full"
        old = room.start("old", 0)
        with pytest.raises(NoRoomError):
            await c
        assert room.waiting.turned_away == 2
        assert room.waiting.waiting == 2
        for task in (b, old):
            task.cancel()

    run_virtually(scene)


def test_the_waiting_has_a_limit() -> None:
    async def scene() -> None:
        room = Room(1, max_wait_s=10.0)
        await room.start("a", 0)
        b = room.start("b", 1)
        await asyncio.sleep(4)
        c = room.start("c", 2)
        with pytest.raises(NoRoomError, match="no room was found in 10 s"):
            await b
        assert round(room.clock.now(), 1) == 10.0
        with pytest.raises(NoRoomError):
            await c
        assert round(room.clock.now(), 1) == 14.0
        assert room.waiting.waiting == 0
        assert round(room.waiting.waited_s) == 20

    run_virtually(scene)


@pytest.mark.parametrize("waits_first", [False, True])
def test_what_will_never_have_room_does_not_wait(waits_first: bool) -> None:
    async def scene() -> None:
        room = Room(1)
        await room.start("a", 0)
        before = room.start("b", 1) if waits_first else None
        await asyncio.sleep(0.01)
        giant = room.start("giant", 2, error=CacheFullError("too big", never=True))
        if before is not None:
            before.cancel()
        with pytest.raises(CacheFullError, match="too big"):
            await giant
        assert room.waiting.waiting == 0

    run_virtually(scene)


def test_another_failure_of_a_try_ends_the_waiting_and_wakes_the_next() -> None:
    async def scene() -> None:
        room = Room(1, draw=0.999)
        await room.start("a", 0)
        b = room.start("b", 1)
        c = room.start("c", 2, error=DeadlineError("hung"))
        d = room.start("d", 3)
        await asyncio.sleep(0.1)
        room.held.clear()
        b.cancel()
        assert await d == "d"
        with pytest.raises(DeadlineError):
            await c
        assert round(room.clock.now(), 2) == 0.1

    run_virtually(scene)


def test_a_try_that_hangs_holds_up_nobody_of_another_model() -> None:
    async def scene() -> None:
        room = Room(1, draw=0.0)
        await room.start("a", 0)
        hung = asyncio.Event()
        calls = 0

        async def hang() -> str:
            nonlocal calls
            calls += 1
            if calls > 1:
                await hung.wait()
            raise CacheFullError("full")

        stuck = asyncio.create_task(room.waiting.admit("sick", 1, hang))
        behind = room.start("behind", 2, model="sick")
        other = room.start("other", 3)
        await asyncio.sleep(5)
        assert calls == 2
        room.end("a")
        assert await other == "other"
        assert round(room.clock.now(), 2) == 5.0
        assert not behind.done()
        for task in (stuck, behind):
            task.cancel()

    run_virtually(scene)
