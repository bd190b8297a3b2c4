"""Native gated delta rules in layers that are transformers' own, against these layers: alone, together, with drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshnet_core.errors import HopFailedError
from meshnet_node.layer_view import LayerView
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.native_delta import NativeDelta
from meshnet_node.ragged_cache import RaggedCache
from meshnet_node.shard_work import ShardWork, never
from native_compiler import needs_compiler
from step_logits import FRAMES, assert_near, drawn, run, whole_shard

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]
FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LENGTHS, STEPS = (5, 17, 30), 10
Load = Callable[..., TorchModelShard]


@pytest.fixture
def shards(tmp_path: Path) -> Load:
    return partial(whole_shard, tmp_path)


@torch.inference_mode()
def run_together(view: LayerView) -> torch.Tensor:
    """Logits ``[steps * sessions, vocab]`` of sessions of `LENGTHS` that go on together."""
    caches = [view.new_cache() for _ in LENGTHS]
    logits: list[torch.Tensor] = []
    for seed, (length, cache) in enumerate(zip(LENGTHS, caches, strict=True)):
        view.forward(drawn(length, seed), position=0, cache=cache, sample=0, cancelled=never)
    for step in range(STEPS):
        ids, positions = drawn(len(LENGTHS), 50 + step).reshape(-1, 1), [length + step for length in LENGTHS]
        found = view.forward_together(ids, positions=positions, caches=caches, sample=True, cancelled=never)
        logits += found[:, 0]
    return torch.stack(logits)


def rows_seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each native rule that runs from now on."""
    own, rows = NativeDelta._step, []

    def noting(delta: NativeDelta, hidden: torch.Tensor, slots: Any) -> torch.Tensor:
        rows.append(len(slots))
        return own(delta, hidden, slots)

    monkeypatch.setattr(NativeDelta, "_step", noting)
    return rows


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("of", [run, run_together])
def test_the_logits_are_those_of_the_layers(
    of: Callable[[LayerView], torch.Tensor], family: str, shards: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, rows = shards(family), rows_seen(monkeypatch)
    view = shard.whole_view()
    plain = of(view)
    assert not shard.runs_native
    shard.use_kernels()
    assert shard.runs_native
    rows.clear()
    assert_near(of(view), plain, of(shards(family, "float32").whole_view()))
    linear = view.config.layer_types.count("linear_attention")
    frames = FRAMES if of is run else (*LENGTHS, *[len(LENGTHS)] * STEPS)
    assert rows == [count for count in frames for _ in range(linear)]


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_frames_have_the_bits_of_the_layers(family: str, shards: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shards(family)
    plain = run(shard.whole_view())
    shard.use_kernels()
    native, rows = run(shard.whole_view()), rows_seen(monkeypatch)
    assert torch.equal(run(shard.whole_view(), plain=True), plain)
    assert not rows
    assert torch.equal(run(shard.whole_view()), native)  # and those after them are native again


def test_other_widths_are_taken_in_columns(shards: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"linear_key_head_dim": 16, "linear_value_head_dim": 136, "linear_num_value_heads": 6}
    shard, rows = shards("qwen3_5_text", **settings), rows_seen(monkeypatch)
    plain = run(shard.whole_view())
    shard.use_kernels()
    rows.clear()
    assert_near(run(shard.whole_view()), plain, run(shards("qwen3_5_text", "float32").whole_view()))
    assert rows


def test_with_more_threads_several_positions_are_the_modules_own(shards: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, rows = shards("qwen3_5_text"), rows_seen(monkeypatch)
    shard.use_kernels()
    plain = run(shard.whole_view(), plain=True)
    rows.clear()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert_near(run(shard.whole_view()), plain, run(shards("qwen3_5_text", "float32").whole_view()))
    assert set(rows) == {1}


@pytest.mark.parametrize(("family", "dtype"), [("qwen3_next", "float32"), ("lfm2", "bfloat16"), ("mamba2", "bfloat16")])
def test_other_shards_stay_as_they_are(family: str, dtype: str, shards: Load) -> None:
    shard = shards(family, dtype)
    shard.use_kernels()
    assert not shard.runs_native


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "activation", "gelu"),
        lambda module: setattr(module.conv1d, "bias", torch.nn.Parameter(torch.zeros(module.conv_dim))),
        lambda module: setattr(module, "num_k_heads", 3),
        lambda module: setattr(module, "head_k_dim", 64),
        lambda module: setattr(module.conv1d, "weight", torch.nn.Parameter(module.conv1d.weight[:8])),
        lambda module: setattr(module.norm, "weight", torch.nn.Parameter(module.norm.weight[:2])),
        lambda module: setattr(module, "dt_bias", torch.nn.Parameter(module.dt_bias[:1])),
        lambda module: delattr(module, "activation"),
        lambda module: delattr(module.norm, "variance_epsilon"),
        lambda module: delattr(module, "in_proj_z"),
        lambda module: setattr(module.norm, "weight", torch.nn.Parameter(module.norm.weight.float())),
    ],
)
def test_another_form_of_the_module_is_left_alone(change: Callable[[Any], None], shards: Load) -> None:
    view = shards("qwen3_5_text").whole_view()
    module: Any = view.plain_layers[0].linear_attn
    assert NativeDelta.can_run(module)
    change(module)
    assert not NativeDelta.can_run(module)


@torch.inference_mode()
def test_a_slot_that_records_its_past_is_the_modules_own(shards: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, rows = shards("qwen3_5_text"), rows_seen(monkeypatch)
    shard.use_kernels()
    view = shard.whole_view()
    cache = view.new_cache()
    view.forward(drawn(9, 0), position=0, cache=cache, sample=0, cancelled=never)
    rows.clear()
    for layer in cache.layers:
        layer.record_past = True
    view.forward(drawn(1, 1), position=9, cache=cache, sample=1, cancelled=never)
    assert not rows


@pytest.mark.parametrize("odd", ["strided", "double", "shape"])
@torch.inference_mode()
def test_a_slot_that_does_not_suit_the_kernel_is_the_modules_own(
    odd: str, shards: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shards("qwen3_5_text")
    shard.use_kernels()
    view = shard.whole_view()
    caches = [view.new_cache() for _ in range(2)]
    for seed, cache in enumerate(caches):
        view.forward(drawn(5, seed), position=0, cache=cache, sample=0, cancelled=never)
    slot: Any = caches[0].layers[0]
    state = slot.recurrent_states[0]
    slot.recurrent_states[0] = {
        "strided": state.transpose(-1, -2).contiguous().transpose(-1, -2),
        "double": state.double(),
        "shape": state[:, :, :-1],
    }[odd]
    parts = view.parts
    assert parts is not None
    assert parts.apart(caches) == parts.apart(caches[1:]) - {0} != parts.apart(caches[1:])
    rows = rows_seen(monkeypatch)
    linear = view.config.layer_types.count("linear_attention")
    if odd == "strided":  # else the layer itself cannot run with it
        view.forward(drawn(1, 2), position=5, cache=caches[0], sample=1, cancelled=never)
        view.forward_together(drawn(2, 3).reshape(2, 1), positions=[6, 5], caches=caches, sample=True, cancelled=never)
        assert rows == [1] * (linear - 1) + [2] * (linear - 1)


def test_a_part_that_cannot_be_made_leaves_no_other_in_place(
    shards: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shard, own = shards("qwen3_5_text"), NativeDelta.__init__

    def fail_late(delta: NativeDelta, module: Any, kernels: Any) -> None:
        if module.layer_idx > 1:
            raise AttributeError("planted")
        own(delta, module, kernels)

    monkeypatch.setattr(NativeDelta, "__init__", fail_late)
    shard.use_kernels()
    assert not shard.runs_native
    assert "planted" in caplog.text
    assert not any("forward" in vars(module) for module in shard.whole_view().plain_layers.modules())
    assert shard._view(1).parts is None  # nor in views that are made later


def test_a_failure_that_no_part_had_a_hand_in_leaves_them(shards: Load) -> None:
    shard = shards("qwen3_5_text")
    shard.use_kernels()
    shard._step_failed(0, 40, RuntimeError("out of memory"))
    shard._step_failed(4, 1, RuntimeError("elsewhere"))
    assert shard.runs_native


def test_sessions_together_keep_what_is_apart_to_themselves(shards: Load) -> None:
    view = shards("qwen3_5_text").whole_view()
    caches = [view.new_cache() for _ in range(2)]
    for cache in caches:
        view.forward(drawn(5, 0), position=0, cache=cache, sample=0, cancelled=never)
    together = RaggedCache(caches, apart={0})
    assert together.rows_of(0) == tuple(cache.layers[0] for cache in caches)
    assert together.rows_of(1) == ()
    for update in (together.layers[0].update_conv_state, together.layers[0].update_recurrent_state):
        with pytest.raises(TypeError, match="their own"):
            update(torch.zeros(1))
    before = [cache.layers[0].recurrent_states[0].clone() for cache in caches]
    together.give_back()
    assert all(torch.equal(cache.layers[0].recurrent_states[0], was) for cache, was in zip(caches, before, strict=True))


@pytest.mark.parametrize("count", [1, 2])
def test_a_native_rule_that_fails_is_the_last(
    count: int, shards: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shard = shards("qwen3_5_text")
    shard.use_kernels()
    states = [shard.new_state(0) for _ in range(count)]

    def frames(states: list[Any], length: int, position: int) -> list[Any]:
        payload = torch.arange(3, 3 + length, dtype=torch.int32).numpy().tobytes()
        return list(
            shard.forward([ShardWork(0, state, position, length, payload, "bfloat16", sample=1) for state in states])
        )

    assert not any(isinstance(found, Exception) for found in frames(states, 4, 0))
    monkeypatch.setattr(NativeDelta, "_step", lambda *_: 1 / 0)
    assert all(isinstance(found, HopFailedError) for found in frames(states, 1, 4))
    assert not shard.runs_native
    assert "a native one failed: ZeroDivisionError" in caplog.text
    again = [shard.new_state(0)]
    assert not any(isinstance(found, Exception) for at, n in ((0, 4), (4, 1)) for found in frames(again, n, at))
