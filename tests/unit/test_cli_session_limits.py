"""What a node may hold, as it is said on the command line."""

from __future__ import annotations

import pytest

from meshnet_cli.session_limits import SessionLimits, parse_bytes
from meshnet_core.errors import InvalidInputError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1000000", 1_000_000),
        ("512M", 512 * 2**20),
        ("512 MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        ("2Gi", 2 * 2**30),
        ("2gb", 2 * 10**9),
        ("1.5k", 1536),
        ("1T", 2**40),
        ("7B", 7),
    ],
)
def test_bytes_may_have_a_unit(text: str, nbytes: int) -> None:
    assert parse_bytes(text, option="--cache-bytes") == nbytes


@pytest.mark.parametrize("text", ["", "-1", "M", "12X", "1e9", "0x10", "5 i", "3iB", "1,5G", "١٢"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"--cache-bytes .* is no number of bytes; write it like 512M"):
        parse_bytes(text, option="--cache-bytes")


@pytest.mark.parametrize(
    ("max_sessions", "ttl_s", "grace_s", "told"),
    [
        (0, 600, 30, "--max-sessions 0: give at least 1; --cache-bytes 0 serves without"),
        (1, 0, 30, "--session-ttl 0: give seconds from 1"),
        (1, float("nan"), 30, "--session-ttl nan"),
        (1, 600, -1, "--drain-grace -1: give seconds from 0, which leaves at once"),
        (1, 600, float("inf"), "--drain-grace inf"),
    ],
)
def test_a_limit_that_cannot_be_is_refused(max_sessions: int, ttl_s: float, grace_s: float, told: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        SessionLimits.given(None, max_sessions, ttl_s, grace_s)
    assert caught.value.message.startswith(told)


def test_limits_are_passed_on_as_they_are() -> None:
    assert SessionLimits().arguments() == ("--max-sessions", "256", "--session-ttl", "600.0", "--drain-grace", "30.0")
    given = SessionLimits.given("1M", 8, 60.0, 0)
    assert given.arguments()[:2] == ("--cache-bytes", "1048576")
    assert SessionLimits(prefix_reuse=False).arguments()[-1] == "--no-prefix-reuse"
