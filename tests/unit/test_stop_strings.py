"""Hard cases of stop strings; `tests/property/test_stop_properties.py` compares with the plain definition."""

from __future__ import annotations

import pytest

from meshnet_core.errors import InvalidInputError
from meshnet_gateway.stop_strings import StopScanner

# name: stops, pieces fed, pieces emitted (flush last), stop that was found
CASES: dict[str, tuple[list[str], list[str], list[str], str | None]] = {
    "no stops": ([], ["a", "b"], ["a", "b", ""], None),
    "none comes": (["END"], ["some ", "text"], ["some ", "text", ""], None),
    "within one piece": (["END"], ["oneENDtwo"], ["one", ""], "END"),
    "is the whole text": (["END"], ["END"], ["", ""], "END"),
    "at the very start": (["\n"], ["\nmore"], ["", ""], "\n"),
    "over three pieces": (["END"], ["one E", "N", "D two"], ["one ", "", "", ""], "END"),
    "nothing after it, ever": (["END"], ["oneEND", "two", "three"], ["one", "", "", ""], "END"),
    "only its beginning comes": (["END"], ["one EN"], ["one ", "EN"], None),
    "its beginning, then something else": (["END"], ["one EN", "S"], ["one ", "ENS", ""], None),
    "its beginning twice": (["END"], ["EEN", "D"], ["E", "", ""], "END"),
    "a beginning within a beginning": (["aab"], ["aa", "a", "b"], ["", "a", "", ""], "aab"),
    "falls back more than once": (["ababac"], ["ababab", "ac"], ["ab", "", ""], "ababac"),
    "overlaps itself": (["aba"], ["ab", "ab", "a"], ["", "", "", ""], "aba"),
    "one is a beginning of another": (["ab", "abc"], ["xabc"], ["x", ""], "ab"),
    "the longer one listed first": (["abc", "ab"], ["xa", "bc"], ["x", "", ""], "ab"),
    "one is an end of another": (["bc", "abc"], ["xabc"], ["x", ""], "abc"),
    "one lies within another": (["b", "abc"], ["xabc"], ["xa", ""], "b"),
    "the earliest wins": (["two", "one"], ["a one two"], ["a ", ""], "one"),
    "the earliest in one piece, listed last": (["zz", "y"], ["xyzz"], ["x", ""], "y"),
    "a long one fails, a short one within it comes": (["abcd", "x"], ["abc", "x"], ["", "abc", ""], "x"),
    "the longest beginning is held": (["abcd", "cx"], ["ab", "c", "x"], ["", "", "ab", ""], "cx"),
    "the same twice": (["END", "END"], ["oneEND"], ["one", ""], "END"),
    "blank lines": (["\n\n"], ["one\n", "\ntwo"], ["one", "", ""], "\n\n"),
    "a line break that is not two": (["\n\n"], ["one\n", "two\n"], ["one", "\ntwo", "\n"], None),
    "a space before": ([" END"], ["one ", "END"], ["one", "", ""], " END"),
    "Chinese": (["。结束"], ["你好。", "结", "束"], ["你好", "", "", ""], "。结束"),
    "Korean": (["끝"], ["안녕", "끝"], ["안녕", "", ""], "끝"),
    "part of an emoji with joiners": (["👩‍👧"], ["👩", "‍", "👩", "‍👧!"], ["", "", "👩‍", "", ""], "👩‍👧"),
    "a combining mark": (["é"], ["e", "\u0301x"], ["e", "\u0301x", ""], None),
    "characters of patterns": ([".*"], ["a.", "*b"], ["a", "", ""], ".*"),
    "empty pieces": (["END"], ["", "E", "", "ND"], ["", "", "", "", ""], "END"),
    "four stops": (["1.", "2.", "###", "User:"], ["Us", "er", ": hi"], ["", "", "", ""], "User:"),
}


@pytest.mark.parametrize("name", CASES)
def test_hard_case(name: str) -> None:
    stops, pieces, expected, found = CASES[name]
    scanner = StopScanner(stops)
    assert [*(scanner.feed(piece) for piece in pieces), scanner.flush()] == expected
    assert scanner.found == found
    assert scanner.flush() == ""


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="empty stop string"):
        StopScanner(["END", ""])
