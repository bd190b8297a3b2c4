"""Whether a shard's compiled step is the same as its plain one, and quicker, on the shard's own weights.

What "the same" means is :mod:`~meshnet_node.comparison`'s affair.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from meshnet_node.comparison import compare, tolerance_for
from meshnet_node.compiled_step import CompiledLayer, CompiledStep
from meshnet_node.layer_view import LayerView
from meshnet_node.step_frames import CompilableShard, StepFrames

PROMPTS = (1, 11, 70)  # positions before the steps that are compared: the last fills windows and turns rooms over
STEPS = 6  # of each


@dataclass(frozen=True, slots=True)
class StepComparison:
    """What came of it.

    Attributes:
        objection: what is wrong with the compiled step, in words; None if it is the same but for rounding.
        plain_s, compiled_s: medians of a step.
    """

    objection: str | None
    plain_s: float
    compiled_s: float


def compare_steps(
    shard: CompilableShard,
    layers: Sequence[CompiledLayer],
    *,
    stopped: Callable[[], bool],
    sleep: Callable[[float], None],
) -> StepComparison:
    """Run both on the same positions; in 16 bits, where rounding sets the scale, the plain one in one frame too.

    Raises:
        StoppedError: ``stopped`` said so.
    """
    view = shard.whole_view()
    with shard.its_turn():  # steps of several sessions attend in another way while they run
        step = CompiledStep(view, layers, view.look_at_cancel)
    plain: list[torch.Tensor] = []
    compiled: list[torch.Tensor] = []
    together: list[torch.Tensor] = []
    plain_s: list[float] = []
    compiled_s: list[float] = []
    for prompt in PROMPTS:
        for tree, rows, seconds in ((None, plain, plain_s), (step, compiled, compiled_s)):
            frames = StepFrames(shard, prompt + STEPS, stopped=stopped, sleep=sleep, tree=tree)
            frames.prefill(prompt)
            frames.step_s.clear()
            rows.append(frames.steps(STEPS))
            seconds.extend(frames.step_s)
        frames = StepFrames(shard, prompt + STEPS, stopped=stopped, sleep=sleep)
        frames.prefill(prompt)
        together.append(frames.frame(STEPS))
    compiled, together = (_scaled(view, rows, plain) for rows in (compiled, together))
    plain = _scaled(view, plain, plain)
    tolerance = tolerance_for(view.model.dtype, torch.cat(plain), [compare(together, plain)])
    objection = tolerance.objection(compare(compiled, plain))
    return StepComparison(objection, statistics.median(plain_s), statistics.median(compiled_s))


def _scaled(view: LayerView, rows: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Runs of a shard, ``[positions, width]``, as :mod:`meshnet_node.comparison` takes them.

    Logits as they are; hidden states, whose size differs a thousandfold between models, by that of the plain one's.
    """
    if view.is_last:
        return list(rows)
    sizes = [each.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-12) for each in plain]
    return [each / size for each, size in zip(rows, sizes, strict=True)]
