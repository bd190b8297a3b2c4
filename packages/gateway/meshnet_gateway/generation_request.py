"""What one answer is to be, in token ids: the request that the engine is given."""

from __future__ import annotations

from dataclasses import dataclass

from meshnet_core.grammar import Grammar
from meshnet_core.sampling import SamplingParams
from meshnet_gateway.prefix_reuse import PrefixWish
from meshnet_gateway.recovery import Replay
from meshnet_gateway.speculation import Speculate


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to make.

    Attributes:
        model: name of a served model.
        prompt_ids: token ids of the prompt, at least one.
        max_tokens: the most tokens to answer with, at least one.
        sampling: how to choose them.
        stop_ids: tokens that end the answer; they are not part of it.
        cache: False takes the stateless path from the start.
        recovery: how lost state is made again; None takes the engine's way.
        prefix: what it may take from sessions before it and leave to others; None for neither.
        grammar: what the answer is held to; None leaves it free.
        speculate: how drafts are used; None takes the engine's way.
        fingerprint: of the model whose tokenizer made the ids; None takes whichever is served under the name.
        profile: tell where the time of its decode steps goes.
    """

    model: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    cache: bool = True
    recovery: Replay | None = None
    prefix: PrefixWish | None = None
    grammar: Grammar | None = None
    speculate: Speculate | None = None
    fingerprint: str | None = None
    profile: bool = False
