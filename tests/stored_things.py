"""Things with bytes and a session store for them: for tests of what gives way to what."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from meshnet_core.errors import CacheMissError, MissReason
from meshnet_node.cache_store import CacheStore, SessionKey, StoreLimits

LIMITS = StoreLimits(budget_bytes=100, max_sessions=4, ttl_s=60.0, running_s=10.0)


@dataclass
class Held:
    """Something with bytes; two of them compare equal, as sessions with equal fields would."""

    nbytes: int = 0
    cancels: int = 0

    def cancel(self) -> None:
        self.cancels += 1


def key(session: str, hop_index: int = 0) -> SessionKey:
    return SessionKey(session, hop_index)


def admit(store: CacheStore[Held], session: str, reserve: int = 0, epoch: int = 0, hop_index: int = 0) -> Held:
    held = Held()
    store.admit(key(session, hop_index), epoch, held, reserve)
    return held


def names(store: CacheStore[Held]) -> set[str]:
    return {name for name in "abcdefgh" if store.find(key(name)) is not None}


def miss(store: CacheStore[Held], session: str, epoch: int = 0, hop_index: int = 0) -> MissReason:
    with pytest.raises(CacheMissError) as caught:
        store.require(key(session, hop_index), epoch)
    return caught.value.reason
