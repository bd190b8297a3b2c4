"""What nodes that share a machine's cores are told of threads."""

from __future__ import annotations

import os

import pytest

from meshnet_cli.local_mesh import shared_cores


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Linux machine of eight cores, of which this process may use those from 1 on."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 3, 1, 2, 5, 6, 4}, raising=False)


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(("nodes", "threads"), [(1, 8), (2, 4), (4, 2), (12, 1)])
def test_nodes_that_have_cores_enough_or_nobody_to_wait_for_are_told_nothing(nodes: int, threads: int) -> None:
    assert shared_cores(nodes, threads, 0) == {}


@pytest.mark.usefixtures("eight")
def test_nodes_that_share_cores_take_them_in_turn() -> None:
    told = [shared_cores(3, 4, index)["GOMP_CPU_AFFINITY"] for index in range(3)]
    assert told == ["1 2 3 4 5 6 7", "5 6 7 1 2 3 4", "2 3 4 5 6 7 1"]


@pytest.mark.usefixtures("eight")
def test_their_threads_spin_for_a_while() -> None:
    assert shared_cores(2, 5, 1)["GOMP_SPINCOUNT"] == "10000"


@pytest.mark.usefixtures("eight")
def test_where_cores_cannot_be_chosen_nothing_is_said_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert shared_cores(2, 5, 1) == {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "0"}
