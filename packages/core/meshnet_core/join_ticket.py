"""A join ticket: all that a new machine needs to get into a mesh, in one string that people pass on.

    meshnet-eyJ2IjoxLCJwaW4iOi...

It names trackers, pins the authority's certificate, and carries a token that a tracker takes for a certificate. Whoever
has it can join until it ends, so it is passed on like a password. Knows no network.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass

from meshnet_core.errors import InvalidInputError

PREFIX = "meshnet-"
VERSION = 1
MAX_TRACKERS = 8
_PIN = re.compile(r"[0-9a-f]{64}")
_TOKEN = re.compile(r"[0-9A-Za-z.]{1,200}")
_LONGEST = 8192  # characters of a ticket


@dataclass(frozen=True, slots=True)
class JoinTicket:
    """One ticket.

    Attributes:
        pin: SHA-256, in hex, of the certificate of the mesh's authority.
        token: for the tracker.
        trackers: their addresses; none where they are to be looked for on the local network.
    """

    pin: str
    token: str
    trackers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if _PIN.fullmatch(self.pin) is None or _TOKEN.fullmatch(self.token) is None:
            raise InvalidInputError("a ticket's pin is 64 hex digits and its token 1 to 200 letters, digits and dots")
        if len(self.trackers) > MAX_TRACKERS:
            raise InvalidInputError(f"a ticket names at most {MAX_TRACKERS} trackers, not {len(self.trackers)}")
        for url in self.trackers:
            if not url.startswith("https://") or not url.isprintable() or len(url) > 256:
                raise InvalidInputError(f"a ticket names trackers by their https:// addresses, not {url[:80]!r}")

    def __str__(self) -> str:
        document = {"v": VERSION, "pin": self.pin, "token": self.token, "at": list(self.trackers)}
        packed = base64.urlsafe_b64encode(json.dumps(document, separators=(",", ":")).encode())
        return PREFIX + packed.decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> JoinTicket:
        """Read what ``str`` wrote, with blanks and line breaks that came in on the way.

        Raises:
            InvalidInputError: it is no ticket, or not a whole one.
        """
        packed = "".join(text.split())
        if not packed.startswith(PREFIX) or len(packed) > _LONGEST:
            raise InvalidInputError(f"{text[:40]!r} is no ticket; one begins with {PREFIX}, see `meshnet mesh ticket`")
        packed = packed.removeprefix(PREFIX)
        try:
            decoded = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
            document = json.loads(decoded)
        except (binascii.Error, ValueError, RecursionError) as error:
            raise InvalidInputError("this ticket is not whole; copy all of it, to its last letter") from error
        if not isinstance(document, dict) or document.get("v") != VERSION:
            raise InvalidInputError("this ticket is of another version of meshnet; use the same on both machines")
        pin, token, trackers = document.get("pin"), document.get("token"), document.get("at")
        if (
            not isinstance(pin, str)
            or not isinstance(token, str)
            or not isinstance(trackers, list)
            or not all(isinstance(url, str) for url in trackers)
        ):
            raise InvalidInputError("this ticket lacks its pin, its token or its trackers; have a new one made")
        return cls(pin, token, tuple(trackers))
