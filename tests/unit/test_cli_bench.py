"""`meshnet bench` against a scripted gateway, and what Tab offers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from meshnet_cli import bench, bench_profile, completion
from meshnet_cli.chat_stream import Gateway
from meshnet_cli.main import app
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
    splits = bench_profile.split_here(str(folder), route, position=5, threads=None, steps=2)
    assert [(split.layers, split.dtype) for split in splits] == [("0-1", "float32"), ("2-3", "float32")]
    for split in splits:
        assert split.products + split.attention + split.rest == pytest.approx(split.step_ms, rel=0.05)


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
