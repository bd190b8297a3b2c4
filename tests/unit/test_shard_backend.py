"""What a shard says of itself and of its state's size, and what its views share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from meshnet_core.errors import InvalidInputError
from meshnet_core.frames import MAX_CHUNK
from meshnet_core.layer_range import LayerRange
from meshnet_node.growing_cache import rows_for
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.shard_loader import load_shard
from meshnet_node.shard_work import ShardBackend, ShardWork
from shard_frames import HIDDEN, run, token_work
from shard_routes import Models, Route
from tiny_models import CORE, VOCAB, num_layers

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def shard(models: Models) -> TorchModelShard:
    return models.shard("llama", 1, 3)


def test_the_torch_shard_is_a_backend(shard: TorchModelShard) -> None:
    backend: ShardBackend = shard
    assert (backend.layers, backend.num_layers) == (LayerRange(1, 3), 4)
    assert (backend.hidden_size, backend.vocab_size, backend.max_positions) == (HIDDEN, VOCAB, 512)
    assert (backend.dtype, backend.device, backend.model_type) == ("float32", "cpu", "llama")
    assert backend.batch_limit == 32


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
