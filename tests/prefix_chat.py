"""A chat in token ids on a mesh in this process: every turn's prompt is all that was said before, and something new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from in_process_mesh import MODEL, TinyMesh, random_prompt
from meshnet_core.grammar import Grammar
from meshnet_core.prefix import EVERYONE
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_gateway.generation import Generation, GenerationEngine, GenerationRequest
from meshnet_gateway.prefix_reuse import PrefixWish
from meshnet_gateway.recovery import Replay
from meshnet_node.cache_store import StoreLimits

END = 2  # what ends a turn, as a template would write it
HOLDING = StoreLimits(budget_bytes=2**30, max_prefixes=64)
SYSTEM = random_prompt(21, seed=99)


@dataclass(frozen=True)
class Turn:
    """One answer: its tokens with their logprobs, and the generation's report."""

    prompt: tuple[int, ...]
    tokens: list[SampledToken]
    report: dict[str, Any]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def cached(self) -> int:
        cached: int = self.report["cached_tokens"]
        return cached


@dataclass
class Chat:
    """Turns on ``mesh``; ``said`` grows by question and answer.

    Attributes:
        reuse: False asks for no prefixes.
        scope: whose prefixes.
        count: tokens of an answer.
        chunk: positions in one prefill frame.
        during: called after each token with how many there are.
        grammar: what answers are held to.
        engine: a gateway's; a new one for each turn, which remembers nothing, if not given.
    """

    mesh: TinyMesh
    seed: int = 0
    reuse: bool = True
    scope: str = EVERYONE
    count: int = 9
    chunk: int = 256
    recovery: Replay | None = None
    said: list[int] = field(default_factory=lambda: list(SYSTEM))
    turns: list[Turn] = field(default_factory=list)
    during: Callable[[Generation, int], None] = lambda generation, made: None
    engine: GenerationEngine | None = None
    grammar: Grammar | None = None

    async def turn(self, question: Sequence[int] | None = None) -> Turn:
        question = random_prompt(7, seed=1000 * self.seed + len(self.turns)) if question is None else question
        self.said += question
        turn = await self.answer(self.said)
        self.turns.append(turn)
        self.said += [*turn.ids, END]
        return turn

    async def answer(self, prompt: Sequence[int]) -> Turn:
        before = (len(self.turns[-1].prompt) - 1,) if self.turns else ()
        wish = PrefixWish(self.scope, (len(SYSTEM), len(prompt) - 1), before) if self.reuse else None
        sampling = SamplingParams(logprobs=5)
        request = GenerationRequest(
            MODEL,
            tuple(prompt),
            self.count,
            sampling,
            frozenset({END}),
            recovery=self.recovery,
            prefix=wish,
            grammar=self.grammar,
        )
        engine = self.engine or self.mesh.engine(chunk=self.chunk)
        generation = engine.start(request)
        tokens: list[SampledToken] = []
        try:
            async with aclosing(aiter(generation)) as events:
                async for event in events:
                    if isinstance(event, SampledToken):
                        tokens.append(event)
                        self.during(generation, len(tokens))
        finally:
            await generation.aclose()
        return Turn(tuple(prompt), tokens, generation.report())


def far_apart(one: Sequence[SampledToken], other: Sequence[SampledToken], most: float = 1e-3) -> str | None:
    """How two answers differ, None where they do not: tokens, or logprobs by more than ``most``."""
    if [token.id for token in one] != [token.id for token in other]:
        return f"tokens {[token.id for token in one]} and {[token.id for token in other]}"
    for at, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        gap = abs((mine.logprob or 0.0) - (theirs.logprob or 0.0))
        if gap > most:
            return f"logprobs of token {at} by {gap:.2g}"
    return None
