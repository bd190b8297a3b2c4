"""The bytes that one token stands for, for `logprobs`. Knows the three ways in which vocabularies write bytes."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Reads a vocabulary's way of writing bytes from its decoder.

    Args:
        tokenizer: the one whose ids are asked about.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token: like.content for token, like in added.items()}
        self._special = frozenset(token for token, like in added.items() if like.special)
        decoder = tokenizer.decoder
        kinds = set(_kinds(json.loads(decoder.__getstate__()))) if decoder is not None else set()
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds

    def of(self, token: int) -> bytes:
        """Bytes of a token id; empty for an id that the vocabulary lacks."""
        if (content := self._added.get(token)) is not None:
            return content.encode()
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return b""
        if self._byte_level:
            return bytes(_BYTES[character] for character in written if character in _BYTES)
        if self._byte_fallback and (match := _BYTE_FALLBACK.fullmatch(written)):
            return bytes.fromhex(match[1])
        return written.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def text_of(self, token: int) -> bytes:
        """The same as far as it shows in an answer: special tokens do not."""
        return b"" if token in self._special else self.of(token)


def _kinds(decoder: Any) -> list[str]:
    if not isinstance(decoder, dict):
        return []
    return [str(decoder.get("type")), *(kind for part in decoder.get("decoders", []) for kind in _kinds(part))]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet (Radford et al. 2019): printable Latin-1 stands for itself, other bytes for U+0100 upward."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_alphabet()
