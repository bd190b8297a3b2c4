"""The benchmarks' report: what is asked, which step shows it, and how it is told. Nothing is measured."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from benchmarks.environment import clear_thread_settings
from benchmarks.figures import Interval
from benchmarks.language_pipes import config_of, layer_bytes, memory_for
from benchmarks.packed_memory import packed_bytes
from benchmarks.plot import save_verdicts
from benchmarks.report import lines_of, markdown_of, parse, table_of
from benchmarks.report_steps import steps_of
from benchmarks.results import publish
from benchmarks.verdict import Verdict
from rich.console import Console

from meshnet_core.layer_range import LayerRange

LESS = Verdict("time by time", Interval.of([0.58, 0.62, 0.7]), 0.6, at_most=True)
MORE = Verdict("speed by speed", Interval.of([0.9, 0.92, 0.96]), 0.97)
DONE = {
    "first-token": {"verdicts": {"bfloat16": LESS.to_json()}, "doubtful": True},
    "decode": {"verdicts": {"two_nodes_by_one_process": MORE.to_json()}, "doubtful": False},
}


def test_a_verdict_goes_by_the_end_of_the_interval_that_is_nearer_to_the_target() -> None:
    assert (LESS.reached, MORE.reached) == (True, False)
    assert (LESS.asked, MORE.asked) == ("at most 0.6", "at least 0.97")
    assert LESS.by_target(0.3) == pytest.approx(2.0)
    assert MORE.by_target(0.97) == pytest.approx(1.0)
    assert MORE.shown().endswith("asked: at least 0.97: MISSED")


def test_a_verdict_is_the_same_after_a_way_through_a_file() -> None:
    assert Verdict.from_json(json.loads(json.dumps(LESS.to_json()))) == LESS


def test_every_line_that_is_asked_has_a_step_and_names_of_steps_are_unique() -> None:
    steps = steps_of(3, ("--peers",))
    assert {number for step in steps for number in step.numbers} == {"1", "2", "3", "4", "5", "6", "7", "8"}
    assert len({step.name for step in steps}) == len(steps)


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("decode_speed", "1"),
        ("two_nodes_by_one_process", "1"),
        ("packed_by_llama.cpp RPC", "2"),
        ("retention", None),  # of so few tokens it says little: line 3 has a step of its own
    ],
)
def test_a_figure_of_the_decode_benchmark_belongs_to_its_line(key: str, number: str | None) -> None:
    assert steps_of(1, ())[0].number_of(key) == number


def test_lines_and_steps_can_be_chosen() -> None:
    assert [step.name for step in parse(["--only", "5,hop", "--no-hybrid"]).steps] == ["hop", "first-token"]
    step = parse(["--peers", "--llama-bin", "b"]).steps[0]
    assert step.arguments[-3:] == ("--peers", "--llama-bin", "b")
    assert step.told[-3:] == ["--peers", "--llama-bin", "PATH"]


@pytest.mark.parametrize("options", [["--only", "12"], ["--repeats", "0"], ["--llama-bin", "b"], ["--unknown"]])
def test_options_of_the_report_that_make_no_sense_end_the_program(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(options)
    assert ended.value.code == 2


def test_the_report_tells_each_figure_with_its_line_and_what_was_missed() -> None:
    lines = lines_of(DONE, steps_of(3, ()))
    assert [(line.number, line.step) for line in lines] == [("1", "decode"), ("5", "first-token")]
    console = Console(file=io.StringIO(), width=200)
    console.print(table_of(lines, DONE))
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "MISSED" in told
    assert "reached (busy)" in told
    run = {"seconds": 1.0, "began": "01:00", "command": ["benchmarks.bench"]}
    page = markdown_of(lines, {name: one | run for name, one in DONE.items()}, {"torch": "2"})
    assert "| 1 | decode | speed by speed | 0.920 (0.900 to 0.960 at 0.75) | at least 0.97 | **MISSED** |" in page


def test_what_is_asked_is_drawn(tmp_path: Path) -> None:
    save_verdicts("two of them", {"1, decode": MORE, "bfloat16": LESS}, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_result_is_kept_and_printed_only_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = publish("a", {"b": 1}, tmp_path)
    assert json.loads(path.read_text("utf-8")) == {"b": 1}
    assert capsys.readouterr().out == ""
    publish("a", {"b": 1}, tmp_path, line=True)
    assert capsys.readouterr().out == '{"b":1}\n'


def test_settings_of_threads_are_taken_out_of_the_environment_and_told() -> None:
    environ = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "PATH": "/bin"}
    assert clear_thread_settings(environ) == {"GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1"}
    assert environ == {"PATH": "/bin"}


def test_a_half_holds_its_blocks_and_the_last_one_the_tied_embeddings_too() -> None:
    tensors = [("token_embd.weight", 100), ("blk.0.a", 1), ("blk.1.a", 2), ("blk.10.a", 4), ("output_norm.weight", 8)]
    assert packed_bytes(tensors, LayerRange(0, 1), 11) == 101
    assert packed_bytes(tensors, LayerRange(1, 11), 11) == 114
    assert packed_bytes([*tensors, ("output.weight", 1000)], LayerRange(1, 11), 11) == 1014


def test_language_pipes_is_given_memory_for_a_half_of_the_layers(tmp_path: Path) -> None:
    tensors = {f"model.layers.{n}.{part}": {"data_offsets": [0, 2**20]} for n in range(4) for part in "ab"}
    header = json.dumps({"__metadata__": {}, "model.norm": {"data_offsets": [0, 1]}, **tensors}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    layers, each = layer_bytes(tmp_path / "a.safetensors")
    assert (layers, each) == (4, 2**21)
    assert int(memory_for(2, each) * 2**30 / each) == 2
    assert 'model_id = "x/y"' in config_of("n", "x/y", 0.1, 5000)
