"""Who may see a dashboard: whoever brings one of the gateway's API keys, or everybody where it has none.

A page's shell is served to everyone, since browsers send no key with it; this decides what is put on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshnet_core.doorkeeper import Doorkeeper
from meshnet_core.errors import ForbiddenError
from meshnet_gateway.api_keys import ApiKeys


@dataclass(frozen=True, slots=True)
class Visitor:
    """Somebody who may see the dashboard; ``key_id`` of None where no key is needed."""

    key_id: str | None


class Access:
    """The door of a gateway's dashboards."""

    def __init__(self, keys: ApiKeys | None, doorkeeper: Doorkeeper) -> None:
        self._keys = keys
        self._doorkeeper = doorkeeper

    @property
    def needs_key(self) -> bool:
        return self._keys is not None

    def enter(self, key: str, address: str) -> Visitor:
        """Let in whoever brings this key from this address.

        Raises:
            ForbiddenError: the key is not taken.
            RateLimitedError: too many try from there.
        """
        self._doorkeeper.admit(None, address)
        if self._keys is None:
            return Visitor(None)
        key_id = self._keys.identify(key.strip().encode())
        if key_id is None:
            self._doorkeeper.turn_away("wrong_key" if key else "no_key", address)
            raise ForbiddenError("this API key is not taken here; enter one of the gateway's keys")
        return Visitor(key_id)
