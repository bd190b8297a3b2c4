"""What happened in one answer, in lines for people, of what the gateway reported and what each node says. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LABEL_WIDTH = 16


def describe(report: dict[str, Any], finish_reason: str | None, nodes: Sequence[dict[str, Any]]) -> list[str]:
    """Lines for an answer.

    Args:
        report: the gateway's ``meshnet`` object of the answer.
        finish_reason: ``"stop"`` or ``"length"``.
        nodes: the ``nodes`` of the gateway's status, asked after the answer.
    """
    seen = [(node, found) for node in nodes if (found := session_on(node, str(report.get("session")))) is not None]
    names = [str(node["node"]) for node, _ in seen]
    how = "ended by the model" if finish_reason == "stop" else "cut at the limit of tokens"
    lines = [
        "What happened",
        _line("answer", f"{report.get('completion_tokens')} tokens, {how}"),
        _line("first token", f"after {report.get('ttft_s')} s, of a prompt of {report.get('prompt_tokens')} tokens"),
        _line("speed", _speed(report)),
        _line("bytes per step", _bytes(report)),
        _line("session", f"{report.get('session')}, one id, seen by {' and '.join(names) or 'no node'}"),
    ]
    return lines + [_line(str(node["node"]), _on_node(node, found)) for node, found in seen]


def session_on(node: dict[str, Any], session: str) -> dict[str, Any] | None:
    """What a node tells of a session, running or lately ended; None if it knows nothing of it."""
    told = [*node.get("running", ()), *node.get("recent", ())]
    return next((entry for entry in told if entry.get("session") == session), None)


def _line(label: str, text: str) -> str:
    return f"  {label:<{LABEL_WIDTH}}{text}"


def _speed(report: dict[str, Any]) -> str:
    if "tokens_per_s" not in report:
        return "one token alone has none"
    first, last = report.get("tokens_per_s_first_50"), report.get("tokens_per_s_last_50")
    if first is None or last is None:
        return f"{report['tokens_per_s']:.1f} tokens/s"
    return f"{first:.1f} tokens/s over the first 50, {last:.1f} over the last 50 ({report['tokens_per_s']:.1f} in all)"


def _bytes(report: dict[str, Any]) -> str:
    route = report.get("route", [])
    counts = report.get("bytes_per_step", [])
    if len(counts) != len(route):
        return "not told"
    parts = [f"{count:,} into {hop['node']}" for count, hop in zip(counts, route, strict=True)]
    return ", ".join(parts) + " (a token id, then hidden states)"


def _on_node(node: dict[str, Any], session: dict[str, Any]) -> str:
    frames = ", ".join(f"{count} {kind}" for kind, count in session.get("frames", {}).items())
    held = "; ".join(f"layers {shard['layers']} in {shard['dtype']}" for shard in node.get("layers", ()))
    return (
        f"holds {held}; ran layers {session['layers']} for {session['positions']} positions "
        f"({frames} frames), state {session['state_bytes']:,} bytes"
    )
