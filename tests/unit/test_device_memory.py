"""Freed memory goes back at quiet moments."""

from __future__ import annotations

import pytest

from meshnet_node import device_memory
from meshnet_node.device_memory import IdleTrim


def test_heap_is_trimmed_when_idle_and_only_after_work(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[float] = []
    cpu_s = 1.0
    monkeypatch.setattr(device_memory, "trim_heap", lambda: trims.append(cpu_s))
    trim = IdleTrim(lambda: cpu_s)
    assert trim.look(idle=True)  # the start was work
    assert not trim.look(idle=True)
    cpu_s = 1.01  # heartbeats
    assert not trim.look(idle=True)
    cpu_s = 9.0
    assert not trim.look(idle=False)
    assert trim.look(idle=True)
    assert trims == [1.0, 9.0]


def test_sharing_and_trimming_the_heap_do_no_harm_where_they_cannot_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_glibc", lambda _name: None)
    device_memory.share_heap()
    device_memory.trim_heap()
