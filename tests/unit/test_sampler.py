"""Choosing a token: each filter against transformers' own, the draw against its distribution, and the edges."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from meshnet_core.errors import HopFailedError
from meshnet_core.sampling import SamplingParams, draw_key
from meshnet_node.sampler import adjusted, kept_scores, sample, uniforms

VOCAB = 31
PROMPT = [3, 4, 4, 9]
ANSWER = [4, 11, 11, 11, 30]
PINNED = {
    (0, 0): -8_367_558_909_530_660_967,
    (0, 1): -1_174_201_630_091_427_342,
    (7, 12345): -3_533_186_940_015_905_268,
    (2**63 - 1, 511): 1_760_539_663_109_229_934,
}


def logits_of(seed: int, width: float = 3.0) -> torch.Tensor:
    return width * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def choose(logits: torch.Tensor, position: int = 0, **params: Any) -> int:
    return sample(logits, SamplingParams(**params), [], 0, position).id


def expected_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers makes of the same parameters, and arithmetic by hand where it has no such processor."""
    scores: Any = logits.double()[None]
    history = torch.LongTensor([PROMPT + ANSWER])
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(history, scores)
    for token, count in Counter(ANSWER).items():
        scores[0, token] -= params.presence_penalty + params.frequency_penalty * count
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    probabilities: torch.Tensor = warpers(history, scores)[0].softmax(dim=-1)
    return probabilities


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.3),
        SamplingParams(temperature=2.5),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.0, top_k=VOCAB + 10),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.0, top_p=1e-9),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=1.0, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, repetition_penalty=0.7),
        SamplingParams(temperature=1.0, presence_penalty=1.5),
        SamplingParams(temperature=1.0, frequency_penalty=0.8),
        SamplingParams(temperature=1.0, presence_penalty=-2.0, frequency_penalty=-0.5),
        SamplingParams(temperature=0.8, top_k=12, top_p=0.8, min_p=0.05, repetition_penalty=1.2, presence_penalty=0.4),
    ],
    ids=lambda params: ",".join(f"{name}={value}" for name, value in params.to_wire().items()),
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_token_is_drawn_by_the_probability_that_transformers_gives_it(params: SamplingParams, seed: int) -> None:
    logits = logits_of(seed)
    expected = expected_probabilities(logits, params)
    scores = adjusted(logits, params, PROMPT + ANSWER, len(PROMPT))
    probabilities = kept_scores(scores, params).softmax(dim=-1)
    assert torch.equal(probabilities > 0, expected > 0)
    assert torch.allclose(probabilities, expected, rtol=0, atol=1e-5)  # the node's penalties are float32
    drawn = {sample(logits, params, PROMPT + ANSWER, len(PROMPT), at).id for at in range(9, 209)}
    assert all(expected[token] > 0 for token in drawn)


@pytest.mark.parametrize("seed", [0, 5, 2**63 - 1])
def test_draws_follow_the_distribution(seed: int) -> None:
    """Pearson's statistic over 8,000 positions, far below where chance would have it (11 degrees of freedom)."""
    logits = torch.linspace(-2.0, 1.5, 12)
    params = SamplingParams(temperature=0.9, seed=seed)
    count = 8_000
    drawn = Counter(sample(logits, params, [], 0, position).id for position in range(count))
    expected = (count * (logits.double() / 0.9).softmax(0)).tolist()
    statistic = sum((drawn[token] - mean) ** 2 / mean for token, mean in enumerate(expected))
    assert statistic < 31.3  # p = 0.001


def test_the_noise_of_neighbouring_positions_and_ids_has_nothing_in_common() -> None:
    rows = torch.stack([uniforms(torch.arange(400), draw_key(1, position)) for position in range(400)])
    for noise in (rows, rows.t()):
        alike = torch.corrcoef(noise).fill_diagonal_(0).abs()
        assert alike.max() < 0.3  # of 80,000 pairs of 400 numbers: chance has 0.05 for one, 0.23 for the greatest
        assert (noise.mean(dim=1) - 0.5).abs().max() < 0.08
    assert rows.unique().numel() == rows.numel()


def test_the_draw_is_the_same_everywhere_and_for_good() -> None:
    """Pinned: another implementation of it would change the rest of a running answer."""
    assert [draw_key(*at) for at in PINNED] == list(PINNED.values())


@given(st.integers(-(2**63), 2**63 - 1), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8))
def test_noise_is_splitmix64s(key: int, ids: list[int]) -> None:
    def expected(token: int) -> float:
        """By Steele, Lea and Flood (2014), in whole numbers."""
        state = (key + (token + 1) * 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return float(((state ^ (state >> 31)) >> 11) + 0.5) * 2.0**-53

    drawn = uniforms(torch.tensor(ids), key).tolist()
    assert drawn == [expected(token) for token in ids]
    assert all(0 < u < 1 for u in drawn)


def test_a_token_is_a_function_of_its_seed_and_position() -> None:
    logits = torch.zeros(1000)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in (1, 2)]
    runs = [[sample(logits, some, [], 0, position).id for position in range(50)] for some in (*params, params[0])]
    assert runs[0] == runs[2]
    assert sum(a == b for a, b in zip(runs[0], runs[1], strict=True)) < 5
    assert len(set(runs[0])) > 40
    alone = sample(logits, params[0], [], 0, 49).id
    assert alone == runs[0][49]  # no matter what was drawn before


@pytest.mark.parametrize("width", [0.0, 3.0])
def test_logits_that_differ_in_the_last_bits_draw_the_same_tokens(width: float) -> None:
    """Of a large vocabulary most tokens are so unlikely that their share is narrower than the difference."""
    draw = torch.Generator().manual_seed(0)
    logits = width * torch.randn(50_000, generator=draw)
    other = logits + 1e-5 * torch.randn(50_000, generator=draw)
    params = SamplingParams(temperature=1.0, seed=9)
    pairs = [(sample(logits, params, [], 0, at).id, sample(other, params, [], 0, at).id) for at in range(200)]
    assert all(a == b for a, b in pairs)


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40), st.integers(0, 100))
def test_greedy_is_the_most_likely_token_and_ignores_the_seed(values: list[float], seed: int) -> None:
    logits = torch.tensor(values)
    token = choose(logits, seed=seed, top_k=1, top_p=0.1)
    assert token == int(logits.argmax())


def test_greedy_heeds_the_penalties() -> None:
    logits = torch.tensor([5.0, 4.5, -3.0])
    params = SamplingParams(repetition_penalty=1.5)
    assert sample(logits, params, [0], 1, 1).id == 1
    assert sample(logits, SamplingParams(presence_penalty=1.0), [0], 1, 1).id == 0  # of the prompt, not of the answer
    assert sample(logits, SamplingParams(presence_penalty=1.0), [2, 0], 1, 2).id == 1
    assert sample(logits, SamplingParams(frequency_penalty=0.3), [2, 0], 1, 2).id == 0
    assert sample(logits, SamplingParams(frequency_penalty=0.3), [2, 0, 0], 1, 3).id == 1


def test_penalties_leave_the_given_logits_alone() -> None:
    logits = logits_of(0)
    before = logits.clone()
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0, presence_penalty=1.0, logprobs=2)
    sample(logits, params, PROMPT + ANSWER, len(PROMPT), len(PROMPT + ANSWER))
    assert torch.equal(logits, before)


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(0, 20), st.sampled_from([0.0, 0.7]))
def test_logprobs_are_those_of_the_raw_logits(seed: int, wanted: int, temperature: float) -> None:
    logits = logits_of(seed)
    params = SamplingParams(temperature=temperature, logprobs=wanted, top_k=3, repetition_penalty=1.4)
    chosen = sample(logits, params, PROMPT + ANSWER, len(PROMPT), 9)
    exact = logits.double().log_softmax(0)
    assert chosen.logprob == pytest.approx(float(exact[chosen.id]), abs=1e-5)
    best = exact.sort(descending=True)
    assert [token for token, _ in chosen.top] == best.indices[:wanted].tolist()
    assert [logprob for _, logprob in chosen.top] == pytest.approx(best.values[:wanted].tolist(), abs=1e-5)


def test_logprobs_are_given_only_when_asked_for_and_never_more_than_there_are() -> None:
    assert sample(logits_of(0), SamplingParams(), [], 0, 0).logprob is None
    assert sample(logits_of(0), SamplingParams(logprobs=0), [], 0, 0).top == ()
    assert len(sample(torch.zeros(5), SamplingParams(logprobs=20), [], 0, 0).top) == 5


# -- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-310, 5e-324])
def test_however_low_the_temperature_the_most_likely_token_comes(temperature: float) -> None:
    logits = logits_of(1)
    assert {choose(logits, at, temperature=temperature) for at in range(20)} == {int(logits.argmax())}


def test_however_high_the_temperature_every_token_has_its_turn() -> None:
    assert {choose(logits_of(1), at, temperature=100.0) for at in range(600)} == set(range(VOCAB))


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-12}, {"min_p": 1.0}])
def test_the_tightest_filter_leaves_the_most_likely_token(params: dict[str, Any]) -> None:
    logits = logits_of(2)
    assert {choose(logits, at, temperature=3.0, **params) for at in range(20)} == {int(logits.argmax())}


def test_equal_logits_are_drawn_equally_and_a_tie_is_no_error() -> None:
    flat = torch.full((8,), 2.5)
    assert {choose(flat, at, temperature=1.0) for at in range(200)} == set(range(8))
    # Ties at the threshold stay, in transformers too; a nucleus takes no more of them than it needs.
    assert {choose(flat, at, temperature=1.0, top_k=1) for at in range(200)} == set(range(8))
    assert {choose(flat, at, temperature=1.0, min_p=1.0) for at in range(200)} == set(range(8))
    assert len({choose(flat, at, temperature=1.0, top_p=0.5) for at in range(200)}) == 4


def test_a_vocabulary_of_one_token_has_one_answer() -> None:
    one = torch.tensor([-3.0])
    assert choose(one) == 0
    assert choose(one, temperature=1.0) == 0
    assert choose(one, temperature=1.0, top_k=5, top_p=0.1, min_p=0.5) == 0
    assert sample(one, SamplingParams(logprobs=3), [], 0, 0).top == ((0, 0.0),)


def test_what_is_left_out_is_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 1.0, 1.0, -math.inf])
    assert {choose(logits, at, temperature=1.0) for at in range(100)} == {1, 2}


@pytest.mark.parametrize("broken", [[math.nan, 1.0], [1.0, math.nan], [math.inf, 1.0], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error_and_no_token(broken: list[float], temperature: float) -> None:
    with pytest.raises(HopFailedError, match="broken"):
        choose(torch.tensor(broken), temperature=temperature)


def test_a_bias_moves_the_choice_and_not_the_logprob() -> None:
    logits = logits_of(3)
    plain = sample(logits, SamplingParams(logprobs=1), [], 0, 0)
    other = (plain.id + 1) % VOCAB
    lifted = sample(logits, SamplingParams(logprobs=1, logit_bias=((other, 100.0),)), [], 0, 0)
    assert lifted.id == other
    assert lifted.logprob == pytest.approx(float(logits.log_softmax(-1)[other]))
    assert lifted.top == plain.top
    assert choose(logits, logit_bias=((plain.id, -100.0),)) != plain.id
    assert all(choose(logits, at, temperature=1.0, logit_bias=((5, 100.0),)) == 5 for at in range(20))


def test_only_what_is_allowed_is_chosen() -> None:
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    allowed[[4, 9]] = True
    drawn = Counter(
        sample(logits_of(4), SamplingParams(temperature=2.0, logprobs=0), [], 0, at, allowed).id for at in range(200)
    )
    assert set(drawn) == {4, 9}
    best = max((4, 9), key=lambda token: float(logits_of(4)[token]))
    assert sample(logits_of(4), SamplingParams(), [], 0, 0, allowed).id == best
