"""Native steps beside plain ones in the benchmarks: what is compared, and that both ways run. No time is judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.native_step import WAYS, Case, Compared, Shards, compare, document, order_of, parse

from meshnet_core.layer_range import LayerRange
from meshnet_node.shard_loader import load_shard
from meshnet_node.step_kernels import kernels_here
from native_compiler import needs_compiler
from tiny_models import num_layers, save_tiny


def test_without_options_all_is_compared_as_documented() -> None:
    given = parse([])
    assert (given.weights, given.threads, given.sessions) == (["bfloat16", "packed"], [1, 2], [1, 4, 8])
    assert (given.name, given.json) == ("native-step", False)


@pytest.mark.parametrize(
    "options",
    [["--weights", "int8"], ["--threads", "0"], ["--sessions", "one"], ["--repeats", "0"], ["--positions", "0"]],
)
def test_options_that_mean_nothing_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(options)
    assert ended.value.code == 2


def test_each_way_goes_first_in_turn() -> None:
    assert [order_of(repeat)[0] for repeat in range(4)] == ["plain", "native", "plain", "native"]
    assert {frozenset(order_of(repeat)) for repeat in range(4)} == {frozenset(WAYS)}


def test_ratios_are_taken_within_repeats() -> None:
    found = Compared(Case("packed", 2, 1))
    found.ms["plain"] += [10.0, 40.0, 20.0]
    found.ms["native"] += [5.0, 10.0, 12.0]
    told = found.to_json()
    assert told["native_by_plain"]["median"] == 0.5
    assert (told["native_by_plain"]["low"], told["native_by_plain"]["high"]) == (0.25, 0.6)
    assert (told["plain_ms"]["median"], told["native_ms"]["median"]) == (20.0, 10.0)
    whole = document([found], 0.0, parse(["--repeats", "3"]))
    assert (whole["benchmark"], whole["repeats"], whole["cases"]) == ("native-step", 3, [told])


class ScriptedShards(Shards):
    """Takes 2 s for a plain step and 1 s for a native one, by a clock of its own."""

    def __init__(self) -> None:
        self.now, self.way, self.opened = 0.0, "", (0, 0)

    def open(self, sessions: int, positions: int) -> None:
        self.opened = (sessions, positions)

    def take(self, way: str) -> None:
        self.way = way

    def step(self) -> None:
        self.now += {"plain": 2.0, "native": 1.0}[self.way]


def test_a_repeats_figure_is_the_median_of_its_steps() -> None:
    shards = ScriptedShards()
    given = parse(["--repeats", "3", "--steps", "2", "--positions", "9"])
    found = compare(shards, Case("bfloat16", 1, 4), given, lambda: shards.now)
    assert shards.opened == (4, 9)
    assert dict(found.ms) == {"plain": [2000.0] * 3, "native": [1000.0] * 3}


@needs_compiler
@pytest.mark.parametrize(("family", "sessions"), [("llama", 1), ("llama", 2), ("qwen3_next", 2)])
def test_both_ways_go_through_both_shards(family: str, sessions: int, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path)
    held = [
        load_shard(folder, LayerRange.parse(layers), dtype="bfloat16", device="cpu", quantize="none")
        for layers in ("0-1", f"2-{num_layers(family) - 1}")
    ]
    kernels = kernels_here().kernels
    assert kernels is not None
    shards = Shards(held, kernels)
    for way in (*WAYS, *WAYS):
        shards.open(sessions, positions=5)
        shards.take(way)
        shards.step()
        assert [shard.runs_native for shard in held] == [way == "native"] * 2
        assert shards.are_native == (way == "native")
        assert [[state.position for state in states] for states in shards._states] == [[6, 6]] * sessions
    shards.close()
