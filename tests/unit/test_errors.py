"""The tree of errors: each with a code and a status of its own, and back from the wire as it went."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import pytest

from meshnet_core import errors
from meshnet_core.errors import (
    ERRORS_BY_CODE,
    CacheFullError,
    CacheMissError,
    HopError,
    HopFailedError,
    MeshnetError,
    MissReason,
    RequestRefusedError,
    error_from_wire,
)


def over_the_wire(document: object) -> Any:
    return json.loads(json.dumps(document, allow_nan=False))


def all_errors(cls: type[MeshnetError] = MeshnetError) -> list[type[MeshnetError]]:
    subclasses = [sub for sub in cls.__subclasses__() if sub.__module__ == errors.__name__]
    return [cls, *(found for sub in subclasses for found in all_errors(sub))]


def an_example(cls: type[MeshnetError]) -> MeshnetError:
    fields: dict[str, Any] = {}
    if issubclass(cls, HopError):
        fields = {"hop_index": 1, "position": 40, "boot": "b-1"}
    if cls is CacheMissError:
        fields["reason"] = MissReason.EXPIRED
    if cls is CacheFullError:
        fields["never"] = True
    if cls is RequestRefusedError:
        fields = {"param": "top_k"}
    return cls("what was wrong", **fields)


# Those with a code of their own. Other packages subclass some of them; on the wire those are their parents.
LEAVES = [
    cls for cls in all_errors() if cls is not MeshnetError and cls.__module__ == errors.__name__ and "code" in vars(cls)
]


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.code)
def test_every_error_has_a_code_and_a_status_of_its_own_and_comes_back_from_the_wire(cls: type[MeshnetError]) -> None:
    assert "code" in vars(cls)
    assert ERRORS_BY_CODE[cls.code].code == cls.code
    assert 400 <= cls.http_status < 600
    error = an_example(cls)
    again = error_from_wire(over_the_wire(error.to_wire()), fallback="")
    assert type(again) is cls
    assert (again.message, again.details()) == (error.message, error.details())


def test_codes_are_not_shared() -> None:
    codes = [cls.code for cls in LEAVES]
    assert len(codes) == len(set(codes))


def test_the_drawn_tree_is_the_tree() -> None:
    drawn = re.findall(r"[|`]-- (\w+) +(\d{3}) (\w+)", inspect.getdoc(errors) or "")
    assert sorted(drawn) == sorted((cls.__name__, str(cls.http_status), cls.code) for cls in LEAVES)


@pytest.mark.parametrize("reason", MissReason)
def test_every_reason_for_a_miss_comes_back(reason: MissReason) -> None:
    again = error_from_wire(over_the_wire(CacheMissError("m", reason=reason).to_wire()), fallback="")
    assert isinstance(again, CacheMissError)
    assert again.reason is reason


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        "no",
        {"error": "no"},
        {"error": {}},
        {"error": {"code": "of_a_newer_peer", "message": "m"}},
        {"error": {"code": "cache_miss", "message": "no reason"}},
        {"error": {"code": "cache_miss", "message": "m", "reason": "of a newer peer"}},
        {"error": {"code": "deadline", "message": "m", "hop_index": "1"}},
        {"error": {"code": "deadline", "message": "m", "hop_index": -1}},
        {"error": {"code": "deadline", "message": "m", "hop_index": True}},
        {"error": {"code": "deadline", "message": "m", "position": 1.5}},
        {"error": {"code": "deadline", "message": "m", "boot": 7}},
        {"error": {"code": "cache_full", "message": "m", "never": "yes"}},
        {"error": {"code": "bad_frame", "message": "m", "field_of_a_newer_peer": "x"}},
    ],
)
def test_what_is_no_error_of_ours_is_quoted_and_never_raises_on_its_own(document: object) -> None:
    error = error_from_wire(document, fallback="the whole text" * 100)
    assert type(error) is HopFailedError
    assert "the whole text" in error.message
    assert len(error.message) < 300
