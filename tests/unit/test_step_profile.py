"""Where a step's time goes: what the gateway adds up, and what a shard's step is made of. No time is compared."""

from __future__ import annotations

import ctypes
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from in_process_mesh import MODEL, random_prompt, tiny_mesh
from meshnet_core.clock import ManualClock
from meshnet_core.layer_range import LayerRange
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_gateway.generation import GenerationEngine, GenerationRequest
from meshnet_gateway.generation_trace import NoTrace
from meshnet_node import packed_linear, step_profile
from meshnet_node.native_chunks import has_products
from meshnet_node.packed_linear import PackedLinear
from meshnet_node.shard_loader import load_shard
from meshnet_node.step_profile import ATTENTION, PRODUCTS, STEP, StepSplit, _kind_of, profile_steps, split_of
from native_compiler import needs_compiler
from step_logits import WIDE, whole_shard
from tiny_models import save_tiny


@pytest.mark.parametrize(("family", "layers"), [("llama", "0-3"), ("llama", "2-3"), ("qwen3_5_moe_text", "0-4")])
def test_the_parts_of_a_shards_step_add_up_and_none_is_missing(family: str, layers: str, tmp_path: Path) -> None:
    shard = load_shard(save_tiny(family, tmp_path), LayerRange.parse(layers), dtype="float32", device="cpu")
    split = profile_steps(shard, position=20, steps=3)
    assert split.steps == 3
    assert split.products + split.attention + split.rest == pytest.approx(split.step_ms, rel=0.05)
    assert min(split.products, split.attention, split.rest, split.unprofiled_ms) > 0
    assert set(split.to_json()) == {"step_ms", "unprofiled_ms", "products", "attention", "rest", "steps"}


@needs_compiler
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "gemma3_text"])
def test_native_products_and_experts_count_as_products(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "_LEAST_ELEMENTS", 1)
    shard = whole_shard(tmp_path, family, **WIDE)
    shard.use_kernels()
    view = shard.whole_view()
    if view.chunks is None or not view.chunks.in_steps:
        pytest.skip("this CPU's products read weights in another layout than native ones do")
    linears = [each for each in view.model.modules() if isinstance(each, PackedLinear) and has_products(each)]
    experts = [] if view.parts is None else view.parts.experts
    assert len(linears) >= 2 * len(view.plain_layers)
    assert bool(experts) is (family == "qwen3_moe")
    seen: list[Any] = []
    monkeypatch.setattr(step_profile, "split_of", lambda events, unprofiled_ms: seen.extend(events))
    profile_steps(shard, position=20, steps=2)
    products = [each for each in seen if each.name == PRODUCTS]
    of_a_step = len(experts) + len(linears)
    assert Counter(map(_kind_of, products)) == {
        "products": 2 * of_a_step,
        None: of_a_step,
    }  # one to begin with, and two
    assert not any("run" in vars(part) for part in experts)
    assert view.kernels is not None
    assert isinstance(view.kernels.few, ctypes._CFuncPtr)


def event(name: str, self_us: float, parent: Any = None, total_us: float = 0.0) -> Any:
    return SimpleNamespace(name=name, self_cpu_time_total=self_us, cpu_time_total=total_us, cpu_parent=parent)


def test_an_operation_counts_for_the_innermost_that_says_what_it_is_for() -> None:
    step = event(STEP, 100, total_us=2000)
    attention = event(ATTENTION, 40, step)
    linear = event("aten::linear", 1, attention)
    scores = event("aten::matmul", 2, attention)
    called = event("meshnet::step_attention", 3, step)  # of a compiled layer
    events = [
        step,
        called,
        event("aten::cat", 4, called),
        attention,
        linear,
        event("aten::t", 10, linear),
        event("mkldnn::_linear_pointwise", 100, step),
        event("aten::_weight_int4pack_mm_for_cpu", 200, step),
        scores,
        event("aten::bmm", 20, scores),
        event("aten::bmm", 400, step),  # experts
        event("aten::scaled_dot_product_attention", 300, step),
        event("aten::linear", 5000),  # before the first step
    ]
    assert split_of(events, unprofiled_ms=1.5) == StepSplit(
        step_ms=2.0, unprofiled_ms=1.5, products=0.711, attention=0.369, rest=pytest.approx(0.92), steps=1
    )


async def test_the_parts_of_a_generations_steps_add_up_by_its_own_clock(tmp_path: Path) -> None:
    """Three nodes: all time is the manual clock's, which moves where frames are sent and tokens are taken."""
    clock = ManualClock(start=1000)
    async with tiny_mesh(save_tiny("llama", tmp_path), ["0-0", "1-1", "2-3"], clock=clock) as mesh:
        mesh.transport.on_forward = lambda url, frame: clock.advance(0.25)
        engine = GenerationEngine(mesh, mesh.transport, clock)
        generation = engine.start(GenerationRequest(MODEL, tuple(random_prompt(9)), 5, SamplingParams(), profile=True))
        async for event in generation:
            if isinstance(event, SampledToken):
                clock.advance(0.125)  # its client takes it
        await generation.aclose()
        profile = generation.report()["profile"]
        plain = engine.start(GenerationRequest(MODEL, tuple(random_prompt(9)), 2, SamplingParams()))
        assert [event async for event in plain]
        await plain.aclose()
        assert "profile" not in plain.report()
    assert isinstance(profile, dict)
    parts = profile["parts"]
    assert profile["steps"] == 4
    assert sum(parts.values()) == pytest.approx(profile["step_ms"], rel=1e-3)
    assert (parts["client"], parts["gateway"]) == (125.0, 0.0)
    assert parts["wire"] == 250.0
    hops = [[ms for name, ms in parts.items() if name.startswith(f"hop {index} ")] for index in range(3)]
    assert [sum(hop) for hop in hops] == pytest.approx([250.0, 250.0, 0.0], abs=0.1)  # the way onward is in it


async def test_a_profile_is_told_beside_a_trace(tmp_path: Path) -> None:
    told: list[str] = []

    class Trace(NoTrace):
        def part(self, name: str) -> AbstractContextManager[object]:
            told.append(name)
            return super().part(name)

        def end(self, *, tokens: int, finish_reason: str | None) -> None:
            told.append(f"{tokens} {finish_reason}")

    class Traces:
        def begin(self, session: str, model: str, prompt_tokens: int) -> Trace:
            return Trace()

    async with tiny_mesh(save_tiny("llama", tmp_path), ["0-3"]) as mesh:
        engine = mesh.engine()
        engine.tracing = Traces()
        generation = engine.start(GenerationRequest(MODEL, tuple(random_prompt(9)), 3, SamplingParams(), profile=True))
        assert [event async for event in generation]
        await generation.aclose()
        assert generation.report()["profile"]
    assert told == ["model", "place", "route", "open", "prefill", "3 length"]
