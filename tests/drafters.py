"""Drafters that know the answer, and are wrong where a test wants them to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from meshnet_core.frames import MAX_DRAFT
from meshnet_gateway.ngram_drafter import LONGEST, NO_DRAFT, Draft
from tiny_models import VOCAB

Wrongness = Callable[[int], bool]  # of the token at a place of the text


class KnowingDrafter:
    """Drafts what is known to come, but for another token wherever ``wrong`` says so.

    Args:
        texts: prompts with their answers; where none begins as the text does there is no draft.
        wrong: at which places to be wrong.
        count: tokens of each draft, by the length of the text.
    """

    def __init__(self, texts: Sequence[Sequence[int]], wrong: Wrongness, count: Callable[[int], int]) -> None:
        self._texts = [list(text) for text in texts]
        self._wrong = wrong
        self._count = count
        self._came: list[int] = []

    def __len__(self) -> int:
        return len(self._came)

    def extend(self, tokens: Iterable[int]) -> None:
        """Take in what came."""
        self._came.extend(tokens)
        self._texts = [text for text in self._texts if text[: len(self._came)] == self._came]

    def catch_up(self) -> None:
        """It knows everything."""

    def draft(self, most: int, stop_ids: frozenset[int]) -> Draft:
        """What is known, with what is wrong in it."""
        if not self._texts:
            return NO_DRAFT
        length = len(self._came)
        known = self._texts[0][length : length + min(most, self._count(length))]
        drafted = [(token + 1) % VOCAB if self._wrong(at) else token for at, token in enumerate(known, start=length)]
        kept = next((at for at, token in enumerate(drafted) if token in stop_ids), len(drafted))
        return Draft(tuple(drafted[:kept]), LONGEST) if kept else NO_DRAFT


def counted(length: int) -> int:
    """How many tokens a draft has: every number there may be."""
    return 1 + length * 5 % MAX_DRAFT


def never(_at: int) -> bool:
    return False


def always(_at: int) -> bool:
    return True


def now_and_then(at: int) -> bool:
    """At places with gaps of one to seven between them."""
    return at % 7 in {0, 2, 3} or at % 11 == 5
