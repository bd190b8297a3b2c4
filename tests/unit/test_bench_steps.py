"""Where a decode step goes, judged from what hops told; and how answers are compared, in the benchmarks."""

from __future__ import annotations

import pytest
import torch
from benchmarks.mesh_system import where_a_step_goes
from benchmarks.parity import judge

from meshnet_core.frames import FrameReply, HopTiming
from meshnet_core.sampling import SampledToken


def test_the_parts_of_a_step_add_up_to_the_whole() -> None:
    first = HopTiming(0, queue_ms=1.0, forward_ms=20.0, total_ms=35.0)
    last = HopTiming(1, queue_ms=0.5, forward_ms=10.0, sample_ms=0.25, total_ms=12.0)
    steps = [(36.0, FrameReply(5, (SampledToken(1),), (first, last)))] * 2

    parts = where_a_step_goes(steps, [1.0, 1.04, 1.08])

    assert parts.pop("whole") == pytest.approx(40.0)
    assert parts == pytest.approx(
        {
            "hop 0 forward": 20.0,
            "hop 0 queue": 1.0,
            "hop 1 forward": 10.0,
            "hop 1 queue": 0.5,
            "sample": 0.25,
            "hops, rest": 3.25,
            "wire": 1.0,
            "loop": 4.0,
        }
    )
    assert sum(parts.values()) == pytest.approx(40.0)


def answer(*ids: int, logits: torch.Tensor) -> list[SampledToken]:
    """Tokens with the logprobs that these logits give them."""
    logprobs = logits.log_softmax(dim=-1)
    return [
        SampledToken(token, float(logprobs[index, token]), ((token, float(logprobs[index, token])),))
        for index, token in enumerate(ids)
    ]


def test_an_answer_of_the_reference_itself_holds() -> None:
    logits = torch.tensor([[0.0, 3.0], [3.0, 0.0]])

    found = judge(answer(1, 0, logits=logits), [1, 0], logits)

    assert found.holds
    assert (found.excused, found.wrong, found.stateless_differs_at) == (0, 0, None)


def test_a_token_that_is_not_the_likeliest_is_wrong_unless_rounding_decides() -> None:
    clear, close = torch.tensor([[0.0, 3.0]]), torch.tensor([[3.0 - 5e-4, 3.0]])

    assert judge(answer(0, logits=clear), [0], clear).wrong == 1
    assert judge(answer(0, logits=close), [1], close).excused == 1
    assert judge(answer(0, logits=close), [1], close).holds
    assert not judge(answer(0, logits=clear), [0], clear).holds


def test_logprobs_that_differ_or_a_stateless_path_that_does_fail() -> None:
    logits = torch.tensor([[0.0, 3.0]])

    assert not judge(answer(1, logits=logits * 1.1), [1], logits).holds
    assert judge(answer(1, logits=logits), [0], logits).stateless_differs_at == 0
    assert not judge(answer(1, logits=logits), [0], logits).holds
