"""Who may use the API: keys, and how often each, as plain ASGI middleware. Nothing of a request is read before that.

Knows no route but the one that needs no key. The keys themselves are not kept, only their hashes.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from meshnet_core.doorkeeper import Doorkeeper
from meshnet_core.errors import InvalidInputError, RateLimitedError
from meshnet_gateway.api_errors import error_object
from meshnet_gateway.messages_shape import error_for

# They say that the process answers, and that some model can; without a key nothing more of the mesh.
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
SHORTEST_KEY = 16  # characters
DASHBOARD = "/dashboard"  # asks for a key itself, since browsers send none with a page; till then it shows nothing
_PREFIX = b"bearer "


class ApiKeys:
    """The keys that are taken.

    Raises:
        InvalidInputError: there is none, or one that is too short or has blanks in it.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests: dict[str, bytes] = {}
        for key in keys:
            if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
                raise InvalidInputError(
                    f"an API key must be at least {SHORTEST_KEY} printable characters without blanks; "
                    "make one with: openssl rand -hex 24"
                )
            digest = hashlib.sha256(key.encode()).digest()
            self._digests[digest.hex()[:16]] = digest
        if not self._digests:
            raise InvalidInputError("no API key is given; write one a line")

    def identify(self, key: bytes) -> str | None:
        """The id of a key, the first 16 hex digits of its hash; None for one that is not taken.

        Takes as long for a wrong key that begins like a right one as for any other.
        """
        given = hashlib.sha256(key).digest()
        found = [name for name, digest in self._digests.items() if hmac.compare_digest(digest, given)]
        return found[0] if found else None


class KeyCheck:
    """Answers 401 to whoever brings no key that is taken, and 429 to who asks too often.

    ``request.state.api_key_id`` is the id of the key that a request came with; None where none is needed.
    ``request.state.stranger`` is true on an open path where a key would be needed elsewhere and none came.

    Args:
        keys: None where everybody is let in.
        doorkeeper: limits each key, or each address where there are none, and counts who is turned away.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, doorkeeper: Doorkeeper) -> None:
        self._app = app
        self._keys = keys
        self._doorkeeper = doorkeeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        address = str((scope.get("client") or ("?",))[0])
        key_id: str | None = None
        stranger = False
        if self._keys is not None:
            headers = dict(scope["headers"])
            given = headers.get(b"authorization", b"")
            key = given[len(_PREFIX) :].strip() if given[: len(_PREFIX)].lower() == _PREFIX else b""
            key = key or headers.get(b"x-api-key", b"")  # where Anthropic's clients put it
            key_id = self._keys.identify(key)
            stranger = not key and _is_open(scope["path"])
            if key_id is None and not stranger:
                self._doorkeeper.turn_away("wrong_key" if key else "no_key", address)
                await self._refuse(key, scope["path"])(scope, receive, send)
                return
        try:
            self._doorkeeper.admit(key_id, address)
        except RateLimitedError as error:
            body = error_for(scope["path"], 429, error_object(429, error.message, code=error.code))
            headers = {"Retry-After": str(math.ceil(error.retry_after_s))}
            await JSONResponse(body, 429, headers=headers)(scope, receive, send)
            return
        state = {**scope.get("state", {}), "api_key_id": key_id, "stranger": stranger}
        await self._app({**scope, "state": state}, receive, send)

    @staticmethod
    def _refuse(key: bytes, path: str) -> JSONResponse:
        said = "this API key is not taken here" if key else "this gateway takes requests with an API key alone"
        message = f"{said}; send one of its keys in the header Authorization: Bearer KEY"
        body = error_for(path, 401, error_object(401, message, code="invalid_api_key"))
        return JSONResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path == DASHBOARD or path.startswith(f"{DASHBOARD}/")
