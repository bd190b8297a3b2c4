"""What nodes that share a machine's cores are told of threads."""

from __future__ import annotations

import os

import pytest

from meshnet_cli.local_mesh import shared_cores


@pytest.fixture
def seven(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Linux machine of eight cores, of which this process may use those from 1 on."""
    for name in ("GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "KMP_BLOCKTIME", "OMP_PROC_BIND", "OMP_PLACES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 3, 1, 2, 5, 6, 4}, raising=False)


@pytest.mark.usefixtures("seven")
@pytest.mark.parametrize(("nodes", "threads"), [(1, 7), (2, 3), (3, 2), (12, 1)])
def test_nodes_that_have_cores_enough_or_nobody_to_wait_for_are_told_nothing(nodes: int, threads: int) -> None:
    assert shared_cores(nodes, threads, 0) == {}


@pytest.mark.usefixtures("seven")
def test_nodes_that_share_cores_take_them_in_turn() -> None:
    told = [shared_cores(3, 4, index)["GOMP_CPU_AFFINITY"] for index in range(3)]
    assert told == ["1 2 3 4 5 6 7", "5 6 7 1 2 3 4", "3 4 5 6 7 1 2"]


@pytest.mark.usefixtures("seven")
def test_nodes_that_take_all_cores_each_begin_at_different_ones() -> None:
    told = [shared_cores(3, 7, index)["GOMP_CPU_AFFINITY"] for index in range(3)]
    assert told == ["1 2 3 4 5 6 7", "2 3 4 5 6 7 1", "3 4 5 6 7 1 2"]


@pytest.mark.usefixtures("seven")
@pytest.mark.parametrize("name", ["GOMP_CPU_AFFINITY", "OMP_PLACES"])
def test_what_people_set_themselves_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "2-3")
    assert shared_cores(2, 5, 1).keys() == {"GOMP_SPINCOUNT", "KMP_BLOCKTIME"}


@pytest.mark.usefixtures("seven")
def test_their_threads_spin_for_a_while() -> None:
    assert shared_cores(2, 5, 1)["GOMP_SPINCOUNT"] == "10000"


@pytest.mark.usefixtures("seven")
def test_where_cores_cannot_be_chosen_nothing_is_said_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert shared_cores(2, 5, 1) == {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "0"}
