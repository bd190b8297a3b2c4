"""What stands before every request to a tracker: who is let in, and one form for all errors. Knows no paths but one."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from aiohttp import web

from meshnet_core.errors import (
    ForbiddenError,
    InvalidInputError,
    MeshnetError,
    RateLimitedError,
    TicketRefusedError,
    TooLargeError,
    UnauthorizedError,
)
from meshnet_core.secure_site import owner_of_request

if TYPE_CHECKING:
    from meshnet_core.doorkeeper import Doorkeeper
    from meshnet_tracker.tracker_metrics import TrackerMetrics

logger = logging.getLogger(__name__)


def known_alone(doorkeeper: Doorkeeper, open_path: str) -> Any:
    """Lets in who shows a certificate, where connections have them, and nobody too often."""

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        address, owner = request.remote or "?", owner_of_request(request)
        doorkeeper.admit(owner, address)
        if request.secure and owner is None and request.path != open_path:
            doorkeeper.turn_away("no_certificate", address)
            raise UnauthorizedError(
                "this tracker answers machines of its mesh alone: get a ticket with `meshnet mesh ticket` where the "
                "mesh was made, and run `meshnet join TICKET`"
            )
        try:
            response: web.StreamResponse = await handler(request)
        except ForbiddenError as error:
            ticket = isinstance(error, TicketRefusedError)
            doorkeeper.turn_away("ticket" if ticket else "not_its_own", address, error.message)
            raise
        return response

    return middleware


def refusals_as_json(metrics: TrackerMetrics, max_body: int) -> Any:
    """Answers every error in one form, whoever raised it, and counts it."""

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            response: web.StreamResponse = await handler(request)
        except MeshnetError as error:
            again = math.ceil(error.retry_after_s) if isinstance(error, RateLimitedError) else None
            return refuse(error, error.http_status, {"Retry-After": str(again)} if again is not None else None)
        except web.HTTPRequestEntityTooLarge:
            too_large = TooLargeError(f"the body is larger than the {max_body} bytes that this tracker reads")
            return refuse(too_large, too_large.http_status)
        except web.HTTPException as error:  # no such path, or no such method there
            reason = InvalidInputError(
                f"{request.method} {request.path[:200]}: {error.reason}; see docs/tracker-api.md"
            )
            allow = error.headers.get("Allow")
            return refuse(reason, error.status, {"Allow": allow} if allow else None)
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            return refuse(MeshnetError("the tracker failed; its log says why"), MeshnetError.http_status)
        return response

    def refuse(error: MeshnetError, status: int, headers: dict[str, str] | None = None) -> web.Response:
        metrics.refusals.labels(error.code).inc()
        return web.json_response(error.to_wire(), status=status, headers=headers)

    return middleware
