"""What counts as the same, in float32 and in 16 bits."""

from __future__ import annotations

import pytest
import torch

from meshnet_node.comparison import Comparison, Tolerance, tolerance_for, widest_tolerance
from meshnet_node.comparison import compare as compare_runs

REFERENCE = torch.tensor([[0.0, 4.0, 1.0], [3.0, 2.9, 0.0], [0.0, 1.0, 5.0]])
FLOAT32 = tolerance_for(torch.float32, REFERENCE, [])
CLOSE = Tolerance(largest=None, typical=0.2, gap=0.2)


def compare(logits: torch.Tensor, reference: torch.Tensor) -> Comparison:
    return compare_runs([logits], [reference])


def moved(row: int, column: int, by: float) -> torch.Tensor:
    logits = REFERENCE.clone()
    logits[row, column] += by
    return logits


def test_equal_logits_have_the_same_bits() -> None:
    found = compare(REFERENCE.clone(), REFERENCE)
    assert (found.largest, found.gaps, found.agreeing, found.same_bits) == (0.0, (), 3, True)
    assert FLOAT32.objection(found) is None


def test_in_float32_one_position_that_moves_is_enough() -> None:
    assert FLOAT32.objection(compare(moved(0, 0, 5e-4), REFERENCE)) is None
    assert "logits differ by 0.05" in (FLOAT32.objection(compare(moved(0, 0, 0.05), REFERENCE)) or "")


def test_a_differing_token_is_excused_only_where_the_best_two_are_close() -> None:
    close, far = compare(moved(1, 1, 0.15), REFERENCE), compare(moved(0, 2, 3.5), REFERENCE)
    assert close.gaps == pytest.approx((0.1,))
    assert CLOSE.objection(close) is None
    assert CLOSE.objection(far) == "1 of 3 tokens differ where the best two are 3 apart"


def test_in_16_bits_one_position_may_move_and_the_typical_one_may_not() -> None:
    assert CLOSE.objection(compare(moved(0, 0, 1.0), REFERENCE)) is None
    shifted = compare(REFERENCE + torch.tensor([0.0, 0.5, 0.5]), REFERENCE)
    assert "typically differ by 0.5" in (CLOSE.objection(shifted) or "")


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("tolerance", [FLOAT32, CLOSE])
def test_what_is_not_a_number_never_passes(broken: float, tolerance: Tolerance) -> None:
    found = compare(torch.full_like(REFERENCE, broken), REFERENCE)
    assert found.largest == float("inf")
    assert tolerance.objection(found) is not None
    twice_broken = compare(torch.full_like(REFERENCE, float("nan")), torch.full_like(REFERENCE, float("nan")))
    assert tolerance.objection(twice_broken) is not None


def test_logits_that_a_model_masks_out_are_equal() -> None:
    masked = REFERENCE.clone()
    masked[:, 0] = -float("inf")
    assert compare(masked, masked.clone()).largest == 0


def test_the_models_own_noise_sets_the_scale_in_16_bits_within_bounds() -> None:
    quiet, noisy, broken = (compare(REFERENCE + by * torch.tensor([0.0, 0.0, 1.0]), REFERENCE) for by in (0, 0.3, 50))
    least, measured, most = (tolerance_for(torch.bfloat16, REFERENCE, [quiet, own]) for own in (quiet, noisy, broken))
    assert 0 < least.gap < measured.gap == pytest.approx(0.6)
    assert measured.typical == pytest.approx(1.2, rel=0.2)
    assert most == widest_tolerance(torch.bfloat16, REFERENCE)
    assert tolerance_for(torch.float16, REFERENCE, [quiet]).gap == pytest.approx(least.gap / 8)


def test_one_run_that_is_off_is_not_hidden_by_others() -> None:
    off = REFERENCE + torch.tensor([0.0, 0.5, 0.5])
    found = compare_runs([REFERENCE, REFERENCE, off], [REFERENCE] * 3)
    assert found.positions == 9
    assert "typically differ by 0.5" in (CLOSE.objection(found) or "")


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        compare(REFERENCE[:2], REFERENCE)
