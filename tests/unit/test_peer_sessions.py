"""Sessions of each peer at one node: bounded, and free again when a session has gone by whatever way."""

from __future__ import annotations

import pytest

from meshnet_core.errors import CacheFullError, InvalidInputError
from meshnet_node.peer_sessions import PeerSessions


def test_each_peer_has_so_many_and_no_more_at_once() -> None:
    held: set[str] = set()
    peers = PeerSessions(2, lambda: held)

    def open_by(peer: str, session: str) -> None:
        with peers.opening(peer, session):
            held.add(session)

    open_by("kitchen", "s-1")
    open_by("kitchen", "s-2")
    open_by("kitchen", "s-2")  # the same again, in a newer epoch
    with pytest.raises(CacheFullError, match="--max-sessions-per-peer") as caught:
        open_by("kitchen", "s-3")
    assert not caught.value.never
    open_by("garage", "s-4")
    held.remove("s-1")  # released, expired or evicted
    open_by("kitchen", "s-3")
    with pytest.raises(CacheFullError):
        open_by("kitchen", "s-1")


def test_sessions_that_have_all_gone_count_for_nothing() -> None:
    peers = PeerSessions(1, set)
    for number in range(5):
        with peers.opening("kitchen", f"s-{number}"):
            pass


def test_opens_that_are_under_way_count_and_those_that_failed_do_not() -> None:
    peers = PeerSessions(1, set)
    with (
        peers.opening("kitchen", "s-1"),
        peers.opening("kitchen", "s-1"),
        peers.opening("garage", "s-2"),
        pytest.raises(CacheFullError),
        peers.opening("kitchen", "s-3"),
    ):
        pass
    with pytest.raises(RuntimeError), peers.opening("kitchen", "s-4"):
        raise RuntimeError("no room")
    with peers.opening("kitchen", "s-5"):
        pass


def test_none_at_all_is_refused() -> None:
    with pytest.raises(InvalidInputError):
        PeerSessions(0, set)
