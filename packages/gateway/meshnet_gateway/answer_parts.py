"""What an answer's text is made of: reasoning, content and tool calls, told apart as it comes. Pure; knows no tokens.

Nothing depends on how the text is cut into pieces. What may yet become a tag is held back; a call is given out whole,
once it is known to be one; whatever looks like one and is not, is content.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from meshnet_gateway.tool_format import ToolCall, ToolFormat, read_call

THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


Part = Content | Reasoning | ToolCall


class PlainText:
    """Everything is content."""

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def flush(self) -> list[Part]:
        return []


class ThinkingText:
    """Reasoning up to ``</think>``, then whatever ``rest`` makes of the text.

    Args:
        rest: reads what follows.
        opened: the prompt ends within reasoning; else it is only where the answer begins with ``<think>``.
    """

    def __init__(self, rest: TextReader, *, opened: bool) -> None:
        self._rest = rest
        self._state = "thinking" if opened else "start"
        self._held = ""
        self._began = False  # reasoning was given out, so white space before more of it counts

    def feed(self, text: str) -> list[Part]:
        found: list[Part] = []
        self._held += text
        if self._state == "start":
            seen = self._held.lstrip()
            if seen.startswith(THINK):
                self._state, self._held = "thinking", seen[len(THINK) :]
            elif not THINK.startswith(seen):
                self._state = "rest"
            else:
                return found
        if self._state == "thinking":
            thought, closed, after = self._held.partition(THOUGHT)
            if not closed:
                free = len(self._held) - _beginning_of(THOUGHT, self._held)
                thought, after = self._held[:free].rstrip(), ""
                self._held = self._held[len(thought) :]
            else:
                self._state, self._held = "after", after
            found += self._reasoning(thought.rstrip() if closed else thought)
            if not closed:
                return found
        if self._state == "after":
            self._held = self._held.lstrip()
            if not self._held:
                return found
            self._state = "rest"
        text, self._held = self._held, ""
        return found + self._rest.feed(text)

    def flush(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._state == "thinking":
            return self._reasoning(held.rstrip())
        return [*(self._rest.feed(held) if self._state == "start" else []), *self._rest.flush()]

    def _reasoning(self, text: str) -> list[Part]:
        if not self._began:
            text = text.lstrip()
        self._began = self._began or bool(text)
        return [Reasoning(text)] if text else []


class CallingText:
    """Content with calls in it, each within the format's tags.

    Args:
        form: how calls are written.
        names: functions that there are.
        most: calls that count; more of them are content.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], *, most: int) -> None:
        self._form = form
        self._names = names
        self._left = most
        self._held = ""
        self._called = False
        self._plain = False  # of a bare format: it has turned out to be no call

    def feed(self, text: str) -> list[Part]:
        found: list[Part] = []
        self._held += text
        if self._form.bare:
            if not self._plain and self._held.lstrip()[:1] in ("", "{"):  # it may be a call until it ends
                return found
            self._plain = True
            text, self._held = self._held, ""
            return _content(text)
        while True:
            before, begun, after = self._held.partition(self._form.begin)
            if not begun or not self._left:
                free = len(self._held) - _beginning_of(self._form.begin, self._held)
                text = self._held[:free].rstrip() if self._left else self._held
                self._held = self._held[len(text) :]
                return found + _content(text)
            end = _outside_strings(after, self._form.end)
            if end < 0:
                text = before.rstrip()
                self._held = self._held[len(text) :]
                return found + _content(text)
            inside, rest = after[:end], after[end + len(self._form.end) :]
            call = read_call(inside, self._names)
            if call is None:
                found += _content(before + begun + inside + self._form.end)
            else:
                found += [*_content(before.rstrip()), call]
                self._left -= 1
                self._called = True
            self._held = rest

    def flush(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._called and not held.strip():
            return []
        before, begun, inside = held.partition(self._form.begin) if not self._form.bare else ("", "", held)
        call = read_call(inside, self._names) if (begun or self._form.bare) and self._left else None
        if call is None:
            return _content(held)
        return [*_content(before.rstrip()), call]


TextReader = PlainText | ThinkingText | CallingText


def _content(text: str) -> list[Part]:
    return [Content(text)] if text else []


def _outside_strings(text: str, tag: str) -> int:
    """Where ``tag`` first stands in JSON outside of its strings, in which a model may well write it; -1 for nowhere."""
    within = False
    for found in re.finditer(rf'\\.|"|{re.escape(tag)}', text, re.DOTALL):
        if found[0] == '"':
            within = not within
        elif found[0] == tag and not within:
            return found.start()
    return -1


def _beginning_of(tag: str, text: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``tag``."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
