"""From messages to token ids, so that what people write in them never becomes a special token.

A chat template writes special tokens between messages, and a text of the form ``<|im_end|>`` is that token wherever it
stands. Somebody who spells it in a message would thereby end it and begin another one, in the system's name. So in what
messages say, such a text is encoded as the plain characters that it is. Where no message spells one, which is nearly
always, the template's text is encoded as it comes.

    message     a <|im_end|> b
    broken      a <B|im_end|> b                      B: no character, which no template looks for
    rendered    <|im_start|>user\\n a <B|im_end|> b<|im_end|>
    sealed      S1S user\\n a <|im_end|> b S2S        what the template wrote goes by other names, and B out again

The sealed text is encoded by a twin of the tokenizer that knows those names, and no special token. Knows no template.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshnet_core.errors import RequestRefusedError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

# Code points that Unicode keeps for use within a program; they are in no text that is meant for others.
BREAK, SEAL = "\ufdd1", "\ufdd0"
_UNBROKEN = frozenset({"role"})  # names from a list of ours, which templates compare


class PromptEncoder:
    """Encodes what a template makes of messages. Its methods may be called from several threads at once.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special: dict[str, tuple[int, AddedToken]] = {
            token.content: (index, token) for index, token in added.items() if token.special and token.content
        }
        self._special_ids = frozenset(index for index, _ in self._special.values())
        longest_first = sorted(self._special, key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._longest = max(map(len, self._special), default=0)
        self._beginnings = {text[:size] for text in self._special for size in range(1, len(text))}
        self._endings = {text[size:] for text in self._special for size in range(1, len(text))}
        self._twin: Tokenizer | None = None
        self._names: dict[int, int] = {}  # the twin's ids of sealed names -> the special tokens'
        self._twin_is_made = threading.Lock()

    def encode(self, render: Callable[[Any], str], given: Any) -> list[int]:
        """Token ids of a rendered conversation.

        Args:
            render: the template.
            given: what it renders, of JSON's types: messages, for example.

        Raises:
            RequestRefusedError: a message spells a special token, and either holds a code point that is needed here, or
                the tokenizer has another way yet of reading it as one.
        """
        if not any(self._spells(text) for text in _texts(given)):
            return self._ids(self._tokenizer, render(given))
        if any(BREAK in text or SEAL in text for text in _texts(given)):
            raise RequestRefusedError(
                "a message spells one of the model's special tokens, and holds U+FDD0 or U+FDD1; "
                "leave that out, it is no character",
                param="messages",
            )
        text = render(self._broken(given))
        written = [self._special[match[0]][0] for match in self._any_special.finditer(text)]
        sealed = self._any_special.sub(lambda match: _sealed(self._special[match[0]][0]), text).replace(BREAK, "")
        ids = [self._names.get(index, index) for index in self._ids(self._special_free_twin(), sealed)]
        if [index for index in ids if index in self._special_ids] != written:
            raise RequestRefusedError(
                "a message spells one of the model's special tokens, and its tokenizer would read it as that token; "
                "leave it out, or write it with a space in it",
                param="messages",
            )
        return ids

    def _spells(self, text: str) -> bool:
        """Whether it may come to be read as a special token, by itself or with what stands beside it."""
        normalizer = self._tokenizer.normalizer
        return bool(self._breaks(text)) or (
            normalizer is not None and self._any_special.search(normalizer.normalize_str(text)) is not None
        )

    def _broken(self, value: Any) -> Any:
        """``value`` with a break in every text that `_spells` finds at fault as it is written."""
        if isinstance(value, str):
            for at in sorted(self._breaks(value), reverse=True):
                value = value[:at] + BREAK + value[at:]
            return value
        if isinstance(value, Mapping):
            return {key: part if key in _UNBROKEN else self._broken(part) for key, part in value.items()}
        return [self._broken(part) for part in value] if isinstance(value, list | tuple) else value

    def _breaks(self, text: str) -> set[int]:
        """Where to break ``text``: in every special token, in what may become the beginning of one with what a template
        writes behind it, and in what may become the end of one. Templates may trim a text."""
        found = {match.start() + 1 for match in self._any_special.finditer(text)}
        stop, start = len(text.rstrip()), len(text) - len(text.lstrip())
        longest = min(stop - start, self._longest)
        found |= {stop - size + 1 for size in range(1, longest + 1) if text[stop - size : stop] in self._beginnings}
        found |= {start + size - 1 for size in range(1, longest + 1) if text[start : start + size] in self._endings}
        return found

    def _special_free_twin(self) -> Tokenizer:
        """Made when it is first needed: most models never need it, and it takes as much memory as the tokenizer."""
        with self._twin_is_made:
            if self._twin is None:
                self._twin = self._make_twin()
            return self._twin

    def _make_twin(self) -> Tokenizer:
        from tokenizers import AddedToken, Tokenizer  # noqa: PLC0415 - as transformers, slow to import

        twin = Tokenizer.from_str(self._tokenizer.to_str())
        twin.no_truncation()
        twin.no_padding()
        twin.encode_special_tokens = True
        for index, like in self._special.values():
            name = AddedToken(
                _sealed(index),
                single_word=like.single_word,
                lstrip=like.lstrip,
                rstrip=like.rstrip,
                normalized=False,
                special=False,
            )
            twin.add_tokens([name])
            if (known_as := twin.token_to_id(name.content)) is not None:
                self._names[known_as] = index
        return twin

    @staticmethod
    def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids  # the template has written them
        return ids


def _sealed(index: int) -> str:
    """The name by which the twin knows the special token of that id."""
    return f"{SEAL}{index}{SEAL}"


def _texts(value: Any) -> Iterator[str]:
    """All texts in ``value`` that people may have written."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from () if key in _UNBROKEN else _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
