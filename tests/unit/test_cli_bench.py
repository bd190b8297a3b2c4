"""`meshnet bench` against a scripted gateway, and what Tab offers."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from announcements import shard
from eager_steps import trace_layers
from meshnet_cli import bench, bench_profile, completion
from meshnet_cli.chat_stream import Gateway
from meshnet_cli.main import app
from meshnet_cli.steps_told import Steps, steps_told
from meshnet_node import step_warm_up
from meshnet_node.offered_shard import OfferedShard
from native_compiler import needs_compiler
from scripted_gateway import ScriptedGateway, serving
from tiny_models import save_tiny


def test_it_asks_greedily_as_often_as_told_and_shows_the_median() -> None:
    with serving(ScriptedGateway([["one", " two"]] * 2)) as gateway:
        result = CliRunner().invoke(app, ["bench", "--url", gateway.url, "--tokens", "7", "--repeats", "2"])
    assert result.exit_code == 0
    assert "tiny over a route that is not told, median of 2" in result.stdout
    assert "12.5 tokens/s" in result.stdout
    assert "last 50 tokens per s    not told" in result.stdout
    assert [(asked["temperature"], asked["max_tokens"]) for asked in gateway.requests] == [(0, 7)] * 2


def test_it_prints_one_json_document() -> None:
    with serving(ScriptedGateway([["one"]])) as gateway:
        result = CliRunner().invoke(
            app, ["bench", "--url", gateway.url, "--repeats", "1", "--prompt", "3", "--model", "tiny", "--json"]
        )
    document = json.loads(result.stdout)
    assert (document["model"], len(document["runs"])) == ("tiny", 1)
    assert document["median"]["tokens_per_s"] == 12.5
    assert document["runs"][0]["last_50_tokens_per_s"] is None
    assert gateway.requests[0]["messages"][0]["content"].endswith(" count count count")


def test_times_are_from_the_request_to_the_first_piece_and_to_the_end() -> None:
    ticks = iter([10.0, 10.5, 12.0])
    with serving(ScriptedGateway([["one", "two"]])) as gateway:
        run = asyncio.run(bench.measure(Gateway(gateway.url), "tiny", "hi", 5, lambda: next(ticks)))
    assert (run.first_token_s, run.total_s, run.tokens) == (0.5, 2.0, 2)


PROFILE = {"steps": 9, "step_ms": 30.0, "parts": {"gateway": 1.0, "wire": 2.0, "hop 0 forward": 27.0}}


def test_a_profile_is_asked_for_and_its_parts_are_shown_with_their_sum() -> None:
    with serving(ScriptedGateway([["one"]] * 2, report={"profile": PROFILE})) as gateway:
        command = ["bench", "--url", gateway.url, "--repeats", "1", "--profile"]
        shown = CliRunner().invoke(app, command).stdout
        document = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert [asked["meshnet"] for asked in gateway.requests] == [{"profile": "on"}] * 2
    rows = {" ".join(line.split()) for line in shown.splitlines()}
    assert {"hop 0 forward 27.000 90.0 %", "whole 30.000 100.0 %"} <= rows
    assert "not accounted for" not in shown
    assert document["profile"] == {**PROFILE, "left_ms": 0.0, "split": []}
    assert "report" not in document["runs"][0]


def test_answers_count_in_a_profile_as_often_as_they_have_steps() -> None:
    other = {"steps": 27, "step_ms": 10.0, "parts": {"gateway": 1.0, "hop 0 forward": 8.0}}
    found = bench_profile.MeshProfile.of([PROFILE, {}, other])
    assert (found.steps, found.step_ms) == (36, 15.0)
    assert found.parts == {"gateway": 1.0, "wire": 0.5, "hop 0 forward": 12.75}
    assert found.left_ms == pytest.approx(0.75)


def test_layers_of_a_model_are_split_here_as_the_route_has_them(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    route = [{"layers": "0-1", "dtype": "float32"}, {"layers": "2-3", "dtype": "float32"}]
    splits = bench_profile.split_here(str(folder), route, position=5, threads=None, told=[None, None], steps=2)
    assert [(split.layers, split.dtype) for split in splits] == [("0-1", "float32"), ("2-3", "float32")]
    for split in splits:
        assert split.products + split.attention + split.rest == pytest.approx(split.step_ms, rel=0.05)


@needs_compiler
def test_steps_are_of_the_kind_that_each_node_runs(tmp_path: Path) -> None:
    route = [{"layers": layers, "dtype": "bfloat16"} for layers in ("0-0", "1-1", "2-3")]
    told = [Steps.PLAIN, Steps.NATIVE, None]
    splits = bench_profile.split_here(str(save_tiny("llama", tmp_path)), route, 5, None, told, steps=1)
    assert [split.steps for split in splits] == [Steps.PLAIN, Steps.NATIVE, Steps.NATIVE]
    assert [split.to_json()["node_steps"] for split in splits] == ["plain", "native", None]


def test_compiled_steps_are_profiled_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = partial(step_warm_up.StepWarmUp, compile_layers=trace_layers)  # needs no compiler
    monkeypatch.setattr(step_warm_up, "StepWarmUp", traced)
    route = [{"layers": "0-3", "dtype": "float32"}]
    (split,) = bench_profile.split_here(str(save_tiny("qwen2", tmp_path)), route, 5, None, [Steps.COMPILED], steps=1)
    assert split.steps is Steps.COMPILED
    assert split.products + split.attention + split.rest == pytest.approx(split.step_ms, rel=0.05)


def test_what_a_node_is_not_told_to_run_is_said_beside_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    def split(layers: str, here: Steps, node: Steps | None) -> bench_profile.HopSplit:
        return bench_profile.HopSplit(layers, "bfloat16", here, node, 3.0, 2.0, 1.0, 1.0, 1.0)

    splits = (
        split("0-1", Steps.NATIVE, Steps.NATIVE),
        split("2-3", Steps.PLAIN, Steps.NATIVE),
        split("4-5", Steps.NATIVE, None),
    )
    bench_profile.show(bench_profile.Profile(bench_profile.MeshProfile.of([PROFILE]), splits))
    shown = capsys.readouterr().out
    assert "0-1 bfloat16, native" in shown
    assert "layers 0-1" not in shown
    assert "layers 2-3: plain steps here, native at the node" in shown
    assert "layers 4-5: native steps here, the node does not tell what its are" in shown


ROUTE = [{"node": "a", "layers": "0-1"}, {"node": "b", "layers": "2-3"}]


def status_node(name: str, layers: str, **more: Any) -> dict[str, Any]:
    return {"node": name, "layers": [{"model": "m", "layers": layers, "loaded": True}], "compile": {}} | more


@pytest.mark.parametrize(
    ("compiled", "steps"),
    [
        ({"layers 1-3 of m": {"state": "native"}}, Steps.NATIVE),
        ({"layers 1-3 of m": {"state": "ready"}}, Steps.COMPILED),
        ({"layers 1-3 of m": {"state": "compiling"}}, Steps.PLAIN),
        ({"layers 1-3 of m": {"state": "refused"}}, Steps.PLAIN),
        ({"layers 0-3 of m": {"state": "native"}}, Steps.PLAIN),
        ({}, Steps.PLAIN),
    ],
)
def test_what_steps_are_is_what_the_node_says_of_its_shard(compiled: dict[str, Any], steps: Steps) -> None:
    """The second hop begins inside its shard."""
    status = {"nodes": [status_node("a", "0-1"), status_node("b", "1-3", compile=compiled)]}
    assert steps_told({"route": ROUTE}, "m", status) == [Steps.PLAIN, steps]


def test_what_nobody_tells_is_not_known() -> None:
    silent = status_node("b", "2-3")
    del silent["compile"]  # it did not answer
    unloaded = status_node("a", "0-1") | {"layers": [{"model": "m", "layers": "0-1", "loaded": False}]}
    assert steps_told({"route": ROUTE}, "m", {"nodes": [unloaded, silent]}) == [None, None]
    odd = {**status_node("a", "0-1"), "compile": {"layers 0-1 of m": "native"}}
    assert steps_told({"route": ROUTE}, "m", {"nodes": [odd, silent]}) == [None, None]
    assert steps_told({"route": ROUTE}, "m", {"nodes": [status_node("a", "0-1"), silent]}) == [Steps.PLAIN, None]
    assert steps_told({"route": ROUTE}, "other", {"nodes": [status_node("a", "0-1")]}) == [None, None]
    assert steps_told({"route": ROUTE}, "m", {}) == [None, None]


def test_an_answer_that_is_exact_has_plain_steps() -> None:
    status = {"nodes": [status_node("a", "0-1", compile={"layers 0-1 of m": {"state": "native"}})]}
    assert steps_told({"route": ROUTE, "recovery": "exact"}, "m", status) == [Steps.PLAIN, Steps.PLAIN]


def test_a_node_calls_its_shards_as_they_are_looked_for() -> None:
    known = shard("1-3", model="m")
    offer = OfferedShard(known, lambda progress: None)  # type: ignore[arg-type, return-value]
    status = {"nodes": [status_node("b", str(known.layers), compile={str(offer): {"state": "native"}})]}
    assert steps_told({"route": ROUTE}, "m", status) == [None, Steps.NATIVE]


@needs_compiler
def test_layers_are_profiled_as_the_gateway_says_that_nodes_run_them(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    route = [{"node": "a", "layers": "0-3", "dtype": "bfloat16"}]
    report = {"profile": PROFILE, "route": route, "prompt_tokens": 4}
    told = {"node": "a", "layers": [{"model": "tiny", "layers": "0-3", "loaded": True}]}
    kinds = []
    for compiled in ({}, {"layers 0-3 of tiny": {"state": "native"}}):
        scripted = ScriptedGateway([["one"]], report=report, status={"nodes": [told | {"compile": compiled}]})
        with serving(scripted) as gateway:
            command = ["bench", "--url", gateway.url, "--repeats", "1", "--profile", "--step-of", str(folder), "--json"]
            (split,) = json.loads(CliRunner().invoke(app, command).stdout)["profile"]["split"]
        kinds.append((split["steps"], split["node_steps"]))
    assert kinds == [("plain", "plain"), ("native", "native")]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--step-of", "m"], "--step-of means something with --profile alone"),
        (["--profile", "--step-of", "nosuch"], "'nosuch' is no model"),
        (["--profile", "--threads", "2"], "--threads means something with --profile --step-of MODEL alone"),
    ],
)
def test_options_of_a_profile_without_one_are_refused(wrong: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", *wrong])
    assert result.exit_code != 0
    assert said in str(result.exception)


def test_a_profile_that_is_not_told_is_an_error() -> None:
    with serving(ScriptedGateway([["one"]])) as gateway:
        result = CliRunner().invoke(app, ["bench", "--url", gateway.url, "--repeats", "1", "--profile"])
    assert "--tokens 20 or more" in str(result.exception)


def test_tab_offers_models_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smalls").mkdir()
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").touch()
    (tmp_path / "small.gguf").touch()
    (tmp_path / "small.txt").touch()
    assert completion.complete_model("sm") == ["smollm2", "small.gguf", "smalls/"]
    assert completion.complete_model("whole") == ["whole"]
    assert completion.complete_model(f"{tmp_path}/sm") == [f"{tmp_path}/small.gguf", f"{tmp_path}/smalls/"]
    assert completion.complete_model("/no/such/folder/x") == []


def test_tab_offers_the_models_that_the_gateway_serves() -> None:
    context = typer.Context(typer.main.get_command(app))
    with serving(ScriptedGateway([], models=["tiny", "other"])) as gateway:
        context.params["url"] = gateway.url
        assert completion.complete_served(context, "t") == ["tiny"]
    context.params["url"] = "http://127.0.0.1:1/v1"
    assert completion.complete_served(context, "") == []


def test_the_shell_can_be_taught_to_complete() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert "--install-completion" in shown
    bash = {"_MESHNET_COMPLETE": "complete_bash", "COMP_WORDS": "meshnet ver", "COMP_CWORD": "1"}
    assert "verify" in CliRunner().invoke(app, [], prog_name="meshnet", env=bash).stdout
