"""Every error that meshnet raises on purpose: one tree, each leaf with a wire code and an HTTP status.

    MeshnetError
    |-- InvalidInputError          400 invalid_input         an option, a range, a document that cannot be right
    |-- RequestRefusedError        400 unsupported_parameter a field of an API request, named in `param`
    |-- UnsupportedModelError      422 unsupported_model     a model or a split that cannot be served, with the reason
    |-- ModelNotFoundError         404 model_not_found       no such model on disk or in the mesh
    |-- LayersUnavailableError     503 layers_unavailable    no nodes cover the layers named
    |-- TrackerUnreachableError    503 tracker_unreachable   no tracker answers
    |-- RegistryUnreachableError   503 registry_unreachable  what several trackers share does not answer one of them
    |-- UnknownNodeError           404 unknown_node          a leave for a node that is not registered
    |-- DirectoryFullError         503 directory_full        a tracker that holds as many nodes as it may
    |-- ForbiddenError             403 forbidden             what this machine, of the mesh or not, may not do
    |   `-- TicketRefusedError     403 ticket_refused        a join ticket that is not valid, or not here
    |-- RateLimitedError           429 rate_limited          more requests than one peer may make, with when to retry
    `-- HopError                                             said by, or about, one hop of a route
        |-- BadFrameError          400 bad_frame
        |-- GrammarError           400 bad_grammar           what an answer cannot be held to, said by the tail
        |-- UnauthorizedError      401 unauthorized
        |-- CacheMissError         409 cache_miss            with a `MissReason`
        |-- TooLargeError          413 too_large
        |-- ProtocolMismatchError  426 protocol_mismatch
        |-- CacheFullError         429 cache_full            for now, or `never` any room for this session
        |-- HopFailedError         500 hop_failed            an exception inside a forward
        |-- HopUnreachableError    502 hop_unreachable
        |-- DrainingError          503 draining
        `-- DeadlineError          504 deadline

Foreign errors are mapped where they are caught, with ``raise ... from``. This module knows no transport; the
JSON form is the one that every transport carries.
"""

from __future__ import annotations

import enum
from typing import Any, ClassVar

MAX_RETRY_AFTER_S = 86_400.0  # what a peer may be told to wait: more is no answer of ours


class MissReason(enum.StrEnum):
    """Why a node has no usable state for a frame."""

    UNKNOWN_SESSION = "unknown_session"
    EVICTED = "evicted"
    EXPIRED = "expired"
    RESTARTED = "restarted"
    POSITION_MISMATCH = "position_mismatch"
    RANGE_MISMATCH = "range_mismatch"
    EPOCH_STALE = "epoch_stale"
    MODEL_MISMATCH = "model_mismatch"
    RELEASED = "released"
    FAILED = "failed"  # an earlier frame of this epoch failed or was cancelled half way, so its state was dropped


class MeshnetError(Exception):
    """Root of the tree. ``code`` names the error on the wire, ``http_status`` is what HTTP answers with."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def details(self) -> dict[str, Any]:
        """Fields besides code and message, JSON-ready; the keyword arguments of the constructor."""
        return {}

    def to_wire(self) -> dict[str, Any]:
        """JSON-ready form, read back by :func:`error_from_wire`."""
        return {"error": {"code": self.code, "message": self.message, **self.details()}}


class InvalidInputError(MeshnetError):
    code = "invalid_input"
    http_status = 400


class RequestRefusedError(MeshnetError):
    """A field of an API request is wrong or not supported; ``param`` names it."""

    code = "unsupported_parameter"
    http_status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def details(self) -> dict[str, Any]:
        return {"param": self.param}


class UnsupportedModelError(MeshnetError):
    code = "unsupported_model"
    http_status = 422


class ModelNotFoundError(MeshnetError):
    code = "model_not_found"
    http_status = 404


class LayersUnavailableError(MeshnetError):
    code = "layers_unavailable"
    http_status = 503


class TrackerUnreachableError(MeshnetError):
    code = "tracker_unreachable"
    http_status = 503


class RegistryUnreachableError(MeshnetError):
    code = "registry_unreachable"
    http_status = 503


class UnknownNodeError(MeshnetError):
    code = "unknown_node"
    http_status = 404


class DirectoryFullError(MeshnetError):
    code = "directory_full"
    http_status = 503


class ForbiddenError(MeshnetError):
    code = "forbidden"
    http_status = 403


class TicketRefusedError(ForbiddenError):
    code = "ticket_refused"


class RateLimitedError(MeshnetError):
    """More requests than one peer may make; ``retry_after_s`` seconds later it may again."""

    code = "rate_limited"
    http_status = 429

    def __init__(self, message: str, *, retry_after_s: float = 0.1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def details(self) -> dict[str, Any]:
        return {"retry_after_s": round(self.retry_after_s, 3)}


class HopError(MeshnetError):
    """Said by, or about, one hop.

    Args:
        message: what was wrong and what would be right.
        hop_index: where in the route the trouble is; None where that is not known.
        position: positions that the hop holds of the session; None where it holds none.
        boot: boot id of the node that answered; None where none answered.
    """

    def __init__(
        self, message: str, *, hop_index: int | None = None, position: int | None = None, boot: str | None = None
    ) -> None:
        super().__init__(message)
        self.hop_index = hop_index
        self.position = position
        self.boot = boot

    def details(self) -> dict[str, Any]:
        return {"hop_index": self.hop_index, "position": self.position, "boot": self.boot}


class BadFrameError(HopError):
    code = "bad_frame"
    http_status = 400


class GrammarError(HopError):
    """The tail cannot hold the answer to its grammar; the same request would fail anywhere."""

    code = "bad_grammar"
    http_status = 400


class UnauthorizedError(HopError):
    code = "unauthorized"
    http_status = 401


class CacheMissError(HopError):
    """The explicit answer of a node that has no usable state for a frame."""

    code = "cache_miss"
    http_status = 409

    def __init__(
        self,
        message: str,
        *,
        reason: MissReason | str,
        hop_index: int | None = None,
        position: int | None = None,
        boot: str | None = None,
    ) -> None:
        super().__init__(message, hop_index=hop_index, position=position, boot=boot)
        self.reason = MissReason(reason)

    def details(self) -> dict[str, Any]:
        return {**super().details(), "reason": self.reason.value}


class TooLargeError(HopError):
    code = "too_large"
    http_status = 413


class ProtocolMismatchError(HopError):
    code = "protocol_mismatch"
    http_status = 426


class CacheFullError(HopError):
    """A node has no room for a session; with ``never`` it would have none if it held nothing else."""

    code = "cache_full"
    http_status = 429

    def __init__(
        self,
        message: str,
        *,
        never: bool = False,
        hop_index: int | None = None,
        position: int | None = None,
        boot: str | None = None,
    ) -> None:
        super().__init__(message, hop_index=hop_index, position=position, boot=boot)
        self.never = never

    def details(self) -> dict[str, Any]:
        # Left out where it says nothing, so that a peer that does not know it still reads what is merely full.
        return {**super().details(), **({"never": True} if self.never else {})}


class HopFailedError(HopError):
    code = "hop_failed"
    http_status = 500


class HopUnreachableError(HopError):
    code = "hop_unreachable"
    http_status = 502


class DrainingError(HopError):
    code = "draining"
    http_status = 503


class DeadlineError(HopError):
    code = "deadline"
    http_status = 504


def _leaves(cls: type[MeshnetError]) -> dict[str, type[MeshnetError]]:
    found = {cls.code: cls} if "code" in vars(cls) else {}
    for sub in cls.__subclasses__():
        found |= _leaves(sub)
    return found


ERRORS_BY_CODE: dict[str, type[MeshnetError]] = _leaves(MeshnetError)


def error_from_wire(document: object, *, fallback: str) -> MeshnetError:
    """Rebuild an error from its JSON form.

    Anything that is not one of ours (an HTML page of a proxy, an unknown code of a newer peer) becomes a
    :class:`HopFailedError` that quotes ``fallback``, never an exception of its own.
    """
    if isinstance(document, dict) and isinstance(body := document.get("error"), dict):
        cls = ERRORS_BY_CODE.get(str(body.get("code")))
        fields = {key: value for key, value in body.items() if key not in {"code", "message"}}
        if cls is not None and all(_is_field(key, value) for key, value in fields.items()):
            try:
                return cls(str(body.get("message")), **fields)
            except (TypeError, ValueError):
                pass  # fields of a newer peer; the fallback still carries the text
    return HopFailedError(f"unreadable answer from a peer: {fallback[:200]}")


def _is_field(key: str, value: object) -> bool:
    """Whether ``value`` is what an error may carry under ``key``."""
    if key == "never":
        return isinstance(value, bool)
    if key == "retry_after_s":
        return type(value) in {int, float} and 0 <= float(str(value)) < MAX_RETRY_AFTER_S
    if key in {"hop_index", "position"}:
        return value is None or (type(value) is int and value >= 0)
    return value is None or isinstance(value, str)
