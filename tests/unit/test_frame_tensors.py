"""Payloads as tensors, and hidden states as payloads again."""

from __future__ import annotations

import pytest
import torch

from meshnet_core.errors import BadFrameError, HopFailedError
from meshnet_node.frame_tensors import FrameTensors
from meshnet_node.layer_view import LayerView
from meshnet_node.model_backend import TorchModelShard
from shard_frames import HIDDEN, hidden_work, run, token_work
from shard_routes import Models

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def shard(models: Models) -> TorchModelShard:
    return models.shard("llama", 1, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"payload": b"\0" * 255}, "255 bytes; 2 positions of float32 hidden states of 32 take 256"),
        ({"payload": b"\0" * 257}, "257 bytes"),
        ({"payload": b""}, "0 bytes"),
        ({"wire_dtype": "bfloat16"}, "take 128"),
    ],
)
def test_a_payload_that_is_not_as_long_as_the_frame_is_refused(
    changes: dict[str, object], message: str, shard: TorchModelShard
) -> None:
    with pytest.raises(BadFrameError, match=message):
        run(shard, hidden_work(None, **changes))


def test_a_stand_in_of_one_position_is_as_what_is_read() -> None:
    tensors = FrameTensors(HIDDEN, torch.bfloat16, torch.device("cpu"))
    for work in (token_work([5]), hidden_work(None, seq_len=1)):
        read, stand_in = tensors.read(work), tensors.of_one_position(work.start)
        assert (stand_in.shape, stand_in.dtype) == (read.shape, read.dtype)


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
