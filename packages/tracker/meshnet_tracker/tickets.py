"""Tokens of join tickets: made where the authority's key is, taken by a tracker that has it too.

A token is signed, not stored: `<end>.<uses>.<nonce>.<mac>`. What is stored is who used it, in one small file, so that a
restart forgets no use; the trackers of one machine share it, one at a time. Knows no certificate and no HTTP.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshnet_core.errors import InvalidInputError, TicketRefusedError

MAX_VALID_S = 90 * 86_400.0
MAX_USES = 1000
_ADVICE = "have a new one made with `meshnet mesh ticket`"


class Tickets:
    """Makes tokens and takes them.

    Args:
        secret: from `certificates.Authority.secret_for`.
        spent: the file with the uses; made when the first token is taken.
        wall: seconds since 1970: a token's end is a date, on whichever machine.
    """

    def __init__(self, secret: bytes, spent: Path, wall: Callable[[], float]) -> None:
        self._secret = secret
        self._spent = spent
        self._wall = wall

    def issue(self, valid_s: float, uses: int) -> str:
        """A new token, for ``uses`` machines within ``valid_s`` seconds.

        Raises:
            InvalidInputError: too long, or too many.
        """
        if not 0 < valid_s <= MAX_VALID_S or not 1 <= uses <= MAX_USES:
            raise InvalidInputError(
                f"a ticket is for 1 to {MAX_USES} machines and for at most {MAX_VALID_S / 86_400:.0f} days"
            )
        told = f"{int(self._wall() + valid_s)}.{uses}.{secrets.token_hex(8)}"
        return f"{told}.{self._mac(told)}"

    def take(self, token: str, owner: str) -> None:
        """Use a token for the machine ``owner``; again for the same machine costs no further use, since an answer may
        get lost on its way.

        Raises:
            TicketRefusedError: it is not of this mesh, has ended, or was used often enough; or it cannot be known how
                often it was.
        """
        told, _, mac = token.rpartition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(told).encode()):
            raise TicketRefusedError(f"this ticket is not of this mesh; {_ADVICE}")
        end, uses, nonce = told.split(".")
        now = self._wall()
        if now >= int(end):
            raise TicketRefusedError(f"this ticket ended {now - int(end):.0f} s ago; {_ADVICE}")
        with self._alone():
            spent = {key: entry for key, entry in self._read().items() if entry["end"] > now}
            owners = spent.setdefault(nonce, {"end": int(end), "owners": []})["owners"]
            if owner in owners:
                return
            if len(owners) >= int(uses):
                raise TicketRefusedError(f"this ticket was for {uses} machines, and as many have used it; {_ADVICE}")
            owners.append(owner)
            self._write(spent)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While the block runs, no other tracker of this machine takes a token."""
        with self._spent.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go of when the file is closed
            yield

    def _mac(self, told: str) -> str:
        return hmac.new(self._secret, told.encode(), hashlib.sha256).hexdigest()[:32]

    def _read(self) -> dict[str, dict[str, Any]]:
        """By nonce: its end, and who used it."""
        try:
            listed = json.loads(self._spent.read_text("utf-8"))
            return {nonce: {"end": float(one["end"]), "owners": list(one["owners"])} for nonce, one in listed.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            # To go on as if no ticket had ever been used would let others in.
            raise TicketRefusedError(
                f"{self._spent} on the tracker's machine cannot be read, so nobody is let in: {error}; delete it and "
                "have new tickets made"
            ) from error

    def _write(self, spent: object) -> None:
        handle, name = tempfile.mkstemp(dir=self._spent.parent, prefix=f".{self._spent.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(spent, file)
        Path(name).replace(self._spent)
