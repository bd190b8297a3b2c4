"""Native steps against the quick layers that they stand for: every family that has those, alone and together."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from meshnet_core.errors import HopFailedError
from meshnet_core.frames import MAX_DRAFT
from meshnet_node import native_attention, native_step
from meshnet_node.family_support import FAMILIES
from meshnet_node.layer_view import ForwardCancelledError, LayerView
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.native_step import MOST_ROWS, NativeStep
from meshnet_node.rope_table import RopeTable
from meshnet_node.session_state import SessionState
from meshnet_node.shard_work import ShardResult, ShardWork, never
from native_compiler import needs_compiler
from step_logits import FRAMES, WIDE, assert_near, drawn, run, whole_shard

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]
QUICK = [name for name, family in FAMILIES.items() if family.quick]
LENGTHS, STEPS = (5, 17, 30, 1), 14
DRAFTED = 3  # positions of a frame with drafts


@pytest.fixture
def shards(tmp_path: Path) -> Callable[..., TorchModelShard]:
    return partial(whole_shard, tmp_path)


def assert_native(shard: TorchModelShard, exact: TorchModelShard) -> None:
    """Whether native steps give what the shard's layers do; it has none yet."""
    view = shard.whole_view()
    plain = run(view)
    shard.use_kernels()
    assert shard.runs_native
    assert_near(run(view), plain, run(exact.whole_view()))


def counted(view: LayerView, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each native step that the view runs from now on."""
    native, rows = view.native, []
    assert native is not None
    own = native.run

    def noting(inputs: torch.Tensor, *arguments: Any) -> torch.Tensor:
        rows.append(len(inputs))
        return own(inputs, *arguments)

    monkeypatch.setattr(native, "run", noting)
    return rows


@pytest.mark.parametrize("family", QUICK)
def test_the_logits_are_those_of_quick_layers(
    family: str, shards: Callable[..., TorchModelShard], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shards(family)
    plain = run(shard.whole_view())
    assert not shard.runs_native
    assert_native(shard, shards(family, "float32"))
    rows = counted(shard.whole_view(), monkeypatch)
    run(shard.whole_view())
    assert rows == [*FRAMES[1:]]  # chunks as short as that, too
    assert torch.equal(run(shard.whole_view(), plain=True), plain)
    assert len(rows) == len(FRAMES) - 1


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "smollm3", "mixtral"])
@torch.inference_mode()
def test_sessions_together_answer_as_each_alone(
    family: str, shards: Callable[..., TorchModelShard], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shards(family)
    view = shard.whole_view()
    ids = [drawn(length + STEPS, seed=length) for length in LENGTHS]

    def opened() -> list[DynamicCache]:
        caches = [view.new_cache() for _ in LENGTHS]
        for each, length, cache in zip(ids, LENGTHS, caches, strict=True):
            view.forward(each[:, :length], position=0, cache=cache, sample=0, cancelled=never)
        return caches

    alone = [
        torch.cat(
            [
                view.forward(each[:, [at]], position=at, cache=cache, sample=1, cancelled=never)[0]
                for at in range(length, length + STEPS)
            ]
        )
        for each, length, cache in zip(ids, LENGTHS, opened(), strict=True)
    ]
    exact = shards(family, "float32").whole_view()
    whole = [exact.forward(each, position=0, cache=None, sample=STEPS, cancelled=never)[0] for each in ids]
    shard.use_kernels()
    rows, caches = counted(view, monkeypatch), opened()
    found: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for at in range(STEPS):
        order = [(at + row) % len(LENGTHS) for row in range(len(LENGTHS))]  # rows change places
        positions = [LENGTHS[each] + at for each in order]
        logits = view.forward_together(
            torch.cat([ids[each][:, [position]] for each, position in zip(order, positions, strict=True)]),
            positions=positions,
            caches=[caches[each] for each in order],
            sample=True,
            cancelled=never,
        )
        for each, row in zip(order, logits, strict=True):
            found[each].append(row)
    assert_near(torch.cat([row for rows in found for row in rows]), torch.cat(alone), torch.cat(whole))
    assert rows == [len(LENGTHS)] * STEPS


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_packed_weights_are_multiplied_and_looked_up(quantize: str, shards: Callable[..., TorchModelShard]) -> None:
    shard = shards("llama", quantize=quantize, **WIDE)
    plain = run(shard.whole_view())
    shard.use_kernels()
    found = run(shard.whole_view())
    assert not torch.equal(found, plain)
    torch.testing.assert_close(found.float(), plain.float(), rtol=0, atol=0.25)
    assert float((found.float() - plain.float()).abs().mean()) < 0.02


def test_biases_and_gates_of_another_kind_are_kept(shards: Callable[..., TorchModelShard]) -> None:
    settings = {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}
    assert_native(shards("llama", **settings), shards("llama", "float32"))


def test_where_threads_cannot_be_shared_long_sessions_attend_by_torch(
    shards: Callable[..., TorchModelShard], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    own = native_attention.attend

    def noting(module: Any, query: torch.Tensor, key: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        asked.append(key.shape[2])
        return own(module, query, key, *arguments, **options)

    monkeypatch.setattr(native_attention, "team_here", lambda: None)
    monkeypatch.setattr(native_attention, "_FEW_VALUES", 0)
    monkeypatch.setattr(native_attention, "attend", noting)
    assert_native(
        shards("qwen3"), shards("qwen3", "float32")
    )  # with norms of heads and rope, which the kernel applies before
    assert set(asked) == {19, *range(21, 47)}  # the first is tried as the shard is given them


@pytest.mark.parametrize("what", ["no rotation", "hidden states"])
def test_a_step_that_is_wrong_is_seen(
    what: str, shards: Callable[..., TorchModelShard], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, exact = shards("llama"), run(shards("llama", "float32").whole_view())
    plain = run(shard.whole_view())
    shard.use_kernels()
    assert_near(run(shard.whole_view()), plain, exact)
    if what == "no rotation":
        at = RopeTable.at
        monkeypatch.setattr(RopeTable, "at", lambda table, positions: at(table, [0 for _ in positions]))
    else:
        layer = native_step._NativeLayer.run
        monkeypatch.setattr(
            native_step._NativeLayer, "run", lambda own, residual, *rest: layer(own, residual * 1.05, *rest)
        )
    wrong = run(shard.whole_view())
    with pytest.raises(AssertionError):
        assert_near(wrong, plain, exact)


@pytest.mark.parametrize("when", ["when it is tried", "alone", "together", "with drafts"])
def test_a_native_step_that_fails_is_the_last(
    when: str, shards: Callable[..., TorchModelShard], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shard = shards("llama")
    failing = when == "when it is tried"

    def fail(native: NativeStep, *arguments: Any) -> torch.Tensor:
        if failing:
            raise RuntimeError("planted")
        return own(native, *arguments)

    own = NativeStep.run
    monkeypatch.setattr(NativeStep, "run", fail)
    shard.use_kernels()
    assert shard.runs_native is not failing
    failing = True

    def frames(states: list[SessionState], count: int, position: int) -> list[ShardResult | Exception]:
        payload = torch.arange(3, 3 + count, dtype=torch.int32).numpy().tobytes()
        return shard.forward(
            [
                ShardWork(0, state, position, count, payload, "bfloat16", sample=1, verify=count == DRAFTED)
                for state in states
            ]
        )

    states = [shard.new_state(0) for _ in range(2)]
    assert not any(isinstance(result, Exception) for result in frames(states, 4, 0))
    if when != "when it is tried":
        sent = {"alone": (states[:1], 1), "together": (states, 1), "with drafts": (states[:1], DRAFTED)}[when]
        failed = frames(*sent, 4)
        assert all(isinstance(result, HopFailedError) for result in failed)
        assert all(state.spoiled for state in sent[0])
    assert not shard.runs_native
    assert "a native one failed: RuntimeError('planted')" in caplog.text
    again = [shard.new_state(0)]
    assert not any(
        isinstance(result, Exception) for count, at in ((4, 0), (1, 4)) for result in frames(again, count, at)
    )


def test_exact_frames_that_fail_say_nothing_of_native_steps(
    shards: Callable[..., TorchModelShard], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shards("llama")
    shard.use_kernels()
    state, payload = shard.new_state(0), torch.tensor([3], dtype=torch.int32).numpy().tobytes()
    assert not isinstance(shard.forward([ShardWork(0, state, 0, 1, payload, "bfloat16")])[0], Exception)
    monkeypatch.setattr(LayerView, "_run", lambda *_: 1 / 0)
    (failed,) = shard.forward([ShardWork(0, state, 1, 1, payload, "bfloat16", exact=True)])
    assert isinstance(failed, HopFailedError)
    assert shard.runs_native


def test_what_is_no_fault_of_the_layers_leaves_native_steps(shards: Callable[..., TorchModelShard]) -> None:
    shard = shards("llama")
    shard.use_kernels()
    failures = [HopFailedError("hidden states overflow float16 on the wire"), ForwardCancelledError("a frame")]
    for failure in failures:
        shard._step_failed(4, 1, failure)
        assert shard.runs_native
    shard._step_failed(4, MOST_ROWS + 1, RuntimeError("of a long frame"))
    shard._step_failed(0, 1, RuntimeError("of a first frame"))
    assert shard.runs_native
    shard._step_failed(4, 1, RuntimeError("of a step"))
    assert not shard.runs_native


def test_hidden_states_of_another_dtype_are_refused(shards: Callable[..., TorchModelShard]) -> None:
    shard = shards("llama")
    shard.use_kernels()
    view = shard.whole_view()
    assert view.native is not None
    with torch.inference_mode(), pytest.raises(TypeError, match=r"bfloat16, not in torch\.float32"):
        view.native.run(torch.zeros(1, 1, shard.hidden_size), [1], [view.new_cache()], lambda: None)


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("llama", "float16"), ("gemma3_text", "bfloat16")])
def test_other_shards_stay_as_they_are(family: str, dtype: str, shards: Callable[..., TorchModelShard]) -> None:
    shard = shards(family, dtype)
    shard.use_kernels()
    assert not shard.runs_native


def test_longer_frames_are_the_layers_own(
    shards: Callable[..., TorchModelShard], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shards("llama")
    shard.use_kernels()
    view, rows = shard.whole_view(), counted(shard.whole_view(), monkeypatch)
    cache, position = view.new_cache(), 0
    with torch.inference_mode():
        for count in (1, MOST_ROWS, MOST_ROWS + 1):
            view.forward(drawn(count, seed=0), position=position, cache=cache, sample=0, cancelled=never)
            position += count
    assert rows == [MOST_ROWS]
    assert MOST_ROWS == MAX_DRAFT + 1


def test_without_kernels_a_shard_stays_as_it_is(shards: Callable[..., TorchModelShard]) -> None:
    shard = shards("llama")
    shard.use_kernels(lambda: None)
    assert not shard.runs_native


def test_a_view_that_is_made_later_has_them_too(shards: Callable[..., TorchModelShard]) -> None:
    shard = shards("llama")
    shard.use_kernels()
    assert shard._view(1).native is not None


def test_a_step_that_is_cancelled_stops_between_layers(shards: Callable[..., TorchModelShard]) -> None:
    shard = shards("llama")
    shard.use_kernels()
    view, cache, looks = shard.whole_view(), shard.whole_view().new_cache(), [False, True]
    with torch.inference_mode():
        view.forward(drawn(4, seed=0), position=0, cache=cache, sample=0, cancelled=never)
        with pytest.raises(ForwardCancelledError):
            view.forward(drawn(1, seed=1), position=4, cache=cache, sample=1, cancelled=lambda: looks.pop(0))
    assert [slot.get_seq_length() for slot in cache.layers] == [5, *[4] * (len(cache.layers) - 1)]


def test_a_shard_that_is_closed_lets_go_of_its_weights(shards: Callable[..., TorchModelShard]) -> None:
    shard = shards("llama", quantize="int4", **WIDE)
    shard.use_kernels()
    run(shard.whole_view())
    held = [weakref.ref(tensor) for _, module in shard.named_modules() for tensor in module.buffers(recurse=False)]
    held += [weakref.ref(tensor) for _, module in shard.named_modules() for tensor in module.parameters(recurse=False)]
    assert all(each() is not None for each in held)
    shard.close()
    gc.collect()
    # What torch keeps of rope's frequencies is no weight.
    assert sum(each() is not None for each in held) <= 2
