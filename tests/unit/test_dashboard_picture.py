"""What the dashboard makes of a status: picture, memory of the gone, speeds, totals, and their HTML."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet_core.layer_range import LayerRange
from meshnet_gateway.dashboard.known_machines import KEPT_S, MOST, KnownMachines
from meshnet_gateway.dashboard.mesh_picture import MachineState, ModelPicture, depths, pictures
from meshnet_gateway.dashboard.picture_html import (
    node_table_html,
    picture_html,
    reasons_html,
    size,
    trackers_html,
)
from meshnet_gateway.dashboard.rate_history import RateHistory
from meshnet_gateway.dashboard.totals import by_reason, node_figures

LAYERS = 30


def node(name: str, layers: str, **more: Any) -> dict[str, Any]:
    shard = {"model": "tiny", "layers": layers, "dtype": "float32", "loaded": True, "decode_ms": None}
    return {
        "node": name, "url": "http://x", "device": "cpu", "version": "1", "layers": [shard],
        "draining": False, "answers": True, "sessions": 0, "state_bytes": 0, **more,
    }  # fmt: skip


def model(name: str = "tiny", ms: float | None = 10.0) -> dict[str, Any]:
    return {"name": name, "num_layers": LAYERS, "complete": True, "missing_layers": [], "expected_ms_per_token": ms}


def running(*hops: tuple[str, str], tokens: int = 7) -> dict[str, Any]:
    return {
        "session": "s-1", "model": "tiny", "mode": "cached", "prompt_tokens": 12, "completion_tokens": tokens,
        "route": [{"node": name, "layers": layers} for name, layers in hops], "tokens_per_s": 12.34, "recoveries": 0,
    }  # fmt: skip


def picture(*nodes: dict[str, Any], live: tuple[dict[str, Any], ...] = ()) -> ModelPicture:
    (found,) = pictures([model()], nodes, live)
    return found


def shown(*ranges: LayerRange) -> list[str]:
    return [str(layers) for layers in ranges]


# -- the picture ------------------------------------------------------------------------------------------------------


def test_machines_are_in_the_order_of_their_layers() -> None:
    found = picture(node("b", "15-29"), node("a", "0-14"))
    assert [row.name for row in found.rows] == ["a", "b"]
    assert not found.gaps
    assert not found.overlaps
    assert found.expected_tokens_per_s == 100.0


@pytest.mark.parametrize(
    ("held", "gaps", "overlaps"),
    [
        (["0-17", "14-29"], [], ["14-17"]),
        (["0-9", "20-29"], ["10-19"], []),
        (["5-9", "5-9", "8-12"], ["0-4", "13-29"], ["5-9"]),
        (["0-29", "0-29"], [], ["0-29"]),
    ],
)
def test_gaps_and_overlaps(held: list[str], gaps: list[str], overlaps: list[str]) -> None:
    found = picture(*(node(f"n{index}", layers) for index, layers in enumerate(held)))
    assert shown(*found.gaps) == gaps
    assert shown(*found.overlaps) == overlaps


@pytest.mark.parametrize(
    ("more", "state"),
    [({"answers": False}, MachineState.SILENT), ({"gone": True}, MachineState.GONE)],
)
def test_who_does_not_answer_leaves_a_gap_at_once(more: dict[str, Any], state: MachineState) -> None:
    live = (running(("a", "0-14"), ("b", "15-29")),)
    found = picture(node("a", "0-14"), node("b", "15-29", **more), live=live)
    assert shown(*found.gaps) == ["15-29"]
    assert not found.rows[1].lit
    assert found.rows[1].state is state
    assert found.expected_tokens_per_s is None


def test_who_is_about_to_leave_still_holds_its_layers() -> None:
    found = picture(node("a", "0-29", draining=True))
    assert not found.gaps
    assert found.rows[0].state is MachineState.DRAINING


def test_the_route_of_a_live_generation_lights_the_layers_it_uses() -> None:
    found = picture(node("a", "0-17"), node("b", "14-29"), live=(running(("a", "0-17"), ("b", "18-29")),))
    assert shown(*found.rows[0].lit) == ["0-17"]
    assert shown(*found.rows[1].lit) == ["18-29"]
    assert found.live[0].hops == ("a", "b")


def test_generations_of_another_model_light_nothing() -> None:
    other = {**running(("a", "0-29")), "model": "other"}
    found = picture(node("a", "0-29"), live=(other,))
    assert not found.rows[0].lit
    assert not found.live


ranges = st.tuples(st.integers(0, LAYERS - 1), st.integers(1, LAYERS)).filter(lambda cut: cut[0] < cut[1])


@given(st.lists(ranges.map(lambda cut: LayerRange(*cut)), max_size=6))
def test_stretches_tell_of_every_layer_how_many_hold_it(held: list[LayerRange]) -> None:
    found = depths(held, LAYERS)
    assert [at for layers, _ in found for at in range(layers.start, layers.stop)] == list(range(LAYERS))
    for layers, least in found:
        holders = [sum(at in one for one in held) for at in range(layers.start, layers.stop)]
        assert min(holders) == least
        assert len({min(count, 2) for count in holders}) == 1
    kinds = [min(least, 2) for _, least in found]
    assert all(a != b for a, b in pairwise(kinds))


# -- the gone ---------------------------------------------------------------------------------------------------------


def status(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {"models": [model()] if nodes else [], "nodes": list(nodes)}


def test_a_machine_that_is_gone_is_shown_for_a_while() -> None:
    known = KnownMachines()
    known.saw(status(node("a", "0-14"), node("b", "15-29")), 0.0)
    known.saw(status(node("a", "0-14")), 10.0)
    assert [(one["node"], one.get("gone", False)) for one in known.nodes] == [("a", False), ("b", True)]
    known.saw(status(node("a", "0-14")), KEPT_S + 1)
    assert [one["node"] for one in known.nodes] == ["a"]


def test_a_machine_that_comes_back_is_there() -> None:
    known = KnownMachines()
    for at, nodes in enumerate([(node("a", "0-29"),), (), (node("a", "0-9"),)]):
        known.saw(status(*nodes), float(at))
    assert [(one["node"], one.get("gone", False)) for one in known.nodes] == [("a", False)]


def test_a_model_is_remembered_as_long_as_one_that_held_it() -> None:
    known = KnownMachines()
    known.saw(status(node("a", "0-29")), 0.0)
    known.saw(status(), 1.0)
    known.saw(status(), 2.0)
    (found,) = pictures(known.models, known.nodes, ())
    assert shown(*found.gaps) == ["0-29"]
    known.saw(status(), KEPT_S + 1)
    assert known.models == []


def test_the_memory_is_bounded() -> None:
    known = KnownMachines()
    for at in range(3 * MOST):
        known.saw(status(node(f"n{at}", "0-29")), float(at))
    assert len(known.nodes) == MOST + 1


# -- figures ----------------------------------------------------------------------------------------------------------


def test_rates_come_from_a_count_that_grows() -> None:
    history = RateHistory()
    for at, total in ((0.0, 0), (1.0, 10), (3.0, 50)):
        history.add(at, total)
    assert history.points(3.0) == [(-2.0, 10.0), (0.0, 20.0)]
    assert history.newest == 15.0


def test_a_count_that_falls_begins_anew() -> None:
    history = RateHistory()
    history.add(0.0, 100)
    history.add(1.0, 5)
    assert history.points(1.0) == [(0.0, 5.0)]


def test_rates_are_bounded() -> None:
    history = RateHistory(samples=3)
    for at in range(10):
        history.add(float(at), at)
    assert [at for at, _ in history.points(9.0)] == [-2.0, -1.0, 0.0]


def test_counts_by_reason_are_summed_over_nodes() -> None:
    nodes = [
        node("a", "0-1", dropped={"ttl": 1, "lru": 0, "released": 9}),
        node("b", "2-3", dropped={"ttl": 2, "bytes": 7}),
    ]
    assert list(by_reason(nodes, "dropped").items()) == [("bytes", 7), ("ttl", 3)]
    assert by_reason(nodes, "misses") == {}


def test_figures_are_of_those_who_are_not_gone() -> None:
    nodes = [node("a", "0-1", state_bytes=50, budget_bytes=200, sessions=2), node("b", "2-3", gone=True)]
    (found,) = node_figures(nodes)
    assert (found.name, found.sessions, found.share) == ("a", 2, 0.25)


# -- HTML -------------------------------------------------------------------------------------------------------------


def test_names_are_escaped_everywhere() -> None:
    evil = "<img src=x onerror=alert(1)>"
    live = {**running((evil, "0-9")), "model": evil}
    shard = {"model": evil, "layers": "0-9", "dtype": evil, "loaded": True}
    (found,) = pictures([model(evil)], [{**node(evil, "0-9"), "layers": [shard], "device": evil}], [live])
    written = [
        picture_html(found),
        node_table_html(node_figures([node(evil, "0-9")])),
        reasons_html({evil: 1}, "none"),
        trackers_html([{"url": evil, "answers": True}]),
    ]
    for html in written:
        assert "&lt;img" in html
        assert "<img" not in html


def test_the_picture_says_in_words_what_its_bars_show() -> None:
    html = picture_html(picture(node("a", "0-17"), node("b", "14-20"), live=(running(("a", "0-17")),)))
    assert "Gap: layers 21-29 of 30 layers are on no machine." in html
    assert "overlap 14-17" in html
    assert "at work now" in html
    assert "7 tokens, 12.3 tokens/s" in html


def test_sizes() -> None:
    assert [size(count) for count in (0, 2048, 5 * 2**20, 3 * 2**30)] == ["0 B", "2.0 KiB", "5.0 MiB", "3.0 GiB"]
