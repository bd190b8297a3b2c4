"""How the next token is chosen: parameters and the draw, as pure values. The arithmetic on logits is the node's."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields
from typing import Any

from meshnet_core.errors import InvalidInputError

MAX_TOP_LOGPROBS = 20  # as the OpenAI API bounds it
MAX_LOGIT_BIAS = 100.0  # as the OpenAI API bounds it
MAX_BIASED_TOKENS = 1024  # they travel with every open
SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one generation's sampling, validated once, here.

    Attributes:
        temperature: 0 is greedy; else logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this (Holtzman et al. 2020).
        min_p: drop tokens below this share of the most likely one's probability (Nguyen et al. 2024).
        repetition_penalty: divides positive and multiplies negative logits of every token seen in prompt or answer
            (Keskar et al. 2019); 1 is off.
        presence_penalty: subtracted once from the logit of each token that the answer holds already.
        frequency_penalty: subtracted per occurrence in the answer.
        seed: the draw at a position is a function of this and the position alone, never of the process.
        logprobs: how many most likely tokens to report beside the chosen one's logprob; None reports nothing.
        logit_bias: (token id, what is added to its logit) pairs, each id once; at most `MAX_BIASED_TOKENS`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.0, 100.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high:
                raise InvalidInputError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")
        if self.top_p == 0 or self.repetition_penalty == 0:
            raise InvalidInputError("top_p and repetition_penalty must be above 0")
        if not _is_int(self.top_k) or self.top_k < 0:
            raise InvalidInputError(f"top_k must be 0 (off) or a positive whole number, not {self.top_k!r}")
        if not _is_int(self.seed) or not 0 <= self.seed < 2**SEED_BITS:
            raise InvalidInputError(f"seed must be a whole number from 0 to 2^{SEED_BITS} - 1, not {self.seed!r}")
        if self.logprobs is not None and (not _is_int(self.logprobs) or not 0 <= self.logprobs <= MAX_TOP_LOGPROBS):
            raise InvalidInputError(f"logprobs must be from 0 to {MAX_TOP_LOGPROBS}, not {self.logprobs!r}")
        self._check_bias()

    def _check_bias(self) -> None:
        bias = self.logit_bias
        if len(bias) > MAX_BIASED_TOKENS or len({token for token, _ in bias}) < len(bias):
            raise InvalidInputError(f"logit_bias takes at most {MAX_BIASED_TOKENS} tokens, each once")
        for token, value in bias:
            if not _is_int(token) or token < 0 or not _is_number(value) or abs(value) > MAX_LOGIT_BIAS:
                raise InvalidInputError(
                    f"logit_bias gives token ids numbers from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}, "
                    f"not {token!r}: {value!r}"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def reads_history(self) -> bool:
        """Whether choosing a token needs the tokens before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def to_wire(self) -> dict[str, Any]:
        """JSON-ready form; only what differs from the default."""
        document = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if self.logit_bias:
            document["logit_bias"] = [list(pair) for pair in self.logit_bias]
        return document

    @classmethod
    def from_wire(cls, document: object) -> SamplingParams:
        """Read :meth:`to_wire`'s form; an unknown field is an error, never ignored."""
        if not isinstance(document, dict):
            raise InvalidInputError(f"sampling must be an object, not {document!r}")
        unknown = set(document) - {f.name for f in fields(cls)}
        if unknown:
            raise InvalidInputError(f"unknown sampling fields: {', '.join(sorted(map(str, unknown)))}")
        return cls(**{**document, "logit_bias": _pairs(document.get("logit_bias", []))})


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One chosen token.

    Attributes:
        id: token id.
        logprob: natural log of its probability under the model's raw logits; None unless asked for.
        top: the most likely (id, logprob) pairs, best first; empty unless asked for.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()

    def to_wire(self) -> dict[str, Any]:
        document: dict[str, Any] = {"id": self.id}
        if self.logprob is not None:
            document["logprob"] = self.logprob
            document["top"] = [list(pair) for pair in self.top]
        return document

    @classmethod
    def from_wire(cls, document: dict[str, Any]) -> SampledToken:
        top = tuple((int(token), float(logprob)) for token, logprob in document.get("top", ()))
        return cls(int(document["id"]), document.get("logprob"), top)


def draw_key(seed: int, position: int) -> int:
    """What all chance in the choice of the token at ``position`` comes from: 64 bits, as a signed integer.

    BLAKE2b over (seed, position): the same on every machine, process and library version, so that a generation that
    moves to other nodes goes on with the very draws it would have had.
    """
    key = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = hashlib.blake2b(key, digest_size=8, person=b"meshnet-draw").digest()
    return int.from_bytes(digest, "little", signed=True)


def _pairs(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in value):
        raise InvalidInputError("logit_bias must be a list of [token id, number] pairs")
    if any(isinstance(part, list | dict) for pair in value for part in pair):
        raise InvalidInputError("logit_bias must be a list of [token id, number] pairs")
    return tuple((token, bias) for token, bias in value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
