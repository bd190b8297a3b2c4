"""When a tracker tells which node to hold what: newcomers, promises, deaths, other contents."""

from __future__ import annotations

from dataclasses import replace

import pytest

from announcements import node, shard, snapshot
from meshnet_core.clock import ManualClock
from meshnet_core.errors import InvalidInputError, UnknownNodeError
from meshnet_core.layer_range import LayerRange
from meshnet_core.membership import NodeInfo
from meshnet_core.model_facts import ModelFacts
from meshnet_core.placeable import Placeable, Wish
from meshnet_core.tracker_client import TrackerClient
from meshnet_tracker import placement_desk
from meshnet_tracker.directory import Directory
from meshnet_tracker.mesh_machines import machines_of
from meshnet_tracker.placement_desk import MOVES_EVERY_S, PROMISE_S, SETTLE_S, PlacementDesk
from meshnet_tracker.server import create_app
from web_on_socket import serving

LAYER = 100_000_000  # elements
FACTS = ModelFacts("m", "f1", (LAYER,) * 30)


class Mesh:
    """A directory with a desk, and nodes that do what they are told at once."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.directory = Directory(self.clock, lease_s=1000.0)
        self.desk = PlacementDesk(self.clock, self.directory.snapshot)

    def announce(
        self, name: str, layers: int = 10, held: str = "", facts: ModelFacts = FACTS, *, loaded: bool = True
    ) -> NodeInfo:
        """A node with memory for so many layers in float32, which announces ``held`` as its target, and serves it."""
        target = LayerRange.parse(held) if held else None
        shards = (shard(held, fingerprint=facts.fingerprint, decode_ms=None),) if held and loaded else ()
        info = node(name, *shards, placement=Placeable(layers * 4 * LAYER, "float32", facts, target))
        self.directory.announce(info)
        return info

    def ask(self, name: str) -> Wish:
        return self.desk.ask(self.directory.require(name))

    def wish(self, name: str) -> str | None:
        layers = self.ask(name).layers
        return None if layers is None else str(layers)

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh()


def test_nodes_that_start_together_are_placed_together(mesh: Mesh) -> None:
    for name in "abc":
        mesh.announce(name)
        assert mesh.wish(name) is None
        mesh.wait(SETTLE_S / 2)
    mesh.wait(SETTLE_S)
    assert sorted(str(mesh.wish(name)) for name in "abc") == ["0-9", "10-19", "20-29"]


def test_a_stream_of_newcomers_does_not_keep_the_first_one_waiting_for_ever(mesh: Mesh) -> None:
    for number in range(20):
        mesh.announce(f"n{number}")
        mesh.wish(f"n{number}")
        mesh.wait(SETTLE_S / 2)
    assert mesh.wish("n0") is not None


def test_two_that_ask_one_after_the_other_never_get_the_same_gap(mesh: Mesh) -> None:
    mesh.announce("a", held="0-9")
    mesh.announce("b")
    mesh.announce("c")
    mesh.ask("b")
    mesh.wait(SETTLE_S)
    assert {mesh.wish("b"), mesh.wish("c")} == {"10-19", "20-29"}


def test_two_trackers_that_promise_one_gap_to_two_nodes_put_it_right_with_their_next_plan(mesh: Mesh) -> None:
    """Each has a newcomer of which the other has not heard yet."""
    other = Mesh()
    for tracker, newcomer in ((mesh, "b"), (other, "c")):
        tracker.announce("a", held="0-9")
        tracker.announce(newcomer)
        tracker.ask(newcomer)
        tracker.wait(SETTLE_S)
    assert mesh.wish("b") == other.wish("c") == "10-19"  # twice the same layers, and nobody for the last ten
    for tracker in (mesh, other):
        tracker.announce("b", held="10-19")
        tracker.announce("c", held="10-19")
    told = [sorted(str(tracker.wish(name)) for name in "bc") for tracker in (mesh, other)]
    assert told == [["10-19", "20-29"]] * 2
    assert mesh.wish("b") == other.wish("b")  # both move the same one, so that they are not in each other's way


def test_a_promise_that_is_not_taken_up_is_over_after_a_while(mesh: Mesh) -> None:
    mesh.announce("a", held="0-19", layers=20)
    mesh.announce("b")
    mesh.ask("b")
    mesh.wait(SETTLE_S)
    assert mesh.wish("b") == "20-29"
    mesh.directory.leave("b")
    mesh.announce("c")
    mesh.ask("c")
    mesh.wait(SETTLE_S)
    assert mesh.wish("c") == "20-29"


def test_a_death_is_made_up_for_at_the_next_heartbeat_of_one_with_room(mesh: Mesh) -> None:
    mesh.announce("a", held="0-9", layers=20)
    mesh.announce("b", held="10-19")
    mesh.announce("c", held="20-29")
    assert mesh.wish("a") == "0-9"
    mesh.directory.leave("b")
    assert (mesh.wish("c"), mesh.wish("a")) == ("20-29", "0-19")


def test_speed_alone_moves_nodes_now_and_then_only(mesh: Mesh) -> None:
    mesh.announce("a", held="0-29", layers=30)
    mesh.announce("b", layers=30)
    mesh.ask("b")
    mesh.wait(SETTLE_S)
    moved = {mesh.wish("a"), mesh.wish("b")}
    assert moved == {"0-14", "15-29"}
    mesh.announce("a", held=str(mesh.wish("a")), layers=30)
    mesh.announce("b", held=str(mesh.wish("b")), layers=30)
    mesh.announce("c", layers=30)
    mesh.ask("c")
    mesh.wait(SETTLE_S)
    assert mesh.wish("c") == "0-29"  # redundancy meanwhile
    assert {mesh.wish("a"), mesh.wish("b")} == moved
    mesh.announce("c", held="0-29", layers=30)
    mesh.wait(MOVES_EVERY_S)
    assert sorted(str(mesh.wish(name)) for name in "abc") == ["0-9", "10-19", "20-29"]


def test_first_measurements_move_nobody(mesh: Mesh) -> None:
    for name in "ab":
        mesh.announce(name, layers=30)
        mesh.ask(name)
    mesh.wait(SETTLE_S)
    held = {name: str(mesh.wish(name)) for name in "ab"}
    for name, ms in (("a", 1.0), ("b", 9.0)):
        place = Placeable(30 * 4 * LAYER, "float32", FACTS, LayerRange.parse(held[name]))
        mesh.directory.announce(node(name, shard(held[name], decode_ms=ms), placement=place))
    assert {name: mesh.wish(name) for name in "ab"} == held
    mesh.wait(MOVES_EVERY_S)
    assert {name: mesh.wish(name) for name in "ab"} != held


def test_a_guess_is_put_right_by_what_others_of_its_kind_take() -> None:
    measured = [node(name, shard("0-29", decode_ms=ms)) for name, ms in (("a", 40.0), ("b", 60.0), ("c", 50.0))]
    guessed = node("new", placement=Placeable(10**12, "float32", FACTS))
    other = node("gpu", device="cuda", placement=Placeable(10**12, "bfloat16", FACTS))
    found = {m.name: m.layer_ms for m in machines_of(snapshot(*measured, guessed, other), FACTS)}
    assert found["new"] == found["c"]  # the median, and not the 20 ms of such a device
    assert found["gpu"] < found["new"]
    alone = {m.name: m.layer_ms for m in machines_of(snapshot(guessed), FACTS)}
    assert alone["new"] == pytest.approx(20, rel=0.1)


def test_what_is_asked_again_is_answered_alike(mesh: Mesh) -> None:
    for name, held in (("a", "0-9"), ("b", "10-19"), ("c", "20-29")):
        mesh.announce(name, held=held)
    for _ in range(5):
        assert [mesh.wish(name) for name in "abc"] == ["0-9", "10-19", "20-29"]
        mesh.wait(MOVES_EVERY_S)


def test_a_node_keeps_what_it_held_until_the_others_serve_their_part(mesh: Mesh) -> None:
    both = node("a", "0-29", shard("0-14"), placement=Placeable(10**12, "float32", FACTS, LayerRange(0, 15)))
    mesh.directory.announce(both)
    mesh.announce("b", held="15-29", layers=30, loaded=False)
    assert not mesh.ask("a").may_release
    mesh.announce("b", held="15-29", layers=30)
    assert mesh.ask("a").may_release


def test_a_node_with_layers_of_its_own_choice_stays_and_gaps_around_it_are_filled(mesh: Mesh) -> None:
    mesh.directory.announce(node("fixed", "10-19"))
    mesh.announce("a")
    mesh.announce("b")
    mesh.ask("a")
    mesh.wait(SETTLE_S)
    assert {mesh.wish("a"), mesh.wish("b")} == {"0-9", "20-29"}
    with pytest.raises(InvalidInputError, match="was given its layers"):
        mesh.ask("fixed")


def test_a_machine_that_is_too_small_is_told_what_the_least_would_be(mesh: Mesh) -> None:
    mesh.announce("a", layers=0)
    mesh.ask("a")
    mesh.wait(SETTLE_S)
    with pytest.raises(
        InvalidInputError, match=r"no part of m fits: the smallest takes 381\.5 MiB in float32.*--memory"
    ):
        mesh.ask("a")


def test_other_contents_under_the_same_name_are_refused(mesh: Mesh) -> None:
    mesh.announce("a", held="0-9")
    mesh.announce("b", facts=replace(FACTS, fingerprint="f2"))
    with pytest.raises(InvalidInputError, match="serves m with fingerprint f1, and this node's files have f2"):
        mesh.ask("b")


def test_a_draining_node_counts_for_nothing(mesh: Mesh) -> None:
    mesh.announce("a", held="0-9", layers=30)
    going = mesh.announce("b", held="10-29", layers=20)
    mesh.directory.announce(replace(going, draining=True))
    assert mesh.wish("a") == "0-29"
    assert mesh.wish("b") == "10-29"


def test_a_tracker_that_restarted_plans_from_what_the_nodes_announce(mesh: Mesh) -> None:
    for name, held in (("a", "0-9"), ("b", "10-19"), ("c", "20-29")):
        mesh.announce(name, held=held, loaded=False)
    mesh.desk = PlacementDesk(mesh.clock, mesh.directory.snapshot)
    assert [mesh.wish(name) for name in "abc"] == ["0-9", "10-19", "20-29"]


def test_a_promise_outlives_a_heartbeat_and_a_plan_is_made_once_for_all(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = placement_desk.replan
    monkeypatch.setattr(placement_desk, "replan", lambda *a, **k: (made.append(1), real(*a, **k))[1])
    for name in "abc":
        mesh.announce(name)
        mesh.ask(name)
    mesh.wait(SETTLE_S)
    first = [mesh.wish(name) for name in "abc"]
    mesh.wait(PROMISE_S / 2)
    assert [mesh.wish(name) for name in "abc"] == first
    assert len(made) == 2  # newcomers, and then those who hold what they were told


def test_models_that_are_gone_are_forgotten(mesh: Mesh) -> None:
    for number in range(3):
        mesh.announce(f"n{number}", layers=30, facts=replace(FACTS, model=f"m{number}", fingerprint=f"f{number}"))
        mesh.ask(f"n{number}")
        mesh.wait(SETTLE_S)
        assert mesh.wish(f"n{number}") == "0-29"
        assert list(mesh.desk._last) == list(mesh.desk._told_at) == [f"f{number}"]
        mesh.directory.leave(f"n{number}")


def test_the_wire_form_of_a_placeable_node_and_of_a_wish() -> None:
    info = node("a", placement=Placeable(5, "bfloat16", FACTS, LayerRange(3, 9)))
    assert NodeInfo.from_wire(info.to_wire()) == info
    for wish in (Wish(None), Wish(LayerRange(0, 3), may_release=False)):
        assert Wish.from_wire(wish.to_wire()) == wish
    with pytest.raises(InvalidInputError, match="reach beyond"):
        Placeable(5, "bfloat16", FACTS, LayerRange(3, 31))


async def test_over_http_a_node_asks_for_its_layers_and_only_as_itself() -> None:
    mesh = Mesh()
    async with serving(create_app(mesh.directory, desk=mesh.desk)) as url:
        client = TrackerClient(url)
        try:
            with pytest.raises(UnknownNodeError):
                await client.wish("a", boot="b-a")
            info = mesh.announce("a", layers=30)
            await client.heartbeat(info)
            assert await client.wish("a", boot="b-a") == Wish(None)
            mesh.wait(SETTLE_S)
            assert await client.wish("a", boot="b-a") == Wish(LayerRange(0, 30))
            with pytest.raises(UnknownNodeError, match="not this start of it"):
                await client.wish("a", boot="b-other")
            await client.heartbeat(replace(info, node_id="fixed", placement=None))
            with pytest.raises(InvalidInputError, match="was given its layers"):
                await client.wish("fixed", boot="b-a")
            assert (await client.snapshot()).nodes[0].placement == info.placement
        finally:
            await client.close()
