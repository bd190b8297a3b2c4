"""What is asked of a tracker, read from HTTP requests: their queries and JSON documents, checked. Answers nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from meshnet_core.demand import Demand
from meshnet_core.errors import InvalidInputError
from meshnet_core.frames import PROTOCOLS
from meshnet_core.ids import check_id
from meshnet_core.wire_fields import items, text, whole

if TYPE_CHECKING:
    from aiohttp import web

MAX_PROTOCOLS = 16  # versions in one request for a route: each is planned for
MAX_EXCLUDED = 1000  # nodes in one request for a route


class RouteQuestion(NamedTuple):
    """For which route somebody asks; fields as `Directory.plan` takes them."""

    model: str
    excluded: frozenset[str]
    fingerprint: str | None
    protocols: range
    demand: Demand | None


def query(request: web.Request, *known: str) -> dict[str, str]:
    """The query's parameters, each given at most once and none unknown."""
    given = list(request.query.items())
    if unknown := {name for name, _ in given} - set(known):
        raise InvalidInputError(
            f"unknown query parameters: {', '.join(sorted(unknown))[:200]}; known here: {', '.join(known) or 'none'}"
        )
    if len(dict(given)) < len(given):
        raise InvalidInputError("a query parameter is given twice")
    return dict(given)


def number(asked: dict[str, str], name: str, most: int) -> int:
    """A whole number of the query, 0 where it is missing."""
    value = asked.get(name, "0")
    if not value.isascii() or not value.isdecimal() or len(value) > 16 or int(value) > most:
        raise InvalidInputError(f"{name} must be a whole number from 0 to {most}, not {value[:80]!r}")
    return int(value)


async def json_of(request: web.Request) -> Any:
    body = await request.read()
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the body is not JSON: {error}") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def route_request(document: Any) -> RouteQuestion:
    if not isinstance(document, dict):
        raise InvalidInputError('a request for a route is a JSON object such as {"model": "smollm2", "excluded": []}')
    if unknown := set(document) - {"model", "excluded", "fingerprint", "protocol_min", "protocol_max", "demand"}:
        raise InvalidInputError(f"unknown fields in the request for a route: {', '.join(sorted(unknown))[:200]}")
    excluded = items(document, "excluded", most=MAX_EXCLUDED) if "excluded" in document else []
    return RouteQuestion(
        text(document, "model"),
        frozenset(check_id(node_id, "an excluded node's id") for node_id in excluded),
        text(document, "fingerprint") if "fingerprint" in document else None,
        _protocols(document),
        Demand.from_wire(document["demand"]) if "demand" in document else None,
    )


def _protocols(document: dict[str, Any]) -> range:
    """Versions of the wire protocol that whoever asks speaks; the tracker itself speaks none of them with nodes."""
    lowest = whole(document, "protocol_min") if "protocol_min" in document else PROTOCOLS[0]
    highest = (
        whole(document, "protocol_max", least=lowest) if "protocol_max" in document else max(lowest, PROTOCOLS[-1])
    )
    if highest - lowest >= MAX_PROTOCOLS:
        raise InvalidInputError(
            f"protocol_min {lowest} and protocol_max {highest} are more than {MAX_PROTOCOLS} versions"
        )
    return range(lowest, highest + 1)
