"""Errors in OpenAI's shape: the one place where anything that went wrong becomes an HTTP answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from meshnet_core.errors import (
    CacheFullError,
    DeadlineError,
    DrainingError,
    GrammarError,
    HopError,
    MeshnetError,
    ModelNotFoundError,
    RequestRefusedError,
)
from meshnet_gateway.api_fields import UNSUPPORTED

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "missing_field": "missing_required_parameter",
    UNSUPPORTED: UNSUPPORTED,
}
_BAD_GATEWAY = 502
RETRY_AFTER_S = 10  # what a client is told that waited for room in vain
# Refusals of a hop that a client can act on, by waiting or by another schema. Of the others the gateway is the author.
_PASSED_ON = (CacheFullError, DrainingError, DeadlineError, GrammarError)


class ErrorFields(BaseModel):
    """What went wrong; ``param`` names the field of the request, where one is to blame."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error; for the API's description."""

    error: ErrorFields


class ContextLengthError(RequestRefusedError):
    """Prompt and answer do not fit into the model's positions; the code is the one that OpenAI's clients know."""

    code = "context_length_exceeded"


def error_object(
    status: int, message: str, *, param: str | None = None, code: str | None = None, **more: Any
) -> dict[str, Any]:
    """``{"error": {...}}`` as OpenAI's clients read it; the type follows from the HTTP status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **more}}


def http_status(error: MeshnetError) -> int:
    """The status for a client; what a hop refused in a frame of the gateway's making is a 502 here."""
    if isinstance(error, HopError) and error.http_status < 500 and not isinstance(error, _PASSED_ON):
        return _BAD_GATEWAY
    return error.http_status


def from_mesh(error: MeshnetError) -> tuple[int, dict[str, Any]]:
    """Status and body for an error of the mesh."""
    status = http_status(error)
    param = error.param if isinstance(error, RequestRefusedError) else None
    if isinstance(error, ModelNotFoundError):
        param = "model"
    more = {"hop_index": error.hop_index} if isinstance(error, HopError) and error.hop_index is not None else {}
    return status, error_object(status, error.message, param=param, code=error.code, **more)


def retry_headers(error: MeshnetError) -> dict[str, str] | None:
    """``Retry-After`` for what time alone may mend."""
    return {"Retry-After": str(RETRY_AFTER_S)} if isinstance(error, CacheFullError) else None


def from_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[int, dict[str, Any]]:
    """Status 400 and body for a request that failed validation; tells the first thing that is wrong.

    Args:
        errors: as `fastapi.exceptions.RequestValidationError.errors` gives them.
        body: the parsed request body.
    """
    error = errors[0]
    kind = str(error["type"])
    if kind == "json_invalid":
        reason = error.get("ctx", {}).get("error", "")
        return 400, error_object(400, f"the request body is not JSON: {reason}", code="invalid_json")
    location = list(error["loc"])[1:]
    context = error.get("ctx") or {}
    param = str(context["at"]) if "at" in context else _param(location, body, missing=kind == "missing")
    if "within" in context:  # a field of the object that the error is about
        param = f"{param}.{context['within']}" if param else str(context["within"])
    message = _message(kind, str(error["msg"]), param)
    return 400, error_object(400, message, param=param, code=_CODES.get(kind, "invalid_value"))


def _message(kind: str, said: str, param: str | None) -> str:
    if kind == "extra_forbidden":
        return f"unknown parameter {param!r}; it is none of this API's"
    if kind == "missing":
        return "the request body is missing; a JSON object is expected" if param is None else f"{param} is required"
    if kind in (UNSUPPORTED, "invalid_value", "missing_field"):
        return said
    return f"{param}: {said}" if param else f"the request body: {said}; a JSON object is expected"


def _param(location: Sequence[str | int], body: Any, *, missing: bool) -> str | None:
    """The field's path, ``messages[0].content``, without what pydantic adds for the members of unions."""
    path, at = "", body
    for depth, step in enumerate(location):
        if isinstance(at, dict) and isinstance(step, str) and (step in at or (missing and depth == len(location) - 1)):
            path += f".{step}" if path else step
            at = at.get(step)
        elif isinstance(at, list) and isinstance(step, int) and step < len(at):
            path += f"[{step}]"
            at = at[step]
    return path or None
