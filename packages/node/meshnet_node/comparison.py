"""Whether two runs of a model over the same tokens are the same but for rounding. Pure: logits in, a verdict out.

In float32 "the same" means logits within a fixed distance at every position. In 16 bits it cannot: kernels for one and
for many positions round differently, and a mixture of experts may send a position elsewhere where two experts score
nearly alike. There it means that no token differs but where the reference's best two are close, and that the *typical*
position moves no more than rounding moves it; how far that is, the whole model's own runs tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FLOAT32_LOGITS = 1e-3
"""SmolLM2's logits move by 7e-5 between one frame and steps; a wrong state moves them by 5e-2 and more."""

_ROUNDING = 8
"""Steps of rounding, relative to the spread of the logits, that pass for small however still the model itself keeps."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the logits of some runs compare with the reference's.

    Attributes:
        largest: the largest absolute difference of a logit; infinite where one of them is not a number.
        typical: the median, over the positions of a run, of each one's largest; of the run where it is highest.
        gaps: for each position whose best token differs, how far below its best the reference has that token.
        positions: how many were compared.
        same_bits: every logit is equal.
    """

    largest: float
    typical: float
    gaps: tuple[float, ...]
    positions: int
    same_bits: bool

    @property
    def agreeing(self) -> int:
        """Positions with the same best token."""
        return self.positions - len(self.gaps)


def compare(logits: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> Comparison:
    """Compare runs with their references, each float32 ``[positions, vocab]`` on the CPU.

    Raises:
        ValueError: shapes that differ, or no position.
    """
    if [each.shape for each in logits] != [each.shape for each in references] or not all(map(len, logits)):
        raise ValueError(f"logits {_shapes(logits)} cannot be compared with {_shapes(references)}")
    moved = [_moved(run, reference) for run, reference in zip(logits, references, strict=True)]
    found, expected = torch.cat(list(logits)), torch.cat(list(references))
    chosen, best = found.argmax(dim=-1), expected.argmax(dim=-1)
    gap = (expected.gather(1, best[:, None]) - expected.gather(1, chosen[:, None])).flatten()
    return Comparison(
        largest=max(float(each.max()) for each in moved),
        typical=max(float(each.median()) for each in moved),
        gaps=tuple(_no_nan(gap[chosen != best]).tolist()),
        positions=len(found),
        same_bits=torch.equal(found, expected),
    )


def _moved(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The largest difference at each position. Equal infinities do not differ; what is not a number always does."""
    return _no_nan((logits - reference).abs().masked_fill(logits == reference, 0)).amax(dim=-1)


def _no_nan(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(nan=float("inf"), posinf=float("inf"))


def _shapes(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    return [list(tensor.shape) for tensor in tensors]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What passes for rounding; all in units of logits.

    Attributes:
        largest: bound of the difference at every position; None where only the typical one is bounded.
        typical: bound of the median over the positions of each run.
        gap: a differing token is excused where the reference's logits of the two are this close.
    """

    largest: float | None
    typical: float
    gap: float

    def objection(self, found: Comparison) -> str | None:
        """Why ``found`` is more than rounding, in words; None if it is not."""
        if self.largest is not None and not found.largest <= self.largest:
            return f"logits differ by {found.largest:.2g}, more than {self.largest:.2g}"
        if wrong := [gap for gap in found.gaps if not gap <= self.gap]:
            return f"{len(wrong)} of {found.positions} tokens differ where the best two are {max(wrong):.2g} apart"
        if not found.typical <= self.typical:
            return f"logits typically differ by {found.typical:.2g}, more than {self.typical:.2g}"
        return None


def tolerance_for(dtype: torch.dtype, reference: torch.Tensor, own: Sequence[Comparison]) -> Tolerance:
    """The tolerance for a model.

    Args:
        dtype: it computes in.
        reference: its logits, float32 ``[positions, vocab]``.
        own: how the whole model, uncut, compares with itself between ways of running. In 16 bits they set the scale,
            within bounds: from a few steps of rounding to what would be no agreement any more.
    """
    if dtype is torch.float32:
        return Tolerance(FLOAT32_LOGITS, FLOAT32_LOGITS, FLOAT32_LOGITS)
    widest = widest_tolerance(dtype, reference)
    least = _ROUNDING * torch.finfo(dtype).eps * _spread(reference)
    return Tolerance(
        largest=None,
        typical=min(max(least, *(4 * each.typical for each in own)), widest.typical),
        gap=min(max(least, *(2 * each.largest for each in own)), widest.gap),
    )


def widest_tolerance(dtype: torch.dtype, reference: torch.Tensor) -> Tolerance:
    """The bound for the whole model against itself: half the spread of its logits for the typical position."""
    if dtype is torch.float32:
        return Tolerance(FLOAT32_LOGITS, FLOAT32_LOGITS, FLOAT32_LOGITS)
    spread = _spread(reference)
    return Tolerance(largest=None, typical=spread / 2, gap=spread)


def _spread(logits: torch.Tensor) -> float:
    """Standard deviation over the vocabulary, a mean over positions."""
    return float(logits.std(dim=-1).mean())
