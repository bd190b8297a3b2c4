"""Whether a frame fits the layers and the state that it is to run on, asked before any layer runs. Pure.

Knows no tensors: how long the payload has to be is :mod:`meshnet_node.frame_tensors`'.
"""

from __future__ import annotations

from meshnet_core.errors import BadFrameError, CacheMissError, MissReason
from meshnet_core.layer_range import LayerRange
from meshnet_node.device_choice import DTYPES
from meshnet_node.session_state import SessionState
from meshnet_node.shard_work import ShardWork


def check_fit(work: ShardWork, layers: LayerRange) -> None:
    """Refuse a frame that a shard of ``layers`` cannot run; its state stays as it is.

    Raises:
        BadFrameError: it makes no frame, or enters outside of ``layers``.
        CacheMissError: the state is spoiled, or is not of the frame's layers and position.
    """
    if work.start not in layers:
        raise BadFrameError(f"effective start {work.start} lies outside this shard's layers {layers}")
    if work.wire_dtype not in DTYPES:
        raise BadFrameError(f"wire dtype {work.wire_dtype!r} is unknown; it is one of {', '.join(DTYPES)}")
    if work.seq_len < 1 or work.position < 0 or not 0 <= work.sample <= work.seq_len:
        raise BadFrameError(
            f"seq_len {work.seq_len}, position {work.position}, sample {work.sample} make no frame: "
            "seq_len is at least 1, position at least 0, sample at most seq_len"
        )
    if work.state is not None:
        _check_state(work.state, work, layers.starting_at(work.start))
    elif work.position != 0:
        raise BadFrameError(f"a frame without state starts at position 0, not at {work.position}")


def _check_state(state: SessionState, work: ShardWork, runs: LayerRange) -> None:
    if state.spoiled:
        raise CacheMissError("an earlier forward of this state did not finish", reason=MissReason.FAILED)
    if state.layers != runs:
        raise CacheMissError(
            f"the state is of layers {state.layers}, the frame runs {runs}",
            reason=MissReason.RANGE_MISMATCH,
            position=state.position,
        )
    if state.position != work.position:
        raise CacheMissError(
            f"the state stands at position {state.position}, the frame starts at {work.position}",
            reason=MissReason.POSITION_MISMATCH,
            position=state.position,
        )
