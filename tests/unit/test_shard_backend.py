"""Frames in, results out: what the backend refuses, what becomes of a state, and what it says of its size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from meshnet_core.errors import BadFrameError, CacheMissError, HopFailedError, InvalidInputError, MissReason
from meshnet_core.frames import MAX_CHUNK
from meshnet_core.layer_range import LayerRange
from meshnet_node.growing_cache import rows_for
from meshnet_node.layer_slicing import ForwardCancelledError, LayerView
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.session_state import SessionState
from meshnet_node.shard_loader import load_shard
from meshnet_node.shard_work import ShardBackend, ShardResult, ShardWork
from shard_routes import Models, Route, assert_close
from tiny_models import CORE, VOCAB, num_layers

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN = 32


@pytest.fixture
def shard(models: Models) -> TorchModelShard:
    return models.shard("llama", 1, 3)


def hidden_work(state: SessionState | None, position: int = 0, seq_len: int = 2, **changes: object) -> ShardWork:
    generator = torch.Generator().manual_seed(position)
    payload = torch.randn(seq_len, HIDDEN, generator=generator).numpy().tobytes()
    work = ShardWork(
        start=1, state=state, position=position, seq_len=seq_len, payload=payload, wire_dtype="float32", sample=0
    )
    return replace(work, **changes)  # type: ignore[arg-type]


def run(shard: TorchModelShard, work: ShardWork) -> ShardResult:
    (result,) = shard.forward([work])
    if isinstance(result, Exception):
        raise result
    return result


def token_work(ids: list[int], **changes: object) -> ShardWork:
    payload = torch.tensor(ids, dtype=torch.int32).numpy().tobytes()
    return replace(ShardWork(0, None, 0, len(ids), payload, "float32"), **changes)  # type: ignore[arg-type]


def test_the_torch_shard_is_a_backend(shard: TorchModelShard) -> None:
    backend: ShardBackend = shard
    assert (backend.layers, backend.num_layers) == (LayerRange(1, 3), 4)
    assert (backend.hidden_size, backend.vocab_size, backend.max_positions) == (HIDDEN, VOCAB, 512)
    assert (backend.dtype, backend.device, backend.model_type) == ("float32", "cpu", "llama")
    assert backend.batch_limit == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"payload": b"\0" * 255}, "255 bytes; 2 positions of float32 hidden states of 32 take 256"),
        ({"payload": b"\0" * 257}, "257 bytes"),
        ({"payload": b""}, "0 bytes"),
        ({"wire_dtype": "float64"}, "float64"),
        ({"wire_dtype": "bfloat16"}, "take 128"),
        ({"start": 0}, "outside this shard's layers 1-2"),
        ({"start": 3}, "outside this shard's layers 1-2"),
        ({"seq_len": 0}, "seq_len is at least 1"),
        ({"position": -1}, "position at least 0"),
        ({"sample": 3}, "sample at most seq_len"),
        ({"position": 4}, "without state starts at position 0"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused(changes: dict[str, object], message: str, shard: TorchModelShard) -> None:
    with pytest.raises(BadFrameError, match=message):
        run(shard, hidden_work(None, **changes))


def test_a_state_of_another_position_or_range_is_a_miss_and_stays_usable(shard: TorchModelShard) -> None:
    state = shard.new_state(1)
    run(shard, hidden_work(state))
    with pytest.raises(CacheMissError) as miss:
        run(shard, hidden_work(state, position=3))
    assert (miss.value.reason, miss.value.position) == (MissReason.POSITION_MISMATCH, 2)
    with pytest.raises(CacheMissError) as miss:
        run(shard, hidden_work(state, position=2, start=2))
    assert miss.value.reason is MissReason.RANGE_MISMATCH
    run(shard, hidden_work(state, position=2))
    assert (state.position, state.spoiled) == (4, False)


def test_one_failing_frame_leaves_its_neighbours_alone(shard: TorchModelShard) -> None:
    states = [shard.new_state(1) for _ in range(3)]
    works = [hidden_work(state) for state in states]
    works[1] = replace(works[1], payload=b"short")
    good, bad, other = shard.forward(works)
    assert isinstance(good, ShardResult)
    assert isinstance(bad, BadFrameError)
    assert isinstance(other, ShardResult)
    assert [state.position for state in states] == [2, 0, 2]
    assert good.hidden is not None
    assert other.hidden is not None
    assert bytes(good.hidden) == bytes(other.hidden)


def test_a_failing_forward_spoils_the_state(shard: TorchModelShard, monkeypatch: pytest.MonkeyPatch) -> None:
    state = shard.new_state(1)
    run(shard, hidden_work(state))

    def fail(*_arguments: object, **_options: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(LayerView, "forward", fail)
        with pytest.raises(HopFailedError, match="out of memory"):
            run(shard, hidden_work(state, position=2))
    assert state.spoiled
    with pytest.raises(CacheMissError) as miss:
        run(shard, hidden_work(state, position=2))
    assert miss.value.reason is MissReason.FAILED


def test_a_cancel_is_looked_at_before_every_layer_and_spoils_the_state(models: Models) -> None:
    shard = models.shard("llama", 0, 4)
    looks = 0

    def cancelled() -> bool:
        nonlocal looks
        looks += 1
        return looks == 3

    state = shard.new_state(0)
    with pytest.raises(ForwardCancelledError, match="0-3"):
        run(shard, token_work([5, 6, 7], state=state, cancelled=cancelled))
    assert looks == 3  # and the fourth layer was not begun
    assert state.spoiled
    run(shard, token_work([5, 6, 7], state=shard.new_state(0)))  # the next one is not cancelled by the last one


def test_only_sampled_positions_are_projected(models: Models) -> None:
    shard = models.shard("llama", 2, 4)
    payload = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0)).numpy().tobytes()
    work = ShardWork(2, None, 0, 3, payload, "float32", sample=3)
    every = run(shard, work).logits
    last = run(shard, replace(work, sample=1)).logits
    none = run(shard, replace(work, sample=0))
    assert every is not None
    assert last is not None
    assert every.shape == (3, VOCAB)
    assert last.shape == (1, VOCAB)
    assert last.dtype is torch.float32
    assert_close(every[-1:], last)
    assert (none.logits, none.hidden) == (None, None)


@pytest.mark.parametrize(("wire", "tolerance"), [("float32", 0.0), ("bfloat16", 0.02), ("float16", 0.002)])
def test_hidden_states_go_out_in_the_wire_dtype(wire: str, tolerance: float, shard: TorchModelShard) -> None:
    dtype = getattr(torch, wire)
    values = torch.randn(1, 2, HIDDEN, generator=torch.Generator().manual_seed(0))
    exact = run(shard, hidden_work(None, payload=values.numpy().tobytes()))
    sent = values.to(dtype).view(torch.uint8).numpy().tobytes()
    result = run(shard, hidden_work(None, payload=sent, wire_dtype=wire))
    assert exact.hidden is not None
    assert result.hidden is not None
    assert result.hidden.nbytes == 2 * HIDDEN * dtype.itemsize
    received = torch.frombuffer(bytearray(result.hidden), dtype=dtype).float()
    expected = torch.frombuffer(bytearray(exact.hidden), dtype=torch.float32)
    assert float((received - expected).abs().max() / expected.abs().max()) <= tolerance


def test_hidden_states_too_large_for_float16_are_not_sent_as_infinity(
    shard: TorchModelShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerView, "forward", lambda *_arguments, **_options: torch.full((1, 1, HIDDEN), 1e5))
    payload = torch.ones(HIDDEN, dtype=torch.float16).view(torch.uint8).numpy().tobytes()
    work = hidden_work(None, seq_len=1, payload=payload, wire_dtype="float16")
    with pytest.raises(HopFailedError, match="overflow float16"):
        run(shard, work)


@pytest.mark.parametrize("family", CORE)
def test_the_announced_size_of_a_state_bounds_what_it_holds(family: str, models: Models) -> None:
    layers = num_layers(family)
    shard = models.shard(family, 0, layers)
    for start in range(layers):
        state = shard.new_state(start)
        assert state.nbytes < 1024
        position = 0
        for seq_len in (5, 5, *[1] * 10, MAX_CHUNK, 100, 1, 1):
            if start == 0:
                payload = torch.ones(seq_len, dtype=torch.int32).numpy().tobytes()
            else:
                payload = torch.ones(seq_len, HIDDEN).numpy().tobytes()
            run(shard, ShardWork(start, state, position, seq_len, payload, "float32"))
            position += seq_len
            assert 0 < state.nbytes <= shard.state_bytes(start, position)


def test_a_short_session_is_not_charged_for_a_whole_window(models: Models) -> None:
    shard = models.shard("mistral", 0, 4)
    per_position = 4 * 2 * 2 * 8 * 4
    empty = shard.state_bytes(0, 0)
    assert empty < per_position
    assert shard.state_bytes(0, 3) == empty + 3 * per_position
    assert shard.state_bytes(0, 500) == shard.state_bytes(0, 10_000) == empty + rows_for(11 + MAX_CHUNK) * per_position


def test_a_state_knows_every_tensor_of_the_cache_and_counts_storage_once(models: Models) -> None:
    route = Route([(models.shard("qwen3_5_text", 0, 5), 0)])
    (state,) = route.open()
    assert state.nbytes == 0
    route.prefill(list(range(3, 15)), [state])
    kinds = {tuple(tensor.shape) for tensor in state.tensors()}
    assert (1, 2, 12, 8) in kinds  # keys and values
    assert (1, 64, 4) in kinds  # conv states
    assert (1, 4, 8, 8) in kinds  # recurrent states
    before = state.nbytes
    route.decode([3], 12, [state])
    assert state.nbytes == before + 2 * 2 * 2 * 8 * 4  # two attention layers, keys and values, two heads of eight


def test_a_window_that_is_a_view_counts_all_that_it_keeps_alive(models: Models) -> None:
    route = Route([(models.shard("mistral", 0, 4), 0)])
    (state,) = route.open()
    route.frame(list(range(3, 43)), 0, [state])
    visible = sum(tensor.nbytes for tensor in state.tensors())
    assert state.nbytes >= 4 * 2 * 40 * 2 * 8 * 4 > visible


def test_recurrent_state_stays_in_float32_under_bfloat16_weights(
    models: Models, load_bfloat16: Callable[[str], TorchModelShard]
) -> None:
    shard = load_bfloat16("qwen3_5_text")
    state = shard.new_state(0)
    run(shard, token_work([5, 6, 7], state=state, wire_dtype="bfloat16"))
    dtypes = {tensor.dtype for tensor in state.tensors() if tensor.shape == (1, 4, 8, 8)}
    assert dtypes == {torch.float32}


@pytest.fixture
def load_bfloat16(models: Models) -> Callable[[str], TorchModelShard]:
    return lambda family: load_shard(
        models.folder(family), LayerRange(0, num_layers(family)), dtype="bfloat16", device="cpu"
    )


def test_an_effective_start_outside_the_shard_has_no_state(shard: TorchModelShard) -> None:
    for start in (0, 3):
        with pytest.raises(InvalidInputError, match="outside"):
            shard.new_state(start)
        with pytest.raises(InvalidInputError, match="outside"):
            shard.state_bytes_per_position(start)


def test_views_share_the_shards_weights(models: Models) -> None:
    shard = models.shard("qwen3_moe", 0, 4)
    before = {parameter.data_ptr() for parameter in shard._model.parameters()}
    for start in range(4):
        view = shard._view(start)
        assert {parameter.data_ptr() for parameter in view.model.parameters()} <= before
        assert view.config.num_hidden_layers == 4 - start
    assert shard._model.config.num_hidden_layers == 4
