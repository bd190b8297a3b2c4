"""From token ids to text, one id at a time and whole characters only. Knows a decode function, no model.

The pieces are final when they are given out, and together they are the text of the ids decoded at once. Decoding each
id alone would not do: a character may span ids, and a word's leading space may depend on the id before it. So a short
window of ids is decoded anew with every id, which always begins at a character's edge with ids whose text is out
already; tokenizers' `DecodeStream` works alike, but raises an error where a model's broken bytes change how earlier
ones read, and cannot be asked for what it still holds.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextDecoder:
    """Text of a growing sequence of ids.

    Args:
        decode: text of a list of ids, in which broken or incomplete UTF-8 shows as U+FFFD.
        bytes_of: what one id stands for; asked at the end alone, where it tells an incomplete character, which is left
            out, from a broken one and from a U+FFFD that was meant.

    One difference to ``decode`` of all ids remains, and only where a model of a byte-fallback vocabulary writes bytes
    that are no UTF-8: those tokenizers then spoil the good characters directly before them too, which are kept here.
    """

    def __init__(self, decode: Callable[[list[int]], str], bytes_of: Callable[[int], bytes]) -> None:
        self._decode = decode
        self._bytes_of = bytes_of
        self._window: list[int] = []
        self._out = ""  # what of the window's text is out
        self._lead = 0  # of that, how many characters came from ids before the last character's edge
        self._fresh = 0  # ids of the window that came after the last character's edge

    def feed(self, token: int) -> str:
        """The characters that are complete with this id; often one word, sometimes nothing."""
        self._window.append(token)
        self._fresh += 1
        text = self._decode(self._window)
        ready = text.rstrip(REPLACEMENT)
        edge = ready == text
        if not ready.startswith(self._out):  # bytes of an incomplete character made those before it unreadable
            if not edge:
                return ""
            text = ready = self._out + self._decode(self._window[-self._fresh :])
        piece = ready[len(self._out) :]
        self._out = ready
        if edge and piece:
            # Only ids that brought text may lead the window: behind skipped ones alone a leading space is lost.
            self._window = self._window[-self._fresh :]
            self._out = self._decode(self._window)
            self._lead = len(self._out)
            self._fresh = 0
        return piece

    def flush(self) -> str:
        """What was held back, but for a character that the ids ended within. No id may follow."""
        if not self._fresh:
            return ""
        given, fresh = self._out[self._lead :], self._window[-self._fresh :]
        written = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(map(self._bytes_of, fresh)))
        if not self._lead and not self._decode(self._window).startswith(" "):
            written = written.removeprefix(" ")  # some tokenizers put one before every text, which is not shown
        self._window, self._out, self._lead, self._fresh = [], "", 0, 0
        return written[len(given) :] if written.startswith(given) else ""
