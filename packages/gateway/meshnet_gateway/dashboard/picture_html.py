"""The picture of the mesh as HTML. Pure; all that comes from nodes is escaped. Colours are the style sheet's.

What the bars show is written beside them, so that they can be hidden from screen readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from meshnet_core.layer_range import LayerRange
from meshnet_gateway.dashboard.mesh_picture import LiveRoute, MachineRow, MachineState, ModelPicture
from meshnet_gateway.dashboard.totals import NodeFigures

MOST_ROUTES = 8  # live ones that are written out
_TICKS = 6
_SAID = {
    MachineState.ANSWERS: "",
    MachineState.DRAINING: "about to leave",
    MachineState.SILENT: "does not answer",
    MachineState.GONE: "gone",
}


def picture_html(picture: ModelPicture) -> str:
    """One model: its layer axis, its machines, what is amiss, and what runs."""
    return (
        f'<section class="mn-model" aria-label="{escape(picture.name, quote=True)}">'
        f"<h3>{escape(picture.name)}</h3>{_standing(picture)}"
        f'<ul class="mn-rows" aria-label="machines and their layers">'
        f"{_axis(picture.num_layers)}{''.join(_row(row, picture) for row in picture.rows)}{_coverage(picture)}</ul>"
        f"{_live(picture.live)}</section>"
    )


def node_table_html(figures: Sequence[NodeFigures]) -> str:
    """Sessions and cache bytes of each node."""
    if not figures:
        return '<p class="mn-quiet">No node is here.</p>'
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Node", "Sessions", "Queued", "Cache"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(map(_figures, figures))}</tbody></table>"


def reasons_html(counts: dict[str, int], none: str) -> str:
    """Counts by reason, as a list."""
    if not counts:
        return f'<p class="mn-quiet">{escape(none)}</p>'
    items = (f"<li><span>{_words(reason)}</span><b>{count}</b></li>" for reason, count in counts.items())
    return f'<ul class="mn-reasons">{"".join(items)}</ul>'


def trackers_html(trackers: Sequence[Mapping[str, Any]]) -> str:
    """Each tracker, and how it stands with it."""
    if not trackers:
        return '<p class="mn-quiet">None is known.</p>'
    return f'<ul class="mn-reasons">{"".join(map(_tracker, trackers))}</ul>'


def size(count: float) -> str:
    """Bytes in a unit that people read."""
    for unit, per in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= per:
            return f"{count / per:.1f} {unit}"
    return f"{count:.0f} B"


def _standing(picture: ModelPicture) -> str:
    layers = f"{picture.num_layers} layers"
    if picture.gaps:
        return f'<p class="mn-bad" role="status">Gap: layers {_ranges(picture.gaps)} of {layers} are on no machine.</p>'
    speed = picture.expected_tokens_per_s
    expected = f", about {speed} tokens/s expected" if speed is not None else ""
    twice = f"; {_ranges(picture.overlaps)} on more than one machine" if picture.overlaps else ""
    return f'<p class="mn-good" role="status">Whole: {layers}{expected}{twice}.</p>'


def _axis(num_layers: int) -> str:
    step = max(1, round(num_layers / _TICKS))
    ticks = "".join(
        f'<span style="left:{_percent(at + 0.5, num_layers)}">{at}</span>' for at in range(0, num_layers, step)
    )
    return f'<li class="mn-row mn-axis" aria-hidden="true"><div>layer</div><div class="mn-track">{ticks}</div></li>'


def _row(row: MachineRow, picture: ModelPicture) -> str:
    held = ", ".join(str(bar.layers) for bar in row.bars)
    said = "".join(f' <em class="mn-{row.state}">{text}</em>' for text in [_SAID[row.state]] if text)
    waiting = " (not loaded yet)" if not all(bar.loaded for bar in row.bars) else ""
    dtypes = ", ".join(sorted({bar.dtype for bar in row.bars}))
    bars = "".join(_block("bar", bar.layers, picture.num_layers) for bar in row.bars)
    lit = "".join(_block("lit", layers, picture.num_layers) for layers in row.lit)
    working = '<span class="mn-sr"> at work now</span>' if row.lit else ""
    return (
        f'<li class="mn-row mn-is-{row.state}"><div><b>{escape(row.name)}</b>{said}'
        f"<small>layers {held}{waiting} · {escape(row.device)}, {escape(dtypes)}</small>{working}</div>"
        f'<div class="mn-track" aria-hidden="true">{bars}{lit}</div></li>'
    )


def _coverage(picture: ModelPicture) -> str:
    """The last row: where layers lack, and where they are held more than once."""
    marks = [("gap", gap) for gap in picture.gaps] + [("overlap", twice) for twice in picture.overlaps]
    if not marks:
        return ""
    said = "; ".join(
        f"{name} {_ranges(ranges)}" for name, ranges in (("gap", picture.gaps), ("overlap", picture.overlaps)) if ranges
    )
    blocks = "".join(_block(kind, layers, picture.num_layers) for kind, layers in marks)
    return (
        f'<li class="mn-row mn-cover"><div><b>all together</b><small>{said}</small></div>'
        f'<div class="mn-track" aria-hidden="true">{blocks}</div></li>'
    )


def _block(kind: str, layers: LayerRange, num_layers: int) -> str:
    left, width = _percent(layers.start, num_layers), _percent(len(layers), num_layers)
    return f'<span class="mn-{kind}" style="left:{left};width:{width}"></span>'


def _live(live: Sequence[LiveRoute]) -> str:
    if not live:
        return '<p class="mn-quiet">No answer is being written.</p>'
    more = f"<li>and {len(live) - MOST_ROUTES} more</li>" if len(live) > MOST_ROUTES else ""
    return (
        f'<ul class="mn-live" aria-label="answers being written">{"".join(map(_route, live[:MOST_ROUTES]))}{more}</ul>'
    )


def _route(route: LiveRoute) -> str:
    hops = " → ".join(escape(hop) for hop in route.hops) or "waiting for room"
    if not route.tokens:
        how = f"reads a prompt of {route.prompt_tokens} tokens"
    else:
        speed = f", {route.tokens_per_s:.1f} tokens/s" if route.tokens_per_s is not None else ""
        how = f"{route.tokens} {'token' if route.tokens == 1 else 'tokens'}{speed}"
    return f'<li><span class="mn-dot" aria-hidden="true"></span><b>{hops}</b> <small>{how}</small></li>'


def _figures(node: NodeFigures) -> str:
    said = _SAID[node.state]
    name = escape(node.name) + (f' <em class="mn-{node.state}">{said}</em>' if said else "")
    held = size(node.state_bytes) + (f" of {size(node.budget_bytes)}" if node.budget_bytes else "")
    share = 0.0 if node.share is None else node.share
    meter = f'<span class="mn-meter" aria-hidden="true"><span style="width:{100 * share:.1f}%"></span></span>'
    return f'<tr><th scope="row">{name}</th><td>{node.sessions}</td><td>{node.queued}</td><td>{held}{meter}</td></tr>'


def _tracker(tracker: Mapping[str, Any]) -> str:
    alone = tracker.get("registry") == "unreachable"
    good = tracker["answers"] and not alone
    said = "without its registry" if alone else "answers" if good else "does not answer"
    return f'<li><span>{escape(tracker["url"])}</span><span class="mn-{"good" if good else "bad"}">{said}</span></li>'


def _words(reason: str) -> str:
    return escape(reason.replace("_", " "))


def _ranges(ranges: Iterable[LayerRange]) -> str:
    return ", ".join(map(str, ranges))


def _percent(layers: float, num_layers: int) -> str:
    return f"{100 * layers / num_layers:.3f}%"
