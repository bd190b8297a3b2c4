"""Chunks of a prefill through C code, in whole models: what the layers' own way gives, and nothing where it is off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshnet_core.errors import HopFailedError
from meshnet_node import native_chunks, packed_linear
from meshnet_node.column_layout import lies_in_columns
from meshnet_node.family_support import FAMILIES
from meshnet_node.kernel_library import ProductWay
from meshnet_node.laid_out_experts import LaidOutExperts
from meshnet_node.layer_sketches import sketch_layers
from meshnet_node.layer_view import ForwardCancelledError, LayerView
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.native_chunks import OF_CHUNK, OF_FEW, OF_MANY, attends, has_products, may_have_chunks
from meshnet_node.openmp import parallel_address
from meshnet_node.packed_linear import MANY_ROWS, PackedLinear, can_pack, laid_out
from meshnet_node.session_state import SessionState
from meshnet_node.shard_work import ShardResult, ShardWork, never
from meshnet_node.step_kernels import step_kernels
from native_compiler import needs_compiler
from noting_kernels import NotingKernels
from step_logits import assert_near, drawn, run, whole_shard

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]
Load = Callable[..., TorchModelShard]
SETTINGS: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "initializer_range": 0.05,  # else other experts are chosen by rounding too often
}
"""Of a tiny model whose matrices and heads are of the kernels' form."""
PREFILL = (40, 30, 200, 1, 25)
TWO_KINDS = ["float32", "bfloat16"]
ASKED = ["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "gemma3_text"]


@pytest.fixture(autouse=True)
def _every_size_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is quicker on this machine does not."""
    found = step_kernels()
    if found is None or ProductWay.WIDENED not in found.product_ways:
        pytest.skip("this CPU has no instructions for bfloat16, or no AVX-512")
    monkeypatch.setattr(packed_linear, "_LEAST_ELEMENTS", 1)
    for matrix in (torch.randn(128, 128), torch.randn(128, 128).bfloat16()):
        if not can_pack(matrix.dtype) or not lies_in_columns(laid_out(matrix), matrix):
            pytest.skip("this CPU's products read weights in another layout")
    ways = {torch.float32: ProductWay.FLOATS, torch.bfloat16: ProductWay.WIDENED}
    monkeypatch.setattr(native_chunks, "quickest_way", lambda _, dtype: ways[dtype])


@pytest.fixture
def shards(tmp_path: Path) -> Load:
    def load(family: str, dtype: str = "bfloat16") -> TorchModelShard:
        shard = whole_shard(tmp_path, family, dtype, **SETTINGS)
        for module in shard.whole_view().plain_layers.modules():
            if isinstance(module, PackedLinear) and isinstance(module.bias, nn.Parameter):
                module.bias.detach().copy_(torch.linspace(-0.1, 0.1, module.out_features))  # drawn ones are zero
        return shard

    return load


@pytest.fixture
def noting() -> NotingKernels:
    return NotingKernels()


def modules_of(view: LayerView) -> list[nn.Module]:
    return [*view.plain_layers.modules(), *view.model.lm_head.modules()]


def placed(view: LayerView, *names: str) -> int:
    """Kernels that stand in the view's modules; of these names, or of any."""
    known = set(names) or {OF_MANY, OF_FEW, OF_CHUNK}
    return sum(len(known & vars(module).keys()) for module in modules_of(view))


@pytest.mark.parametrize("dtype", TWO_KINDS)
@pytest.mark.parametrize("family", ASKED)
def test_a_prefill_gives_what_the_layers_give(family: str, dtype: str, shards: Load, noting: NotingKernels) -> None:
    shard = shards(family, dtype)
    view = shard.whole_view()
    before = run(view, frames=PREFILL)
    shard.use_kernels(noting)
    assert view.chunks is not None
    assert len(view.chunks) == placed(view) > 0
    noting.calls.clear()
    found = run(view, frames=PREFILL)
    assert noting.calls["product"] >= 4 * len(view.plain_layers)
    is_asked = FAMILIES[family].quick or dtype == "bfloat16"  # else transformers' function attends
    assert bool(noting.calls["attend_chunk"]) is (is_asked and family != "mistral")  # whose layers all have a window
    if dtype == "float32":
        torch.testing.assert_close(found, before, rtol=1e-4, atol=1e-4)
    else:
        assert_near(found, before, run(shards(family, "float32").whole_view(), frames=PREFILL))
    noting.calls.clear()
    assert torch.equal(run(view, plain=True, frames=PREFILL), before)
    assert not noting.calls


@pytest.mark.parametrize("dtype", TWO_KINDS)
@torch.inference_mode()
def test_what_is_to_be_exact_does_not_take_them(dtype: str, shards: Load, noting: NotingKernels) -> None:
    shard = shards("qwen3", dtype)
    view, ids = shard.whole_view(), drawn(60, seed=3)

    def forward(*, plain: bool, stateless: bool) -> torch.Tensor:
        cache = None if stateless else view.new_cache()
        return view.forward(ids, position=0, cache=cache, sample=60, cancelled=never, plain=plain)

    exact = [(True, True), (True, False), (False, True)]
    before = [forward(plain=plain, stateless=stateless) for plain, stateless in exact]
    shard.use_kernels(noting)
    noting.calls.clear()
    for (plain, stateless), wanted in zip(exact, before, strict=True):
        assert torch.equal(forward(plain=plain, stateless=stateless), wanted)
    assert not noting.calls
    forward(plain=False, stateless=False)
    assert noting.calls["attend_chunk"] == len(view.plain_layers)
    work = ShardWork(0, shard.new_state(0), 0, 60, ids.int().numpy().tobytes(), dtype, exact=True)
    noting.calls.clear()
    assert not isinstance(shard.forward([work])[0], Exception)
    assert not noting.calls


def test_kernels_that_cannot_all_be_placed_are_not_there(
    shards: Load, noting: NotingKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = iter([ProductWay.WIDENED, ProductWay.WIDENED])
    monkeypatch.setattr(native_chunks, "quickest_way", lambda *_: next(ways))
    shard = shards("llama")
    shard.use_kernels(noting)
    assert shard.whole_view().chunks is None
    assert not placed(shard.whole_view())


def test_what_fails_beside_the_layers_is_the_last_too(
    shards: Load, noting: NotingKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shards("llama")
    shard.use_kernels(noting)
    view = shard.whole_view()
    assert view.chunk is not None
    monkeypatch.setattr(view.chunk, "_ended", lambda *_: 1 // 0)
    work = ShardWork(0, shard.new_state(0), 0, 40, drawn(40, seed=1).int().numpy().tobytes(), "bfloat16")
    assert isinstance(shard.forward([work])[0], HopFailedError)
    assert view.chunk is None
    assert not placed(view)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_layers_can_be_sketched_while_kernels_stand_in_them(family: str, shards: Load, noting: NotingKernels) -> None:
    shard = shards(family, "float32")
    before = [each.kind for each in sketch_layers(shard, lambda: False)]
    shard.use_kernels(noting)
    assert placed(shard.whole_view())
    assert [each.kind for each in sketch_layers(shard, lambda: False)] == before


@torch.inference_mode()
def test_a_chunk_that_is_cancelled_is_no_fault_of_the_kernels(shards: Load, noting: NotingKernels) -> None:
    shard = shards("llama")
    shard.use_kernels(noting)
    view, looks = shard.whole_view(), iter([False, True])
    noting.calls.clear()
    with pytest.raises(ForwardCancelledError):
        view.forward(
            drawn(40, seed=1), position=0, cache=view.new_cache(), sample=0, cancelled=lambda: next(looks), plain=False
        )
    assert noting.calls["attend_chunk"] == 1
    assert not view.part_failed


@pytest.mark.parametrize("dtype", TWO_KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_threads_and_cuts_change_no_bit(family: str, dtype: str, shards: Load, noting: NotingKernels) -> None:
    if parallel_address() is None:
        pytest.skip("torch's threads are none that can be shared here")
    shard = shards(family, dtype)
    shard.use_kernels(noting)
    view = shard.whole_view()
    assert view.chunk is not None
    alone = run(view, frames=(100, 60, 40))
    assert torch.equal(run(view, frames=(40, 140, 20)), alone)
    torch.set_num_threads(3)
    try:
        assert torch.equal(run(view, frames=(20, 100, 80)), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("fails", "positions", "family", "dtype"),
    [
        (fails, 25, *kind)
        for fails in ("product", "attend_chunk")
        for kind in (("llama", "float32"), ("llama", "bfloat16"), ("gemma3_text", "bfloat16"))
    ]
    + [("few", 1, family, "bfloat16") for family in ("llama", "gemma3_text")],
)
def test_a_kernel_that_fails_is_the_last(
    fails: str,
    positions: int,
    family: str,
    dtype: str,
    shards: Load,
    noting: NotingKernels,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shard = shards(family, dtype)
    shard.use_kernels(noting)

    def frame(state: SessionState, count: int, position: int) -> ShardResult | Exception:
        payload = torch.arange(3, 3 + count, dtype=torch.int32).numpy().tobytes()
        return shard.forward([ShardWork(0, state, position, count, payload, dtype)])[0]

    state = shard.new_state(0)
    assert not isinstance(frame(state, 30, 0), Exception)
    noting.fails = fails
    failed = frame(state, positions, 30)
    assert isinstance(failed, HopFailedError)
    assert state.spoiled
    assert "a native one failed: RuntimeError('planted')" in caplog.text
    view = shard.whole_view()
    assert view.chunks is None
    assert not placed(view)
    noting.calls.clear()
    state = shard.new_state(0)
    assert not any(isinstance(frame(state, count, at), Exception) for count, at in ((30, 0), (25, 30), (1, 55)))
    assert not noting.calls


def test_what_left_may_come_again(shards: Load, noting: NotingKernels) -> None:
    shard = shards("qwen3_moe")
    view = shard.whole_view()
    plain = run(view, frames=PREFILL)
    for _ in range(2):
        view.use_kernels(noting.kernels)
        view.use_kernels(noting.kernels)  # takes the place of what is there
        assert view.chunks is not None
        assert placed(view) == len(view.chunks)
        run(view, frames=PREFILL)
        assert noting.calls
        chunks = view.chunks
        view.drop_kernels()
        assert placed(view) == len(chunks) == 0
        noting.calls.clear()
        assert torch.equal(run(view, frames=PREFILL), plain)
        assert not noting.calls


@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe_text"])
@torch.inference_mode()
def test_views_of_one_shard_do_not_disturb_each_other(family: str, shards: Load, noting: NotingKernels) -> None:
    shard = shards(family, "float32")
    shard.use_kernels(noting)
    whole, tail = shard.whole_view(), shard._view(2)
    assert placed(tail) < placed(whole)
    noting.calls.clear()
    alone = run(whole, frames=PREFILL)
    calls = noting.calls.copy()

    def of_tail(*, plain: bool) -> torch.Tensor:
        hidden = torch.randn(1, 40, 128, generator=torch.Generator().manual_seed(0))
        return tail.forward(hidden, position=0, cache=tail.new_cache(), sample=40, cancelled=never, plain=plain)

    wanted = of_tail(plain=False)
    for plain in (True, False):
        of_tail(plain=plain)
        noting.calls.clear()
        assert torch.equal(run(whole, frames=PREFILL), alone)
        assert noting.calls == calls
    run(whole, plain=True, frames=PREFILL)
    noting.calls.clear()
    assert torch.equal(of_tail(plain=False), wanted)
    assert noting.calls
    tail.drop_kernels()
    noting.calls.clear()
    of_tail(plain=False)
    assert not noting.calls
    assert torch.equal(run(whole, frames=PREFILL), alone)
    assert noting.calls == calls


def test_where_the_library_is_quicker_chunks_have_attention_alone(
    shards: Load, noting: NotingKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_chunks, "quickest_way", lambda *_: None)
    shard = shards("llama")
    shard.use_kernels(noting)
    view = shard.whole_view()
    assert placed(view, OF_CHUNK) == len(view.plain_layers)
    assert placed(view, OF_FEW) == 4 * len(view.plain_layers)
    assert not placed(view, OF_MANY)
    run(view, frames=PREFILL)
    assert set(noting.calls) == {"attend_chunk", "few"}


def test_without_a_way_of_this_cpu_nothing_is_placed_for_chunks(
    shards: Load, noting: NotingKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_chunks, "quickest_way", lambda *_: None)
    noting.kernels.product_ways = frozenset()
    shard = shards("llama")
    shard.use_kernels(noting)
    assert placed(shard.whole_view(), OF_FEW) == placed(shard.whole_view()) > 0  # which needs no way


@pytest.mark.parametrize("dtype", TWO_KINDS)
@torch.inference_mode()
def test_each_expert_with_many_rows_is_multiplied(dtype: str, shards: Load, noting: NotingKernels) -> None:
    shard = shards("qwen3_moe", dtype)
    experts = next(module for module in modules_of(shard.whole_view()) if isinstance(module, LaidOutExperts))
    hidden = torch.randn(50, 128, generator=torch.Generator().manual_seed(0)).to(experts.down[0].dtype)
    counts = (MANY_ROWS, MANY_ROWS - 1, 50 - 2 * MANY_ROWS + 1)
    chosen = torch.repeat_interleave(torch.arange(3), torch.tensor(counts)).unsqueeze(1)
    weights = torch.rand(50, 1, generator=torch.Generator().manual_seed(1))
    wanted = experts(hidden, chosen, weights)
    shard.use_kernels(noting)
    noting.calls.clear()
    found = experts(hidden, chosen, weights)
    assert noting.calls == {"product": 2}
    near = 1e-5 if dtype == "float32" else 2**-7
    torch.testing.assert_close(found, wanted, rtol=near, atol=near)


def test_what_is_of_another_form_is_left_alone(shards: Load) -> None:
    layers = shards("qwen3_moe").whole_view().plain_layers
    linear = next(module for module in layers.modules() if isinstance(module, PackedLinear))
    experts = next(module for module in layers.modules() if isinstance(module, LaidOutExperts))
    assert has_products(linear)
    assert has_products(experts)
    assert attends(layers[0].get_submodule("self_attn"))
    assert may_have_chunks([linear])
    for module in (linear, experts):
        module.in_columns = False
        assert not has_products(module)
    linear.in_columns, linear.in_features = True, 66
    assert not has_products(linear)
    layers[0].get_submodule("self_attn").is_causal = False  # type: ignore[assignment]
    assert not attends(layers[0].get_submodule("self_attn"))
    assert not may_have_chunks([linear, nn.Linear(64, 64)])
