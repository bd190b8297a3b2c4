"""Drafts of what may come next in a text, from the text itself: prompt lookup (Saxena 2023), by n-grams.

    ... the cat sat on the mat. Again: the cat
        ───────                        ─────── ends as the text did before
                ──────────── the draft

Pure. A draft costs nothing to make and may be wrong; what becomes of it is `speculation`'s. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LONGEST, SHORTEST = 4, 2  # tokens of the end of the text that are looked up
TAKEN_IN = 2048
"""Tokens whose places are noted at a time. Who drafts serves others too, whom a long prompt must not keep waiting."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next.

    Attributes:
        tokens: token ids; none where the text never ended like that before.
        matched: how many tokens the two places have in common, `SHORTEST` to `LONGEST`; 0 for no draft.
    """

    tokens: tuple[int, ...] = ()
    matched: int = 0


NO_DRAFT = Draft()


class NgramDrafter:
    """Drafts for one text, whose tokens it is given as they come.

    Each token takes a few entries of a dictionary, so that looking up takes the same time however long the text is.
    They are made when a draft is asked for, or by `catch_up`, of so many tokens at a time: the first drafts of a text
    that was long at once are of its beginning.

    Args:
        tokens: the text so far.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._noted = 0  # tokens whose places are in the dictionaries
        self._follows: list[dict[tuple[int, ...], int]] = [{} for _ in range(LONGEST + 1)]  # by length of the n-gram
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def behind(self) -> int:
        """Tokens whose places are still to be noted."""
        return len(self._tokens) - self._noted

    def extend(self, tokens: Iterable[int]) -> None:
        """Take in what comes behind the text."""
        self._tokens.extend(tokens)

    def catch_up(self) -> None:
        """Note the places of what came, of `TAKEN_IN` tokens at most."""
        begin, end = self._noted, min(len(self._tokens), self._noted + TAKEN_IN)
        for length in range(SHORTEST, LONGEST + 1):
            first = max(begin, length)
            # The n-gram before each place, column by column; of several places of one the last counts.
            columns = [self._tokens[first - length + at : max(0, end - length + at)] for at in range(length)]
            self._follows[length].update(zip(zip(*columns, strict=True), range(first, end), strict=True))
        self._noted = end

    def draft(self, most: int, stop_ids: frozenset[int] = frozenset()) -> Draft:
        """What followed where the text last ended as it does now, at most ``most`` tokens.

        A place so near the end that it runs into it is read on as if the draft were there already, so that a loop goes
        round. A draft ends before the first of ``stop_ids``: behind one there is no answer to draft for.
        """
        self.catch_up()
        for length in range(LONGEST, SHORTEST - 1, -1):
            end = tuple(self._tokens[-length:])
            if len(end) == length and (at := self._follows[length].get(end)) is not None:
                return self._read_on(at, most, stop_ids, length)
        return NO_DRAFT

    def _read_on(self, at: int, most: int, stop_ids: frozenset[int], matched: int) -> Draft:
        length = len(self._tokens)
        drafted: list[int] = []
        for place in range(at, at + most):
            token = self._tokens[place] if place < length else drafted[place - length]
            if token in stop_ids:
                break
            drafted.append(token)
        return Draft(tuple(drafted), matched) if drafted else NO_DRAFT
