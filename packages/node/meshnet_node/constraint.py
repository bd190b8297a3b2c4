"""Holds an answer to its grammar: which tokens may come next. Knows no sessions, no frames and no sampling.

Where an answer stands in its grammar follows from its tokens alone (`Constraint.allowed` is told all of them), so it is
made again at open after a node's death. Only llguidance's parser underneath moves with the answer, by rolling back or
taking in what differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from meshnet_core.errors import GrammarError
from meshnet_core.grammar import Grammar, panics_as

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILE_TIMEOUT_S = 10.0
MAX_LEXER_STATES = 50_000  # some 20 MB; a bounded string takes one for each of its characters
_AT_ONCE = 64  # tokens
KEPT_VOCABULARIES = 4  # about 40 MB each for 150,000 tokens


class Constraint:
    """One answer's place in its grammar. Not thread-safe: one lane runs the frames of a session.

    Args:
        matcher: at the grammar's beginning.
        vocab_size: tokens of the model.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._taken: list[int] = []

    def allowed(self, answer: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        """Which tokens may follow ``answer``: bool ``[vocab]`` on ``device``.

        Raises:
            GrammarError: the answer left the grammar, or the grammar is too complex to go on.
        """
        self.follow(answer)
        with panics_as(GrammarError):
            mask = self._matcher.compute_bitmask()
        packed = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
        if self._matcher.is_error():
            raise GrammarError(f"the answer cannot be held to its grammar any longer: {self._why()}")
        bits = (packed.to(device)[:, None] >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
        return bits.flatten()[: self._vocab_size].bool()

    def follow(self, answer: Sequence[int]) -> None:
        """Move to the end of ``answer``, back or forth from wherever the last one ended.

        Raises:
            GrammarError: see `allowed`.
        """
        same = next((at for at, (a, b) in enumerate(zip(self._taken, answer, strict=False)) if a != b), None)
        if same is None:
            same = min(len(self._taken), len(answer))
        with panics_as(GrammarError):
            if same < len(self._taken):
                self._matcher.rollback(len(self._taken) - same)
            self._taken = list(answer)
            for at in range(same, len(answer), _AT_ONCE):
                if at > same:
                    self._matcher.compute_bitmask()  # a step's fuel is for one step, and a long answer takes many
                self._matcher.consume_tokens(list(answer[at : at + _AT_ONCE]))
        if self._matcher.is_error():
            raise GrammarError(f"the answer left its grammar: {self._why()}")

    def _why(self) -> str:
        return self._matcher.get_error().partition("\n")[0][:200]


class GrammarCompiler:
    """Compiles grammars against the vocabularies of models, and keeps the last few vocabularies.

    Args:
        timeout_s: for one grammar; llguidance bounds its own work, so that none should come near it.
    """

    def __init__(self, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._vocabularies: dict[tuple[str, int, tuple[int, ...]], LLTokenizer] = {}

    async def compile(
        self, grammar: Grammar, fingerprint: str, tokenizer: bytes | None, vocab_size: int, answer: Sequence[int]
    ) -> Constraint:
        """A constraint that stands at the end of ``answer``; compiled in a thread.

        Args:
            grammar: to compile.
            fingerprint: of the model.
            tokenizer: its tokenizer.json; None where it has none.
            vocab_size: of the model.
            answer: token ids so far.

        Raises:
            GrammarError: the model's vocabulary or the grammar cannot be read, or not in time.
        """
        if tokenizer is None:
            raise GrammarError("the model has no tokenizer.json, which constrained answers need")
        work = asyncio.to_thread(self._compile, grammar, fingerprint, tokenizer, vocab_size, tuple(answer))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError as error:
            raise GrammarError(f"the grammar was not compiled in {self._timeout_s:g} s; a simpler one is") from error

    def _compile(
        self, grammar: Grammar, fingerprint: str, tokenizer: bytes, vocab_size: int, answer: Sequence[int]
    ) -> Constraint:
        # Here: most nodes never constrain an answer, and need not hold its 3 MB.
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415

        vocabulary = self._vocabulary(fingerprint, tokenizer, vocab_size, grammar.stop_ids)
        text = LLMatcher.grammar_from_lark(grammar.lark)
        limits = LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
        with panics_as(GrammarError):
            matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {matcher.get_error()[:200]}")
        constraint = Constraint(matcher, vocab_size)
        constraint.follow(answer)
        return constraint

    def _vocabulary(self, fingerprint: str, tokenizer: bytes, size: int, stop_ids: tuple[int, ...]) -> LLTokenizer:
        from llguidance import LLTokenizer  # noqa: PLC0415  see `_compile`

        key = (fingerprint, size, stop_ids)
        found = self._vocabularies.pop(key, None)
        if found is None:
            try:
                with panics_as(GrammarError):
                    found = LLTokenizer(tokenizer.decode(), n_vocab=size, eos_token=list(stop_ids))
            except Exception as error:  # whatever llguidance makes of a vocabulary that it does not know
                raise GrammarError(f"the model's vocabulary cannot be read for constrained answers: {error}") from error
        self._vocabularies[key] = found
        for old in list(self._vocabularies)[:-KEPT_VOCABULARIES]:
            self._vocabularies.pop(old, None)
        return found
