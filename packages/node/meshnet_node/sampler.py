"""Sampling: a pure function of logits, parameters, the tokens before, and the position. Keeps no state."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from meshnet_core.errors import HopFailedError
from meshnet_core.sampling import SampledToken, SamplingParams, uniform_draw


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    history: Sequence[int],
    prompt_length: int,
    position: int,
    allowed: torch.Tensor | None = None,
) -> SampledToken:
    """Choose the token for ``position``.

    Args:
        logits: float32 ``[vocab]``, the model's raw logits after position ``position - 1``.
        params: how to choose.
        history: prompt and answer token ids before ``position``; read only where a penalty asks for it.
        prompt_length: how many of ``history`` are the prompt.
        position: index of the chosen token in the sequence.
        allowed: bool ``[vocab]`` on the logits' device: the tokens to choose from, at least one; None allows all.

    Returns:
        The token, with its logprob under the raw logits where ``params.logprobs`` asks for it.

    Raises:
        HopFailedError: the logits are not numbers, as when a 16-bit dtype overflowed.
    """
    scores = _penalised(logits, params, history, prompt_length) if params.reads_history else logits
    if params.logit_bias:
        scores = _biased(scores, params.logit_bias)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    token = int(scores.argmax())
    if not math.isfinite(highest := float(scores[token])):  # argmax finds a NaN if there is one
        raise HopFailedError(f"the model's logits are broken: the highest is {highest}")
    if not params.greedy:
        token = _draw(scores, params, uniform_draw(params.seed, position))
    if params.logprobs is None:
        return SampledToken(token)
    logprobs = logits.log_softmax(dim=-1)
    best = logprobs.topk(min(params.logprobs, logits.shape[-1]))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return SampledToken(token, float(logprobs[token]), top)


def _penalised(
    logits: torch.Tensor, params: SamplingParams, history: Sequence[int], prompt_length: int
) -> torch.Tensor:
    scores = logits.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(history)), device=logits.device)
        values = scores[seen]
        penalty = params.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    answer = Counter(history[prompt_length:])
    if answer and (params.presence_penalty or params.frequency_penalty):
        tokens = torch.tensor(list(answer), device=logits.device)
        counts = torch.tensor(list(answer.values()), dtype=scores.dtype, device=logits.device)
        scores[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    return scores


def _biased(scores: torch.Tensor, bias: Sequence[tuple[int, float]]) -> torch.Tensor:
    tokens = torch.tensor([token for token, _ in bias], device=scores.device)
    values = torch.tensor([value for _, value in bias], dtype=scores.dtype, device=scores.device)
    return scores.index_add(0, tokens, values)


def _draw(scores: torch.Tensor, params: SamplingParams, u: float) -> int:
    """Draw by inverse CDF in the order of token ids.

    Not in the order of probability: two tokens of nearly equal probability could change places between two runs whose
    logits differ in the last bit, and move the draw from one to the other. In the order of ids such a difference moves
    only the boundaries, and by as little.
    """
    if scores.device.type == "mps":
        scores = scores.cpu()  # Metal has no float64
    scores = scores.double()
    scores = (scores - scores.max()) / params.temperature  # at most 0: no temperature is so low that they overflow
    probabilities = _filtered(scores, params).softmax(dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    # Below the total by construction (u < 1), whatever rounding made of the total.
    target = torch.tensor(u, dtype=torch.float64, device=scores.device) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, target, right=True))
    last = int(probabilities.nonzero()[-1])
    return min(index, last)


def _filtered(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Scores with what top-k, top-p and min-p leave out at -inf; at least the most likely token stays."""
    if 0 < params.top_k < scores.shape[-1]:
        kth = scores.topk(params.top_k).values[-1]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    if params.top_p < 1.0:
        ordered, order = scores.sort(descending=True, stable=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        out = before >= params.top_p  # the token that reaches top_p stays
        scores = scores.scatter(0, order[out], float("-inf"))
    if params.min_p > 0.0:
        probabilities = scores.softmax(dim=-1)
        scores = scores.masked_fill(probabilities < params.min_p * probabilities.max(), float("-inf"))
    return scores
