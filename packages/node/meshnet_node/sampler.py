"""Sampling: a pure function of logits, parameters, the tokens before, and the position. Keeps no state."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from meshnet_core.errors import HopFailedError
from meshnet_core.sampling import SampledToken, SamplingParams, draw_key

# SplitMix64's, as signed numbers of 64 bits, whose products wrap around in torch as theirs do
_GOLDEN, _FIRST, _SECOND = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


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
    scores = adjusted(logits, params, history, prompt_length)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    token = int(scores.argmax())
    if not math.isfinite(highest := float(scores[token])):  # argmax finds a NaN if there is one
        raise HopFailedError(f"the model's logits are broken: the highest is {highest}")
    if not params.greedy:
        token = _draw(kept_scores(scores, params), draw_key(params.seed, position))
    if params.logprobs is None:
        return SampledToken(token)
    logprobs = logits.log_softmax(dim=-1)
    best = logprobs.topk(min(params.logprobs, logits.shape[-1]))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return SampledToken(token, float(logprobs[token]), top)


def adjusted(logits: torch.Tensor, params: SamplingParams, history: Sequence[int], prompt_length: int) -> torch.Tensor:
    """The logits after penalties and biases, float32 ``[vocab]``; the given ones stay as they are."""
    scores = _penalised(logits, params, history, prompt_length) if params.reads_history else logits
    return _biased(scores, params.logit_bias) if params.logit_bias else scores


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


def kept_scores(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logarithms of weights to draw by, float64 ``[vocab]``: over the temperature, -inf for what filters leave out."""
    if scores.device.type == "mps":
        scores = scores.cpu()  # Metal has no float64
    scores = scores.double()
    # At most 0 before the division: no temperature is so low that they overflow.
    return _filtered((scores - scores.max()) / params.temperature, params)


def _draw(scores: torch.Tensor, key: int) -> int:
    """Draw by adding Gumbel noise to each score and taking the highest (Gumbel 1954; Maddison et al. 2014).

    The noise of a token is a function of ``key`` and its id alone. So two runs whose logits differ in the last bits
    draw the same token unless the best two sums lie as near to each other. By inverse CDF the boundaries of all tokens
    would move, and of the many unlikely ones each is narrower than it moves.
    """
    kept = scores.isfinite().nonzero().squeeze(1)
    noise = -(-uniforms(kept, key).log()).log()
    return int(kept[(scores[kept] + noise).argmax()])


def uniforms(ids: torch.Tensor, key: int) -> torch.Tensor:
    """For each id (int64 ``[n]``) a number in (0, 1), float64: of a SplitMix64 stream that begins at ``key``.

    53 bits of its output at ``id + 1`` (Steele et al. 2014), the half of the last one added so that 0 does not occur.
    """
    bits = (ids + 1) * _GOLDEN + key
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return (_shifted(bits ^ _shifted(bits, 31), 11).double() + 0.5) * 2.0**-53


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, as unsigned numbers."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


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
