"""The answer to a request whose client stopped sending within its body, and still reads: uvicorn gives it none.

Such a connection is closed at both ends when the client closes its own; what is written to it first is still sent.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from meshnet_gateway.api_errors import error_object

_BODY = json.dumps(error_object(400, "the request's body ended before what its headers announce", code="cut_body"))
_ANSWER = (
    "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
    f"content-length: {len(_BODY)}\r\nconnection: close\r\n\r\n{_BODY}"
).encode()
_Base: Any = AutoHTTPProtocol  # of the two that uvicorn has, whichever it would take; it tells no type


class AnsweringProtocol(_Base):  # type: ignore[misc]
    """uvicorn's protocol, with a word to clients that close their side too early."""

    transport: asyncio.Transport

    def eof_received(self) -> None:
        """No more will come; the transport is closed after this, once it has sent what is written here."""
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started:
            self.transport.write(_ANSWER)
        super().eof_received()
