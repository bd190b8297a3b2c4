"""Stop strings: for any cut of any text into pieces, and any stops, what comes out is what the definition says."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from meshnet_gateway.stop_strings import StopScanner

LETTERS = st.text(alphabet="ab\n", max_size=40)  # few letters, so that stops come, overlap and nearly come
ANY_TEXT = st.text(max_size=40)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)
CUTS = st.lists(st.integers(0, 40), max_size=20)


def cut_at_stop(text: str, stops: list[str]) -> str:
    """The definition: up to the start of the stop that is complete first; of several, of the longest."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(found)[1]] if found else text


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:stop] for start, stop in pairwise(edges)]


@given(LETTERS, STOPS, CUTS)
def test_output_is_the_text_cut_at_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    scanner = StopScanner(stops)
    emitted = [scanner.feed(piece) for piece in pieces_of(text, cuts)]
    assert "".join([*emitted, scanner.flush()]) == cut_at_stop(text, stops)
    assert (scanner.found is not None) == any(stop in text for stop in stops)


@given(LETTERS, STOPS, CUTS)
def test_nothing_is_held_that_can_become_no_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    scanner = StopScanner(stops)
    seen = emitted = ""
    for piece in pieces_of(text, cuts):
        seen += piece
        emitted += scanner.feed(piece)
        if scanner.found is not None:
            return
        held = seen[len(emitted) :]
        assert emitted + held == seen
        assert not held or any(stop.startswith(held) for stop in stops)


@given(ANY_TEXT, st.lists(st.text(min_size=1, max_size=5), max_size=4), CUTS)
def test_any_characters(text: str, stops: list[str], cuts: list[int]) -> None:
    scanner = StopScanner(stops)
    emitted = [scanner.feed(piece) for piece in pieces_of(text, cuts)]
    assert "".join([*emitted, scanner.flush()]) == cut_at_stop(text, stops)
