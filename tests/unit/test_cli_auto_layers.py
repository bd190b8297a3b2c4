"""What a node by `--layers auto` does before it serves: it waits, gets its kernels meanwhile, and stays announced."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from meshnet_cli import auto_layers
from meshnet_cli.auto_layers import AutoLayers
from meshnet_cli.node import Place
from meshnet_cli.node_shards import WeightsWanted
from meshnet_core.errors import TrackerUnreachableError
from meshnet_core.layer_range import LayerRange
from meshnet_core.placeable import Wish
from tiny_models import save_tiny

PLACE = Place("a", "127.0.0.1", socket.socket(), "http://127.0.0.1:1", ("http://tracker",), None)
ENOUGH_S = 60.0


class Tracker:
    """In the place of a node's trackers: tells layers at once, and counts heartbeats."""

    told: Wish | None = Wish(LayerRange(0, 2))

    def __init__(self, *_: Any, **__: Any) -> None:
        self.left = self.closed = False
        heard.append(self)
        self.beats = 0

    async def heartbeat(self, _info: Any) -> None:
        if self.told is None:
            raise TrackerUnreachableError("no tracker answers")
        self.beats += 1
        if self.beats > 1:  # the first was to ask
            announced.set()

    async def wish(self, _node: str, *, boot: str) -> Wish:
        assert boot
        assert self.told is not None
        return self.told

    async def leave(self, _node: str, *, boot: str) -> None:
        self.left = bool(boot)

    async def close(self) -> None:
        self.closed = True


heard: list[Tracker] = []
announced = threading.Event()


@pytest.fixture
def auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AutoLayers:
    heard.clear()
    announced.clear()
    monkeypatch.setattr(auto_layers, "Trackers", Tracker)
    monkeypatch.setattr(AutoLayers, "_load", lambda _auto, layers: layers)
    folder = str(save_tiny("llama", tmp_path / "m"))
    return AutoLayers(folder, None, WeightsWanted("bfloat16", "none"), "cpu", lambda *_: None)


async def test_a_node_stays_announced_while_its_kernels_are_built(
    auto: AutoLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(auto_layers, "step_kernels", lambda: seen.append(announced.wait(ENOUGH_S)))
    async with asyncio.timeout(2 * ENOUGH_S):
        loaded: Any = await auto.load(PLACE)
    assert loaded == LayerRange(0, 2)
    assert seen == [True]
    assert heard[0].closed


async def test_a_tracker_that_does_not_answer_ends_it_all_the_same(
    auto: AutoLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_layers, "step_kernels", lambda: None)
    monkeypatch.setattr(Tracker, "told", None)
    with pytest.raises(TrackerUnreachableError):
        await auto.load(PLACE)
    assert heard[0].left
    assert heard[0].closed
    assert not any(task.get_name() == "get kernels" and not task.cancelling() for task in asyncio.all_tasks())
