"""What the benchmarks are told on the command line, and what their models are."""

from __future__ import annotations

import pytest
from benchmarks.bench import parse
from benchmarks.concurrency import prompts_of
from benchmarks.mesh_processes import NodeOptions
from benchmarks.models import MODELS, QWEN2_SHAPE, random_prompt

from meshnet_core.layer_range import LayerRange


def test_without_options_all_models_are_measured_as_documented() -> None:
    keys, plan, peers, kept = parse([])
    assert peers is None

    assert keys == ["smollm2", "qwen2-0.5b", "qwen3.5-moe"]
    assert (plan.new_tokens, plan.repeats, plan.dtype) == (512, 3, "bfloat16")
    assert plan.stateless_lengths == (0, 100, 200, 400)
    assert (kept.name, kept.json) == ("MODEL", False)


@pytest.mark.parametrize(
    "options",
    [
        ["--models", "gpt5"],
        ["--new-tokens", "50"],
        ["--repeats", "0"],
        ["--threads", "0"],
        ["--unknown"],
        ["--llama-bin", "."],
    ],
)
def test_options_that_make_no_sense_end_the_program(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(options)

    assert ended.value.code == 2
    assert options[-1].lstrip("-") in capsys.readouterr().err or options[0] in ("--repeats", "--threads", "--llama-bin")


def test_the_stateless_path_can_be_left_out() -> None:
    assert parse(["--stateless-lengths", ""])[1].stateless_lengths == ()


def test_the_splits_of_every_model_meet() -> None:
    for model in MODELS.values():
        first, second = (LayerRange.parse(split) for split in model.splits)
        assert (first.start, first.stop) == (0, second.start)


def test_the_random_model_has_the_size_of_the_real_one() -> None:
    hidden, inner, kv = QWEN2_SHAPE["hidden_size"], QWEN2_SHAPE["intermediate_size"], 2 * 64
    attention = 2 * hidden * hidden + hidden + 2 * (hidden * kv + kv)
    layer = attention + 3 * hidden * inner + 2 * hidden
    parameters = QWEN2_SHAPE["vocab_size"] * hidden + 24 * layer + hidden

    assert parameters == 494_032_768  # as published for Qwen2.5-0.5B


def test_a_random_prompt_is_the_same_every_time() -> None:
    assert random_prompt(1000) == random_prompt(1000)
    assert len(random_prompt(1000)) == 26
    assert max(random_prompt(7)) < 7


def test_clients_have_prompts_of_their_own_of_one_length() -> None:
    prompts = prompts_of(tuple(range(30)), 16)

    assert len(set(prompts)) == 16
    assert {len(prompt) for prompt in prompts} == {30}


def test_a_wait_policy_is_an_environment_of_the_nodes_or_refused() -> None:
    assert NodeOptions("bfloat16", 2, wait_policy="spin:500").environment(2, 0) == {"GOMP_SPINCOUNT": "500"}
    assert NodeOptions("bfloat16", 2, wait_policy="library").environment(2, 0) == {}
    with pytest.raises(ValueError, match="wait policy 'spin:'"):
        NodeOptions("bfloat16", 2, wait_policy="spin:").environment(2, 0)
