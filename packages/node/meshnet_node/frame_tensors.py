"""A frame's bytes as the tensors that a shard's layers run on, and what they give as bytes again.

Knows no layers' modules and no state.
"""

from __future__ import annotations

import torch

from meshnet_core.errors import BadFrameError, HopFailedError
from meshnet_node.device_choice import DTYPES
from meshnet_node.shard_work import ShardWork

_TOKEN_BYTES = 4  # int32


class FrameTensors:
    """Of one shard's frames.

    Args:
        hidden_size: of the model.
        dtype: that the shard computes in.
        device: that it lies on.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device

    def read(self, work: ShardWork) -> torch.Tensor:
        """The payload on the device: int64 ids ``[1, seq_len]``, or hidden states ``[1, seq_len, hidden]`` computed in.

        Raises:
            BadFrameError: it is not as long as the frame's positions are.
        """
        dtype = torch.int32 if work.start == 0 else DTYPES[work.wire_dtype]
        expected = work.seq_len * (_TOKEN_BYTES if work.start == 0 else self._hidden_size * dtype.itemsize)
        given = memoryview(work.payload).nbytes
        if given != expected:
            what = "int32 token ids" if work.start == 0 else f"{work.wire_dtype} hidden states of {self._hidden_size}"
            raise BadFrameError(f"payload has {given} bytes; {work.seq_len} positions of {what} take {expected}")
        flat = torch.frombuffer(bytearray(work.payload), dtype=dtype)
        if work.start > 0:
            return flat.view(1, work.seq_len, self._hidden_size).to(device=self._device, dtype=self._dtype)
        return flat.view(1, work.seq_len).to(device=self._device, dtype=torch.int64)

    def of_one_position(self, start: int) -> torch.Tensor:
        """As :meth:`read` gives for some frame of one position that enters at layer ``start``."""
        if start == 0:
            return torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        return torch.ones(1, 1, self._hidden_size, dtype=self._dtype, device=self._device)


def to_wire(hidden: torch.Tensor, wire_dtype: str) -> memoryview:
    """Hidden states as raw little-endian bytes; keeps the tensor alive instead of copying it once more.

    Args:
        hidden: ``[1, seq_len, hidden]``.
        wire_dtype: the frame's.

    Raises:
        HopFailedError: a value is too large for float16.
    """
    dtype = DTYPES[wire_dtype]
    sent = hidden.to(dtype)
    if dtype is torch.float16 and hidden.dtype is not torch.float16 and not bool(torch.isfinite(sent).all()):
        raise HopFailedError("hidden states overflow float16 on the wire; open the session with bfloat16 or float32")
    return sent.cpu().contiguous().view(torch.uint8).numpy().data.cast("B")
