"""Where an answer ends because a stop string has come: pure, character by character, whatever the pieces.

Knows no tokens and no model. The meaning, which does not depend on how the text is cut into pieces: the answer ends at
the first character that completes any stop string, and is cut where that string begins; of several completed by the
same character the longest counts. (So of the stops "ab" and "abc" the first always wins.)

    stops: "END", "\\n\\n"     fed:      "one\\n"   "EN"   "T"          "\\n"   "\\nmore"
                             emitted:  "one"     ""     "\\nENT"      ""     (cut: nothing more)
                             held:     "\\n"      "EN"   ""           "\\n"

What is held back is the longest end of the text that is a beginning of some stop string; how long that is, is one
number per stop string, moved on in constant time per character (Knuth, Morris, Pratt 1977).
"""

from __future__ import annotations

from collections.abc import Sequence

from meshnet_core.errors import InvalidInputError


class StopScanner:
    """Passes text through until a stop string is complete.

    Args:
        stops: stop strings, none of them empty; may be no string at all.

    Attributes:
        found: the stop string that ended the text; None while there is none.

    Raises:
        InvalidInputError: on an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise InvalidInputError("an empty stop string would end every answer before it begins")
        self.found: str | None = None
        self._matchers = [_Matcher(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that can no longer become part of a stop string; empty once one was found."""
        if self.found is not None or not self._matchers:
            return "" if self.found is not None else text
        seen = self._held + text
        for index, character in enumerate(text, start=len(self._held) + 1):
            for matcher in self._matchers:  # longest first
                if matcher.advance(character):
                    self.found = matcher.stop
                    self._held = ""
                    return seen[: index - len(matcher.stop)]
        free = len(seen) - max(matcher.matched for matcher in self._matchers)
        self._held = seen[free:]
        return seen[:free]

    def flush(self) -> str:
        """What was held back, now that no more text comes; further calls return nothing."""
        held, self._held = self._held, ""
        self._matchers = []
        return held


class _Matcher:
    """One stop string and how much of it the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _borders(stop)

    def advance(self, character: str) -> bool:
        """Take in the next character; True when it completes the stop string. Not to be called after that."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        if self.stop[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.stop)


def _borders(text: str) -> list[int]:
    """For each prefix of ``text``, the length of its longest proper prefix that is also its end."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        if text[index] == text[length]:
            length += 1
        borders[index] = length
    return borders
