"""Threads that leave the core which libgomp put them on."""

from __future__ import annotations

import os

import pytest

from meshnet_node.cpu_threads import leave_core


@pytest.mark.parametrize(("told", "left_for"), [("1 0 5", [{0, 1, 5}]), ("", []), ("0-3", []), ("0 2:4", [])])
def test_a_thread_leaves_for_the_cores_that_the_process_was_told(
    told: str, left_for: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[set[int]] = []
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("GOMP_CPU_AFFINITY", told)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: left.append(set(cores)), raising=False)
    leave_core()
    assert left == left_for
