"""Reads from a PromQL expression which metrics and labels it asks for; enough for dashboards, no evaluator.

The grammar of tokens is Prometheus' (https://prometheus.io/docs/prometheus/latest/querying/basics/); what is not
understood is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

AGGREGATIONS = {"sum", "max", "min", "avg", "count", "topk", "bottomk"}
FUNCTIONS = {"rate", "increase", "histogram_quantile", "clamp_min", "absent", "time"}
OPERATORS = {"and", "or", "unless", "bool", "offset"}
GROUPINGS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_TOKEN = re.compile(
    r"""\s*(?:(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<number>\d+(?:\.\d+)?)|(?P<string>"(?:[^"\\]|\\.)*")
    |(?P<range>\[\d+[smhdwy]\])|(?P<op>==|!=|=~|!~|>=|<=|[-+*/%^=<>(){},]))""",
    re.VERBOSE,
)


class PromQlError(ValueError):
    """The expression is none, or uses what this reader does not know."""


@dataclass
class Asked:
    """``metrics`` with the labels matched in braces, ``grouped`` the labels that are named in groupings."""

    metrics: list[tuple[str, set[str]]] = field(default_factory=list)
    grouped: set[str] = field(default_factory=set)
    aggregated: bool = False


def read(query: str) -> Asked:
    """What ``query`` asks for.

    Raises:
        PromQlError: brackets do not match, or a word stands where none may.
    """
    tokens, asked, at, depth = _tokens(query), Asked(), 0, 0
    while at < len(tokens):
        kind, text = tokens[at]
        at += 1
        if kind == "name":
            at = _word(tokens, at, text, asked)
        elif text in {"{", "}"}:
            raise PromQlError("braces belong behind a metric")
        depth += {"(": 1, ")": -1}.get(text, 0)
        if depth < 0:
            raise PromQlError("a bracket too many")
    if depth:
        raise PromQlError("a bracket is missing")
    return asked


def _word(tokens: list[tuple[str, str]], at: int, text: str, asked: Asked) -> int:
    """Take in a word that is followed by the token ``at``; where to go on."""
    following = tokens[at][1] if at < len(tokens) else ""
    if text in GROUPINGS:
        if following == "(":
            labels, at = _listed(tokens, at)
            asked.grouped |= labels
        elif not text.startswith("group_"):
            raise PromQlError(f"{text} wants labels in brackets")
    elif text in AGGREGATIONS | FUNCTIONS:
        asked.aggregated |= text in AGGREGATIONS
        if following != "(" and not (text in AGGREGATIONS and following in {"by", "without"}):
            raise PromQlError(f"{text} wants an expression in brackets")
    elif text not in OPERATORS:
        matched: set[str] = set()
        if following == "{":
            matched, at = _matchers(tokens, at)
        asked.metrics.append((text, matched))
    return at


def _tokens(query: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while query[at:].strip():
        match = _TOKEN.match(query, at)
        if match is None:
            raise PromQlError(f"not understood: {query[at:]!r}")
        found.append((str(match.lastgroup), match[str(match.lastgroup)]))
        at = match.end()
    return found


def _listed(tokens: list[tuple[str, str]], at: int) -> tuple[set[str], int]:
    """The names of ``(a, b)``, which begins at ``at``, and where it is over."""
    labels: set[str] = set()
    for index in range(at + 1, len(tokens)):
        kind, text = tokens[index]
        if text == ")":
            return labels, index + 1
        if kind == "name":
            labels.add(text)
        elif text != ",":
            break
    raise PromQlError("labels want a list in brackets")


def _matchers(tokens: list[tuple[str, str]], at: int) -> tuple[set[str], int]:
    """The labels of ``{a="b", c!~"d"}``, which begins at ``at``, and where it is over."""
    labels, at = set[str](), at + 1
    while at + 2 < len(tokens):
        (kind, label), (_, operator), (value, _) = tokens[at : at + 3]
        if kind != "name" or operator not in {"=", "!=", "=~", "!~"} or value != "string":
            break
        labels.add(label)
        at += 3
        if at < len(tokens) and tokens[at][1] == "}":
            return labels, at + 1
        if at >= len(tokens) or tokens[at][1] != ",":
            break
        at += 1
    raise PromQlError('matchers are like {label="value"}')
