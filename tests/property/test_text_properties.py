"""Incremental decoding: whole characters, and together the whole decode, for both kinds of vocabulary."""

from __future__ import annotations

import codecs
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet_gateway.text_model import TextModel
from tiny_tokenizers import byte_fallback_files, byte_level_files

HARD = [
    "你好、世界",
    "안녕하세요",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "e\u0301",
    "ż",
    "नमस्ते",
    " ",
    "  ",
    "\n",
    "the fox",
    "hello",
    "\u2028",
    "a",
]


def _joined(parts: list[str]) -> str:
    return "".join(parts).replace("▁", "")  # which one of the vocabularies cannot tell from a space


SETTINGS = settings(deadline=None)  # the first example loads a tokenizer
TEXTS = st.lists(st.one_of(st.sampled_from(HARD), st.text(max_size=6)), max_size=8).map(_joined)


@functools.cache
def model(kind: str) -> TextModel:
    files = byte_level_files() if kind == "byte level" else byte_fallback_files()
    return TextModel.from_files(kind, "f" * 64, files)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@SETTINGS
@given(text=TEXTS)
def test_text_comes_back_whole_in_whole_characters(kind: str, text: str) -> None:
    ids = model(kind).encode(text)
    decoder = model(kind).decoder()
    pieces = [decoder.feed(token) for token in ids]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join([*pieces, decoder.flush()]) == text


@SETTINGS
@given(ids=st.lists(st.integers(0, 350), max_size=40))
def test_any_ids_of_a_byte_level_vocabulary_equal_the_whole_decode(ids: list[int]) -> None:
    """Broken bytes and special tokens included; but for a character that the end cuts."""
    written = b"".join(map(model("byte level")._bytes.text_of, ids))
    whole = codecs.getincrementaldecoder("utf-8")("replace").decode(written)
    assert model("byte level").decode(ids) == whole
    assert model("byte level")._decode(ids).removesuffix("\ufffd") in (whole, whole.removesuffix("\ufffd"))


@SETTINGS
@given(ids=st.lists(st.integers(0, 314), max_size=40))
def test_ids_of_a_byte_fallback_vocabulary_equal_the_whole_decode_unless_bytes_are_broken(ids: list[int]) -> None:
    whole = model("byte fallback")._decode(ids)
    streamed = model("byte fallback").decode(ids)
    if "\ufffd" in whole:
        # Good characters beside broken bytes are kept, where the whole decode breaks them too.
        assert streamed.count("\ufffd") <= whole.count("\ufffd")
    else:
        assert streamed == whole


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@SETTINGS
@given(text=TEXTS, cut=st.integers(0, 200))
def test_an_end_within_a_character_leaves_it_out(kind: str, text: str, cut: int) -> None:
    ids = model(kind).encode(text)[:cut]
    decoder = model(kind).decoder()
    streamed = "".join(decoder.feed(token) for token in ids)
    whole = streamed + decoder.flush()
    assert text.startswith(whole)
    assert len(whole.encode()) > len(b"".join(map(model(kind)._bytes.text_of, ids))) - 4 - (kind == "byte fallback")
    assert decoder.flush() == ""
