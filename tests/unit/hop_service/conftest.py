"""What the tests of the hop service share: shards loaded once, and two fresh nodes for each test."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hop_line import PROMPT, RANGES, STEPS, Gate, Line
from in_process_mesh import reference_greedy, reference_model
from meshnet_core.clock import SystemClock
from meshnet_node import frame_runs
from meshnet_node.shard_loader import load_shard
from meshnet_node.shard_work import ShardBackend
from tiny_models import save_tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def backends(folder: Path) -> list[ShardBackend]:
    return [load_shard(folder, layers, dtype="float32", device="cpu") for layers in RANGES]


@pytest.fixture(scope="session")
def expected(folder: Path) -> list[int]:
    """The unsharded model's answer to `hop_line.PROMPT`."""
    return reference_greedy(reference_model(folder), PROMPT, STEPS)


@pytest.fixture
async def line(backends: list[ShardBackend], caplog: pytest.LogCaptureFixture) -> AsyncIterator[Line]:
    """Two nodes; bytes that they still hold once closed, and errors that nobody took up, fail the test."""
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(context))
    line = Line(backends, SystemClock())
    yield line
    await line.close()
    assert [hop.store.nbytes for hop in line.hops] == [0, 0]
    gc.collect(1)
    await asyncio.sleep(0)
    assert unhandled == []
    assert "never retrieved" not in caplog.text


@pytest.fixture
async def holding(line: Line) -> Line:
    """The two nodes, holding prefixes."""
    for hop in line.hops:
        hop.store.limits = replace(hop.store.limits, max_prefixes=8)
        hop.store.prefixes.most = 8
    return line


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def short_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """An early frame is not waited for long."""
    monkeypatch.setattr(frame_runs, "EARLY_HOLD_S", 0.05)
