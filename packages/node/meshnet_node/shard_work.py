"""What a node's server asks of a loaded shard: frames of several sessions in, hidden states or logits out.

A list of frames is the unit of work. Types alone: who runs them is :mod:`meshnet_node.model_backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from meshnet_core.layer_range import LayerRange
from meshnet_node.session_state import SessionState


def never() -> bool:
    """For frames that nobody can cancel."""
    return False


@dataclass(frozen=True, slots=True)
class ShardWork:
    """One frame for a shard.

    Attributes:
        start: effective start, an absolute layer index; the frame runs from there to the shard's end.
        state: what :meth:`ShardBackend.new_state` gave for the same ``start``; None for the stateless path, which
            keeps nothing and must carry the whole sequence from position 0.
        position: positions before the first of this frame.
        seq_len: positions in this frame.
        payload: raw little-endian. Token ids of the vocabulary, int32 ``[seq_len]``, if ``start`` is 0; else hidden
            states ``[1, seq_len, hidden]`` in ``wire_dtype``. Whoever takes a frame in has looked at the ids.
        wire_dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; hidden states go out in it too.
        sample: how many trailing positions the last shard projects to logits; other shards ignore it.
        cancelled: looked at before each layer.
        held: what ``state``, still empty, begins from: a copy of its first ``position`` positions is made before the
            frame runs. The same object may serve several sessions, at once too.
        exact: the result is to be the same bits whatever else runs: alone, and in one piece. Products of one row and of
            several round differently.
        verify: the frame holds drafts: ``state`` keeps what it needs to fall back to the frame's first position, which
            a later frame that begins before the state's end makes it do.
    """

    start: int
    state: SessionState | None
    position: int
    seq_len: int
    payload: bytes | bytearray | memoryview
    wire_dtype: str
    sample: int = 0
    cancelled: Callable[[], bool] = never
    held: SessionState | None = None
    exact: bool = False
    verify: bool = False


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What became of one frame.

    Attributes:
        hidden: raw little-endian ``[1, seq_len, hidden]`` in the frame's ``wire_dtype``; None from the last shard.
        logits: float32 ``[sample, vocab]`` on the shard's device, from the last shard if ``sample`` > 0.
        seconds: wall time of the forward that this frame was part of.
    """

    hidden: memoryview | None
    logits: torch.Tensor | None
    seconds: float


class ShardBackend(Protocol):
    """What a node's server needs of a loaded shard.

    Attributes:
        layers: the range held.
        num_layers: layers of the whole model.
        hidden_size, vocab_size: of the model.
        max_positions: positions the model was made for; None where its config does not say.
        dtype: compute dtype by name, which session state of attention layers has too, and how weights are held
            (:mod:`meshnet_core.dtypes`).
        device: torch's name for it.
        model_type: transformers' name of the family.
        weight_bytes: bytes of weights and buffers held.
        batch_limit: how many frames :meth:`forward` gains by being given at once; 1 where it runs them one by one.
    """

    batch_limit: int
    layers: LayerRange
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    dtype: str
    device: str
    model_type: str
    weight_bytes: int

    def new_state(self, start: int) -> SessionState:
        """Empty state for layers ``start`` to the shard's end.

        Raises:
            InvalidInputError: if ``start`` lies outside the shard.
            UnsupportedModelError: if the model cannot be cut there.
        """
        ...

    def batch_key(self, work: ShardWork) -> Hashable | None:
        """What frames that can run in one forward have in common; None for one that runs alone."""
        ...

    def forward(self, works: Sequence[ShardWork]) -> list[ShardResult | Exception]:
        """Run the frames and advance their states; one that fails leaves its neighbours alone.

        Frames of one ``batch_key`` run in one forward. One that is refused or cancelled before leaves the others to it;
        if the forward itself raises, the states of all in it are spoiled.

        Call it from one thread at a time. The answer has one entry for each frame, in order: a result, or the exception
        (a ``MeshnetError``, or ``ForwardCancelledError``). A frame refused before any layer ran
        (``BadFrameError``, ``CacheMissError``) leaves its state usable; after any other exception the state is
        spoiled, since some layers may have advanced, and the caller drops it.
        """
        ...

    def state_bytes_per_position(self, start: int) -> int:
        """Bytes by which a session's state of layers ``start`` to the end grows with each position, without end."""
        ...

    def state_bytes(self, start: int, positions: int) -> int:
        """Upper bound of a session's state after ``positions`` positions, taken in by frames of any size."""
        ...

    def close(self) -> None:
        """Give the weights' memory back, once the frame that runs has finished; frames that come later fail.

        From any thread; idempotent.
        """
        ...
