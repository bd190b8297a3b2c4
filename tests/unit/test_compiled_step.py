"""Compiled decode steps: made beside the plain ones, used where they are the same, refused where they differ.

The compiler's place is taken by layers that run as they were traced; `test_compiled_layers.py` compiles.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from documents import ROOT
from eager_steps import spoilt_layers, trace_layers
from in_process_mesh import random_prompt
from meshnet_cli import node_process
from meshnet_cli.auto_layers import AutoLayers
from meshnet_cli.node_shards import ShardChoice, WeightsWanted, load_pool
from meshnet_core.errors import HopFailedError, UnsupportedModelError
from meshnet_core.layer_range import LayerRange
from meshnet_node import step_warm_up
from meshnet_node.compiled_step import CompiledLayer, CompiledStep
from meshnet_node.layer_sketch import LayerSketch
from meshnet_node.layer_view import ForwardCancelledError, LayerView
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.shard_loader import load_shard
from meshnet_node.split import parse_splits
from meshnet_node.step_comparison import StepComparison
from meshnet_node.step_compiler import Compile
from meshnet_node.step_frames import StoppedError
from meshnet_node.step_warm_up import StepState, StepStatus, StepWarmUp
from meshnet_node.verification import Check, verify
from native_compiler import needs_compiler
from shard_routes import Models, Route
from tiny_models import FAMILIES, num_layers

QUICK = ("llama", "qwen2", "mistral", "gemma3_text", "lfm2", "qwen3_next", "qwen3_moe")
PLAIN_ALONE = {
    "deepseek_v3": "computes keys or values from what the cache gives",
    "gemma4_text": "shapes that grow with the positions before it",
    "kimi_linear": "computes keys or values from what the cache gives",
    "llama4_text": "attends to chunks",
    "minimax": "a cache of a kind of its own",
}
"""Families whose steps cannot be compiled -> what is said of them; `docs/compiled-steps.md` has the same."""


pytestmark = pytest.mark.usefixtures("one_thread")


def shard_of(models: Models, family: str, *, start: int = 0, dtype: str = "float32") -> TorchModelShard:
    layers = LayerRange(start, num_layers(family))
    return load_shard(models.folder(family), layers, dtype=dtype, device="cpu")


def warmed(shard: TorchModelShard, compile_layers: Compile = trace_layers) -> StepStatus:
    warm_up = StepWarmUp(shard, compile_layers, is_worth=lambda found: True, sleep=lambda seconds: None)
    warm_up.run()
    return warm_up.status


def counted(compile_layers: Compile = trace_layers) -> tuple[Compile, list[int]]:
    """`compile_layers`, and a list that gets an entry for each layer run that it made."""
    runs: list[int] = []

    def compile_and_count(sketches: Sequence[LayerSketch], stopped: Callable[[], bool]) -> list[CompiledLayer]:
        def counting(layer: CompiledLayer) -> CompiledLayer:
            def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
                runs.append(1)
                return layer.function(tensors)

            return replace(layer, function=run)

        return [counting(layer) for layer in compile_layers(sketches, stopped)]

    return compile_and_count, runs


@pytest.mark.parametrize(
    "family",
    [*QUICK, *(pytest.param(one, marks=pytest.mark.long) for one in FAMILIES if one not in {*QUICK, *PLAIN_ALONE})],
)
def test_a_family_answers_the_same(models: Models, family: str) -> None:
    ids = random_prompt(40)
    logits = []
    for compiled in (False, True):
        shard = shard_of(models, family)
        make, runs = counted()
        if compiled:
            assert warmed(shard, make).state is StepState.READY
        runs.clear()
        route = Route([(shard, 0)])
        states = route.open()
        logits.append(torch.cat([route.prefill(ids[:17], states), route.decode(ids[17:], 17, states)]))
        assert len(runs) >= compiled * (len(ids) - 17) * num_layers(family)  # some run chunks of a prompt so too
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", PLAIN_ALONE)
def test_a_family_that_cannot_is_refused_with_the_reason(models: Models, family: str) -> None:
    status = warmed(shard_of(models, family))
    assert (status.state, PLAIN_ALONE[family] in status.detail) == (StepState.REFUSED, True), status.detail
    assert f"`{family}`" in (ROOT / "docs" / "compiled-steps.md").read_text("utf-8")


def test_an_effective_start_inside_the_shard_takes_the_layers_from_there(models: Models) -> None:
    ids, logits = random_prompt(24), []
    for compiled in (False, True):
        first = load_shard(models.folder("qwen2"), LayerRange(0, 2), dtype="float32", device="cpu")
        second = shard_of(models, "qwen2", start=1)
        make, runs = counted()
        if compiled:
            assert warmed(second, make).state is StepState.READY
        runs.clear()
        route = Route([(first, 0), (second, 2)])
        states = route.open()
        logits.append(torch.cat([route.prefill(ids[:9], states), route.decode(ids[9:], 9, states)]))
        assert len(runs) == compiled * (len(ids) - 9) * (num_layers("qwen2") - 2)
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("start", [0, 2])
def test_a_step_that_differs_is_refused_by_name(
    models: Models, start: int, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = load_shard(models.folder("llama"), LayerRange(start, 3), dtype=dtype, device="cpu")
    with caplog.at_level(logging.WARNING):
        status = warmed(whole, spoilt_layers(2.0))
    assert status.state is StepState.REFUSED
    assert status.detail.startswith("it differs from the plain one")
    assert [record for record in caplog.messages if f"layers {whole.layers} stay plain" in record]
    assert whole.whole_view().step is None


def test_verify_names_a_split_whose_steps_differ(models: Models) -> None:
    splits = parse_splits("0-1,2-3", num_layers("llama"))
    prompts = [random_prompt(5), random_prompt(19)]

    def found(compile_layers: Compile) -> list[str]:
        verification = verify(
            models.folder("llama"),
            splits,
            prompts,
            tokens=8,
            dtype="float32",
            device="cpu",
            compile_layers=compile_layers,
        )
        assert verification.results[1].check is Check.COMPILE
        return [f"{result.name}: {result.objection}" for result in verification.differing]

    assert found(trace_layers) == []
    (said,) = found(spoilt_layers(1.01))
    assert said.startswith("compile of 0-1,2-3: decode steps of layers 0-1 are refused: it differs from the plain one")


def test_verify_finds_what_the_comparison_of_a_shard_passed(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_warm_up, "compare_steps", lambda *_, **__: StepComparison(None, 2.0, 1.0))
    verification = verify(
        models.folder("llama"),
        parse_splits("0-1,2-3", num_layers("llama")),
        [random_prompt(5)],
        tokens=8,
        dtype="float32",
        device="cpu",
        compile_layers=spoilt_layers(1.5),
    )
    assert Check.SPLIT in {result.check for result in verification.differing}


def test_the_step_that_is_compared_is_put_together_while_no_frame_runs(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shard_of(models, "llama")
    attended: list[str | None] = []

    def look(view: LayerView, *arguments: Any) -> CompiledStep:
        attended.append(view.config._attn_implementation if shard.its_turn().locked() else None)
        return CompiledStep(view, *arguments)

    monkeypatch.setattr("meshnet_node.step_comparison.CompiledStep", look)
    assert warmed(shard).state is StepState.READY
    assert attended == ["sdpa"]  # steps of several sessions would find another name there


def test_a_step_that_is_no_quicker_is_not_used(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_of(models, "llama")
    for plain_s, state in ((0.002, StepState.REFUSED), (0.004, StepState.READY)):
        found = StepComparison(None, plain_s, 0.003)
        monkeypatch.setattr(step_warm_up, "compare_steps", lambda *_, result=found, **__: result)
        warm_up = StepWarmUp(shard, trace_layers)
        warm_up.run()
        assert warm_up.status.state is state
        assert f"3.0 ms a step, {1000 * plain_s:.1f} plain" in warm_up.status.detail
    assert shard.whole_view().step is not None


def failing(error: Exception) -> Compile:
    def compile_layers(sketches: Sequence[LayerSketch], stopped: Callable[[], bool]) -> list[CompiledLayer]:
        raise error

    return compile_layers


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UnsupportedModelError("its layers give more than hidden states"), "its layers give more than hidden states"),
        (HopFailedError("compiling failed: no space"), "compiling failed: no space"),
        (ValueError("odd\nand long"), "ValueError: odd"),
    ],
)
def test_whatever_goes_wrong_the_shard_goes_on_and_one_line_tells(
    models: Models, error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    shard = shard_of(models, "llama")
    with caplog.at_level(logging.WARNING):
        assert warmed(shard, failing(error)).detail == said
    assert len(caplog.messages) == 1
    route = Route([(shard, 0)])
    states = route.open()
    route.prefill(random_prompt(5), states)
    assert route.decode([1], 5, states).shape[0] == 1


def test_frames_run_plain_while_the_layers_compile(models: Models) -> None:
    shard = shard_of(models, "llama")
    compiling, go_on = threading.Event(), threading.Event()

    def compile_layers(sketches: Sequence[LayerSketch], stopped: Callable[[], bool]) -> list[CompiledLayer]:
        compiling.set()
        assert go_on.wait(60)
        return trace_layers(sketches, stopped)

    warm_up = StepWarmUp(shard, compile_layers, is_worth=lambda found: True)
    shard.warm_up(warm_up)
    assert compiling.wait(60)
    route = Route([(shard, 0)])
    states = route.open()
    route.prefill(random_prompt(5), states)
    route.decode([1, 2], 5, states)
    assert warm_up.status.state is StepState.COMPILING
    go_on.set()
    assert warm_up.wait().state is StepState.READY
    route.decode([3, 4], 7, states)


def test_a_shard_that_is_unloaded_while_it_warms_up_is_let_go_of(models: Models) -> None:
    shard = shard_of(models, "llama")
    compiling = threading.Event()

    def compile_layers(sketches: Sequence[LayerSketch], stopped: Callable[[], bool]) -> list[CompiledLayer]:
        compiling.set()
        while not stopped():
            compiling.wait(0.01)
        raise StoppedError

    warm_up = StepWarmUp(shard, compile_layers, is_worth=lambda found: True)
    shard.warm_up(warm_up)
    assert compiling.wait(60)
    weight = weakref.ref(next(shard.whole_view().model.parameters()))
    shard.close()
    assert warm_up.wait().state is StepState.STOPPED
    held = weakref.ref(shard)
    del shard
    gc.collect()
    assert held() is None
    assert weight() is None


def test_a_shard_with_compiled_steps_is_let_go_of_when_unloaded(models: Models) -> None:
    shard = shard_of(models, "lfm2")
    assert warmed(shard).state is StepState.READY
    weight = weakref.ref(next(shard.whole_view().plain_layers.parameters()))
    shard.close()
    gc.collect()
    assert weight() is None


def test_a_step_that_fails_in_a_frame_is_not_used_again(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    shard = shard_of(models, "llama")
    broken: list[int] = []

    def compile_layers(sketches: Sequence[LayerSketch], stopped: Callable[[], bool]) -> list[CompiledLayer]:
        def breaking(layer: CompiledLayer) -> CompiledLayer:
            def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
                if broken:
                    raise RuntimeError("the library broke")
                return layer.function(tensors)

            return replace(layer, function=run)

        return [breaking(layer) for layer in trace_layers(sketches, stopped)]

    assert warmed(shard, compile_layers).state is StepState.READY
    route = Route([(shard, 0)])
    states = route.open()
    route.prefill(random_prompt(5), states)
    shard._step_failed(5, 1, RuntimeError("several sessions' steps, which are not compiled"), together=True)
    shard._step_failed(0, 1, RuntimeError("a first frame"))
    assert shard.runs_compiled
    broken.append(1)
    with pytest.raises(HopFailedError, match="the library broke"):
        route.decode([1], 5, states)
    assert any("plain again" in message for message in caplog.messages)
    assert not shard.runs_compiled
    states = route.open()
    route.prefill(random_prompt(5), states)
    assert route.decode([1], 5, states).shape[0] == 1


def test_a_cancel_is_looked_at_between_compiled_layers(models: Models) -> None:
    shard = shard_of(models, "llama")
    make, runs = counted()
    assert warmed(shard, make).state is StepState.READY
    view = shard.whole_view()
    cache = view.new_cache()
    with torch.inference_mode():
        view.forward(torch.tensor([[1, 2, 3]]), position=0, cache=cache, sample=1, cancelled=lambda: False)
        runs.clear()
        with pytest.raises(ForwardCancelledError):
            view.forward(torch.tensor([[4]]), position=3, cache=cache, sample=1, cancelled=lambda: len(runs) == 2)
    assert len(runs) == 2
    assert view.step is not None


def test_layers_of_a_kind_share_what_is_compiled(models: Models) -> None:
    numbers: list[int] = []

    def compile_layers(sketches: Sequence[LayerSketch], stopped: Callable[[], bool]) -> list[CompiledLayer]:
        numbers.append(len(sketches))
        return trace_layers(sketches, stopped)

    for family in ("llama", "qwen3_next", "gemma3_text", "smollm3"):
        assert warmed(shard_of(models, family), compile_layers).state is StepState.READY
    assert numbers == [1, 2, 2, 2]


def test_a_node_without_a_compiler_says_so_before_it_loads(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    choice = ShardChoice(str(models.folder("llama")), LayerRange(0, 2))
    wanted = WeightsWanted("float32", "auto", "step")
    with pytest.raises(UnsupportedModelError, match="--compile step cannot be had here: there is no C\\+\\+ compiler"):
        load_pool([choice], None, wanted, "cpu", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="--compile step cannot be had here"):
        AutoLayers(choice.model, None, wanted, "cpu", lambda *_: None)


def test_the_nodes_status_tells_how_far_it_is(models: Models) -> None:
    folder = str(models.folder("llama"))
    pool = load_pool([ShardChoice(folder, LayerRange(0, 2))], None, WeightsWanted("float32", "auto"), "cpu", report)
    assert node_process._compile_status(pool) == {}
    (offer,) = pool
    assert offer.shard is not None
    backend = offer.shard.backend
    assert isinstance(backend, TorchModelShard)
    backend.warm_up(StepWarmUp(backend, failing(UnsupportedModelError("it cannot"))))
    assert backend.step_warm_up is not None
    backend.step_warm_up.wait()
    told = node_process._compile_status(pool)["compile"]
    assert [(each["state"], each["detail"]) for each in told.values()] == [("refused", "it cannot")]


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "compile_", "told"),
    [("bfloat16", "auto", ["native"]), ("bfloat16", "off", []), ("float32", "auto", [])],
)
def test_a_node_takes_native_steps_unless_it_is_told_otherwise(
    dtype: str, compile_: str, told: list[str], models: Models
) -> None:
    choice, wanted = ShardChoice(str(models.folder("llama")), LayerRange(0, 2)), WeightsWanted(dtype, "auto", compile_)
    pool = load_pool([choice], None, wanted, "cpu", report)
    status = node_process._compile_status(pool).get("compile", {})
    assert [each["state"] for each in status.values()] == told


def report(*_: object) -> None:
    """Nobody looks on."""
