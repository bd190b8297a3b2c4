"""Why a route is what it is, as a document and as people read it."""

from __future__ import annotations

import asyncio
import json

import pytest

from announcements import node, shard, snapshot
from meshnet_cli.route import _show
from meshnet_core.clock import ManualClock
from meshnet_core.demand import Demand
from meshnet_core.errors import LayersUnavailableError
from meshnet_core.estimate import Evidence
from meshnet_core.link_info import LinkInfo
from meshnet_core.membership import Snapshot
from meshnet_core.planning import plan_route
from meshnet_core.route_explanation import explain_route
from meshnet_process import run
from meshnet_tracker.directory import Directory
from meshnet_tracker.server import create_app
from web_on_socket import serving

MESH = snapshot(
    node(
        "front",
        shard("0-14", decode_evidence=Evidence(0.04, 300, 2.0)),
        links=(LinkInfo("back", 2.0, Evidence(0.25, 9)),),
    ),
    node("back", "10-29", sessions=2),
    node("spare", shard("15-29", decode_ms=None), max_sessions=2, sessions=2),
    node("gone", "0-29", draining=True),
    node("old", shard("0-29", fingerprint="f2", decode_ms=50.0)),
)


def test_the_terms_of_all_hops_add_up_to_the_routes_price() -> None:
    told = explain_route(MESH, "m")
    assert told.route == str(plan_route(MESH, "m")) == "front[0-14] -> back[15-29]"
    assert sum(hop.total_ms for hop in told.hops) == pytest.approx(told.ms_per_token)
    front, back = told.hops
    assert (front.link_from, front.link_measured) == ("gateway", False)
    assert (back.link_from, back.link_measured, back.link_sd) == ("front", True, 0.5)
    assert back.link_ms == pytest.approx(2.0, rel=0.01)
    assert (back.layers, back.held, back.queue_ms) == ("15-29", "10-29", 20.0)
    assert front.speed.sd == pytest.approx(0.2)
    assert (front.speed.samples, front.speed.age_s) == (300, 2.0)


def test_candidates_runners_up_and_who_was_left_out_are_told_with_reasons() -> None:
    told = explain_route(MESH, "m")
    assert {one.node: one.chosen for one in told.candidates} == {"front": True, "back": True, "spare": False}
    (spare,) = [one for one in told.candidates if one.node == "spare"]
    assert (spare.room_ms, spare.speed.samples) == (50.0, 0)
    assert [(one.without, one.route) for one in told.runners_up] == [
        ("back", "front[0-14] -> spare[15-29]"),
        ("front", "old[0-29]"),
    ]
    assert [one.ms_per_token > told.ms_per_token for one in told.runners_up] == [True, True]
    assert {one.node: one.why for one in told.left_out} == {
        "gone": "is draining",
        "old": "is of fingerprint f2, 30 layers of width 8",
    }


def test_what_is_asked_for_changes_the_price_and_what_is_left_out_the_route() -> None:
    short, long = (explain_route(MESH, "m", demand=Demand(prompt, 100)) for prompt in (0, 3000))
    assert long.ms_per_token > 2 * short.ms_per_token
    without = explain_route(MESH, "m", frozenset({"back"}))
    assert without.route == "front[0-14] -> spare[15-29]"
    assert ("back", "is excluded") in [(one.node, one.why) for one in without.left_out]


def test_where_there_is_no_route_the_gaps_are_told_as_ever() -> None:
    with pytest.raises(LayersUnavailableError, match="layers 15-29 of m are served by no node"):
        explain_route(Snapshot(MESH.nodes[:1]), "m")


def test_the_document_is_json_and_its_times_are_rounded() -> None:
    document = json.loads(json.dumps(explain_route(MESH, "m").to_json()))
    assert document["hops"][1]["total_ms"] == pytest.approx(sum(document["hops"][1][key] for key in TERMS), abs=0.01)
    assert max(len(str(document["hops"][0][key]).partition(".")[2]) for key in TERMS) <= 3


TERMS = ("layers_ms", "link_ms", "queue_ms", "room_ms", "load_ms")


def test_people_read_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    _show(explain_route(MESH, "m"))
    shown = capsys.readouterr().out
    for words in (
        "front[0-14] -> back[15-29]",
        "1.000 ±0.200 of 300, 2 s ago",
        "from gateway, not measured",
        "15-29 of 10-29",
        "without back: front[0-14] -> spare[15-29]",
        "left out: gone with layers 0-29: it is draining",
    ):
        assert words in shown


def test_a_node_that_nobody_covers_for_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    _show(explain_route(snapshot(node("a", "0-29")), "m"))
    assert "no other route" in capsys.readouterr().out


async def test_the_command_asks_a_tracker_and_sends_the_nodes_nothing() -> None:
    directory = Directory(ManualClock())
    for one in MESH.nodes:
        directory.announce(one)
    async with serving(create_app(directory)) as url:
        plain, document, refused = await asyncio.gather(
            *(
                asyncio.to_thread(run, "route", "m", "--tracker", url, *options)
                for options in ([], ["--explain", "--json", "--without", "back"], ["--answer", "0"])
            )
        )
        unknown = await asyncio.to_thread(run, "route", "x", "--tracker", url)
    assert (plain.returncode, plain.stdout) == (0, "front[0-14] -> back[15-29]\n")
    told = json.loads(document.stdout)
    assert told["route"] == "front[0-14] -> spare[15-29]"
    assert {one["node"] for one in told["left_out"]} == {"back", "gone", "old"}
    assert refused.returncode == 2
    assert unknown.returncode != 0
    assert "no node serves 'x'; the mesh serves m" in unknown.stderr
