"""What becomes of frames and of their states: those that fail, are refused or cancelled, and their neighbours.

Steps of several sessions in one forward have tests of their own (`test_sessions_together`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshnet_core.errors import BadFrameError, CacheMissError, HopFailedError, MissReason
from meshnet_node.layer_view import ForwardCancelledError, LayerView
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.shard_work import ShardResult, ShardWork
from shard_frames import HIDDEN, hidden_work, run, token_work
from shard_routes import Models, assert_close
from tiny_models import VOCAB

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def shard(models: Models) -> TorchModelShard:
    return models.shard("llama", 1, 3)


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
