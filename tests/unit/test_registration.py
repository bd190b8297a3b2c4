"""How a node keeps its place at a tracker; time is scripted, nothing sleeps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import pytest

from announcements import node
from meshnet_core.clock import ManualClock
from meshnet_core.errors import InvalidInputError, MeshnetError, TrackerUnreachableError, UnknownNodeError
from meshnet_core.membership import NodeInfo
from meshnet_node.registration import Registration, RegistrationState
from meshnet_tracker.directory import Directory


class FakeTracker:
    """A directory behind the client's interface, that can be made to fail."""

    url = "http://tracker:7400"

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.directory = Directory(self.clock)
        self.failure: Exception | None = None
        self.heartbeats = 0
        self.goodbyes: list[tuple[str, str | None]] = []

    async def heartbeat(self, info: NodeInfo) -> float:
        self.heartbeats += 1
        if self.failure is not None:
            raise self.failure
        return self.directory.announce(info)

    async def leave(self, node_id: str, *, boot: str | None = None) -> None:
        self.goodbyes.append((node_id, boot))
        if self.failure is not None:
            raise self.failure
        self.directory.leave(node_id, boot)

    def ids(self) -> list[str]:
        return [entry.node_id for entry in self.directory.snapshot().nodes]


class Paces:
    """A sleep that lets the test say when it is over, and remembers what was asked for."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[float] = asyncio.Queue()
        self._over = asyncio.Semaphore(0)

    async def sleep(self, seconds: float) -> None:
        self.asked.put_nowait(seconds)
        await self._over.acquire()

    async def next_pause(self) -> float:
        """Seconds of the pause that now begins; the one before it is over."""
        return await asyncio.wait_for(self.asked.get(), 30)

    def wake(self) -> None:
        self._over.release()


@pytest.fixture
def tracker() -> FakeTracker:
    return FakeTracker()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="meshnet_node.registration")
    return lambda: [record.getMessage() for record in caplog.records]


def registration(
    tracker: FakeTracker, describe: Callable[[], NodeInfo] = lambda: node("a"), draw: float = 0.0
) -> Registration:
    return Registration(tracker, describe, draw=lambda: draw)


GONE = TrackerUnreachableError("no tracker answers at http://tracker:7400; start one")


async def test_a_node_announces_itself_and_beats_at_a_third_of_the_lease(tracker: FakeTracker) -> None:
    assert await registration(tracker).beat() == 5.0
    assert await registration(tracker, draw=0.999).beat() == pytest.approx(4.5, abs=0.01)
    assert tracker.ids() == ["a"]


async def test_every_heartbeat_describes_the_node_anew(tracker: FakeTracker) -> None:
    loads = iter([0, 3])
    keeper = registration(tracker, lambda: node("a", sessions=next(loads)))
    await keeper.beat()
    await keeper.beat()
    assert tracker.directory.snapshot().nodes[0].sessions == 3


async def test_a_tracker_that_restarted_knows_the_node_after_the_next_beat(tracker: FakeTracker) -> None:
    keeper = registration(tracker)
    await keeper.beat()
    tracker.directory = Directory(tracker.clock)
    assert tracker.ids() == []
    await keeper.beat()
    assert tracker.ids() == ["a"]


async def test_pauses_grow_while_no_tracker_answers_and_are_short_again_afterwards(tracker: FakeTracker) -> None:
    keeper = registration(tracker, draw=1.0)
    tracker.failure = GONE
    assert [await keeper.beat() for _ in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    tracker.failure = None
    await keeper.beat()
    tracker.failure = GONE
    assert await keeper.beat() == 0.5
    assert await registration(tracker, draw=0.0).beat() == 0.25


async def test_pauses_stay_bounded_after_a_very_long_outage(tracker: FakeTracker) -> None:
    keeper = registration(tracker, draw=1.0)
    tracker.failure = GONE
    assert {await keeper.beat() for _ in range(3000)} <= {0.5, 1.0, 2.0, 4.0, 8.0, 10.0}


async def test_a_lost_beat_is_tried_again_well_within_the_lease(tracker: FakeTracker) -> None:
    keeper = registration(tracker, draw=1.0)
    tracker.clock.advance(await keeper.beat())
    tracker.failure = GONE
    for _ in range(3):
        tracker.clock.advance(await keeper.beat())
    tracker.failure = None
    assert tracker.ids() == ["a"]


async def test_one_line_is_logged_for_each_change_and_not_for_each_try(
    tracker: FakeTracker, lines: Callable[[], list[str]]
) -> None:
    keeper = registration(tracker)
    for failure in (GONE, GONE, None, None, GONE, TrackerUnreachableError("it hangs now"), None):
        tracker.failure = failure
        await keeper.beat()
    registered = "registered as a with the tracker at http://tracker:7400, heartbeat every 5 s"
    unreachable = f"not registered: {GONE.message}"
    assert lines() == [unreachable, registered, unreachable, registered]


async def test_a_refusal_is_said_once_with_its_reason_and_tried_again(
    tracker: FakeTracker, lines: Callable[[], list[str]]
) -> None:
    keeper = registration(tracker, lambda: node("a", boot="b-1"))
    await keeper.beat()
    tracker.directory.announce(node("a", boot="b-2"))
    pauses = [await keeper.beat() for _ in range(3)]
    assert keeper.state is RegistrationState.REFUSED
    assert pauses == [0.25, 0.5, 1.0]
    assert len(lines()) == 2
    assert lines()[1].startswith("not registered: another process has registered as node a")
    tracker.directory.leave("a")
    assert await keeper.beat() == 5.0
    assert lines()[2].startswith("registered as a")


async def test_a_node_that_cannot_be_described_for_a_while_does_not_drop_out_for_good(
    tracker: FakeTracker, caplog: pytest.LogCaptureFixture
) -> None:
    broken = True

    def describe() -> NodeInfo:
        if broken:
            raise RuntimeError("a bug")
        return node("a")

    keeper = registration(tracker, describe)
    await keeper.beat()
    await keeper.beat()
    assert keeper.state is RegistrationState.FAILED
    assert caplog.text.count("RuntimeError: a bug") == 1
    broken = False
    await keeper.beat()
    assert tracker.ids() == ["a"]


@pytest.fixture
async def running(tracker: FakeTracker) -> AsyncIterator[tuple[Registration, Paces]]:
    paces = Paces()
    keeper = Registration(tracker, lambda: node("a"), sleep=paces.sleep, draw=lambda: 0.0)
    keeper.start()
    keeper.start()  # the second one changes nothing
    yield keeper, paces
    await keeper.stop()


async def test_it_beats_on_until_stopped_and_then_leaves(
    tracker: FakeTracker, running: tuple[Registration, Paces]
) -> None:
    keeper, paces = running
    assert await paces.next_pause() == 5.0
    for beats in (2, 3, 4):
        tracker.clock.advance(5)
        paces.wake()
        assert await paces.next_pause() == 5.0
        assert tracker.heartbeats == beats
        assert tracker.ids() == ["a"]
    await keeper.stop()
    await keeper.stop()
    assert tracker.goodbyes == [("a", "b-a")]
    assert tracker.ids() == []
    paces.wake()
    await asyncio.sleep(0)
    assert tracker.heartbeats == 4


@pytest.mark.parametrize("failure", [GONE, UnknownNodeError("no node a"), InvalidInputError("no"), TimeoutError()])
async def test_stopping_succeeds_whatever_the_tracker_says(
    tracker: FakeTracker, running: tuple[Registration, Paces], failure: MeshnetError | TimeoutError
) -> None:
    keeper, paces = running
    await paces.next_pause()
    tracker.failure = failure
    await keeper.stop()
    assert tracker.goodbyes == [("a", "b-a")]


async def test_stopping_in_the_midst_of_a_heartbeat_takes_the_node_out_again(tracker: FakeTracker) -> None:
    arrived = asyncio.Event()

    class Slow(FakeTracker):
        async def heartbeat(self, info: NodeInfo) -> float:
            self.directory.announce(info)
            arrived.set()
            await asyncio.Event().wait()
            return 15.0

    slow = Slow()
    keeper = registration(slow)
    keeper.start()
    await arrived.wait()
    await keeper.stop()
    assert slow.ids() == []


async def test_stopping_what_never_began_asks_nothing(tracker: FakeTracker) -> None:
    keeper = registration(tracker)
    await keeper.stop()
    keeper.start()
    await keeper.stop()  # before its first step
    assert tracker.goodbyes == []
