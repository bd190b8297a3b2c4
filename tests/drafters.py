"""Drafters that know the answer, and are wrong where a test wants them to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from meshnet_gateway.ngram_drafter import LONGEST, NO_DRAFT, Draft
from tiny_models import VOCAB

Wrongness = Callable[[int], bool]  # of the token at a place of the text


class KnowingDrafter:
    """Drafts what is known to come, but for another token wherever ``wrong`` says so.

    Args:
        text: prompt and answer.
        wrong: at which places of it to be wrong.
        count: tokens of each draft, by the length of the text.
    """

    def __init__(self, text: Sequence[int], wrong: Wrongness, count: Callable[[int], int]) -> None:
        self._text = list(text)
        self._wrong = wrong
        self._count = count
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Iterable[int]) -> None:
        """Take in what came; it must be what was known to come."""
        came = list(tokens)
        known = self._text[self._length : self._length + len(came)]
        assert came[: len(known)] == known
        self._length += len(came)

    def draft(self, most: int, stop_ids: frozenset[int]) -> Draft:
        end = self._length + min(most, self._count(self._length))
        known = self._text[self._length : end]
        drafted = [
            (token + 1) % VOCAB if self._wrong(at) else token for at, token in enumerate(known, start=self._length)
        ]
        kept = next((at for at, token in enumerate(drafted) if token in stop_ids), len(drafted))
        return Draft(tuple(drafted[:kept]), LONGEST) if kept else NO_DRAFT


def never(_at: int) -> bool:
    return False


def always(_at: int) -> bool:
    return True


def now_and_then(at: int) -> bool:
    """At places with gaps of one to seven between them."""
    return at % 7 in {0, 2, 3} or at % 11 == 5
