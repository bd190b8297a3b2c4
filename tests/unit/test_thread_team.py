"""One thread has the team, and ends it before another one computes."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from meshnet_node.cpu_threads import take_cpu_threads
from meshnet_node.thread_team import ThreadTeam, team_of


def test_the_thread_that_took_it_ends_it_and_once() -> None:
    ended: list[int] = []
    team = ThreadTeam(lambda: ended.append(threading.get_ident()))
    team.leave()
    assert not team.is_elsewhere
    with ThreadPoolExecutor(1) as other:
        other.submit(team.take).result()
        assert team.is_elsewhere
        team.leave()
        assert ended == []
        other.submit(team.leave).result()
        other.submit(team.leave).result()
        assert ended == [other.submit(threading.get_ident).result()]
    assert not team.is_elsewhere


def test_one_thread_alone_is_no_team() -> None:
    team = team_of(1)
    assert team is not None
    with ThreadPoolExecutor(1) as other:
        other.submit(team.take).result()
        assert not team.is_elsewhere


def _threads() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def _one_gone(threads: set[str]) -> bool:
    """Whether one of those has ended: the team's own, beside one that somebody else may have begun meanwhile. The
    system lists it for a moment after it was joined.
    """
    until = time.monotonic() + 20
    while threads <= _threads() and time.monotonic() < until:
        time.sleep(0.001)
    return not threads <= _threads()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at threads in /proc")
def test_a_team_that_was_left_has_no_threads_and_what_is_computed_next_has_new_ones() -> None:
    team = team_of(2)
    if team is None:
        pytest.skip("torch computes with another OpenMP here")

    def begun_by_computing() -> set[str]:
        before = _threads()
        assert torch.zeros(2**20).exp().sum() == 2**20
        return _threads() - before

    def compute() -> None:
        take_cpu_threads(2)
        for _ in range(2):
            team.take()
            begun = begun_by_computing()
            assert begun
            team.leave()
            assert _one_gone(begun)

    with ThreadPoolExecutor(1) as other:
        other.submit(compute).result()
