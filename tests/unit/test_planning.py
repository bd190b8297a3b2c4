"""Which nodes a plan takes, and what it says when there is none."""

from __future__ import annotations

import random

import pytest

from announcements import node, shard, snapshot
from meshnet_core.demand import Demand
from meshnet_core.errors import LayersUnavailableError, ModelNotFoundError
from meshnet_core.layer_range import LayerRange
from meshnet_core.membership import Snapshot
from meshnet_core.planning import plan_route, served_models


def chosen(snap: Snapshot, **options: object) -> str:
    return str(plan_route(snap, "m", **options))  # type: ignore[arg-type]


def refusal(snap: Snapshot, **options: object) -> str:
    with pytest.raises(LayersUnavailableError) as caught:
        plan_route(snap, "m", **options)  # type: ignore[arg-type]
    return caught.value.message


def test_two_halves_make_a_route() -> None:
    route = plan_route(snapshot(node("a", "0-14"), node("b", shard("15-29", dtype="bfloat16"), version="0.2.0")), "m")
    assert str(route) == "a[0-14] -> b[15-29]"
    assert (route.model, route.fingerprint, route.num_layers) == ("m", "f1", 30)
    assert [hop.url for hop in route.hops] == ["http://a:7410", "http://b:7410"]
    assert [hop.dtype for hop in route.hops] == ["float32", "bfloat16"]
    assert [hop.version for hop in route.hops] == ["0.1.0", "0.2.0"]


def test_overlapping_ranges_meet_at_an_effective_start() -> None:
    assert chosen(snapshot(node("a", "0-19"), node("b", "10-29"))) == "a[0-19] -> b[20-29]"


def test_a_hop_runs_to_the_end_of_its_shard_even_where_a_faster_node_could_take_over() -> None:
    slow = node("a", shard("0-19", decode_ms=9.0))
    assert chosen(snapshot(slow, node("b", "10-29"))) == "a[0-19] -> b[20-29]"


def test_only_the_layers_from_the_effective_start_are_paid_for() -> None:
    entered_inside, exact = node("b", "10-29"), node("c", shard("20-29", decode_ms=1.5))
    assert chosen(snapshot(node("a", "0-19"), entered_inside, exact)) == "a[0-19] -> b[20-29]"


def test_one_node_may_serve_two_hops_through_two_shards() -> None:
    assert chosen(snapshot(node("a", "0-9", "20-29"), node("b", "10-19"))) == "a[0-9] -> b[10-19] -> a[20-29]"


def test_a_shard_may_be_entered_inside_another_one_of_the_same_node() -> None:
    assert chosen(snapshot(node("a", "0-19", "10-29"))) == "a[0-19] -> a[20-29]"


def test_the_faster_of_two_covers_is_taken() -> None:
    snap = snapshot(node("a", shard("0-29", decode_ms=2.0)), node("b", shard("0-29", decode_ms=1.9)))
    assert chosen(snap) == "b[0-29]"


def test_a_hop_more_is_worth_it_only_where_it_saves_more_than_it_costs() -> None:
    whole = node("z", shard("0-29", decode_ms=1.0))
    small_gain = [node("a", "0-14"), node("b", shard("15-29", decode_ms=0.98))]  # saves 0.3 ms of 30
    assert chosen(snapshot(whole, *small_gain)) == "z[0-29]"
    large_gain = [node("a", "0-14"), node("b", shard("15-29", decode_ms=0.5))]
    assert chosen(snapshot(whole, *large_gain)) == "a[0-14] -> b[15-29]"


def test_who_holds_what_a_prompt_begins_with_is_preferred_for_what_it_saves() -> None:
    snap = snapshot(node("a", "0-29"), node("b", shard("0-29", decode_ms=1.05)))
    asked = {"prompt": 2000, "answer": 100}
    assert chosen(snap, demand=Demand(**asked)) == "a[0-29]"
    assert chosen(snap, demand=Demand(**asked, held={"b": 1900})) == "b[0-29]"
    assert chosen(snap, demand=Demand(**asked, held={"b": 10})) == "a[0-29]"


@pytest.mark.parametrize("load", [{"queued": 1}, {"sessions": 1}])
def test_load_sends_newcomers_to_the_idle_one_of_two_equals(load: dict[str, int]) -> None:
    assert chosen(snapshot(node("a", "0-29", **load), node("b", "0-29"))) == "b[0-29]"


def test_a_fast_node_keeps_its_traffic_until_its_queue_makes_it_the_slower_one() -> None:
    def pick(sessions: int) -> str:
        fast = node("a", shard("0-29", decode_ms=1.0), sessions=sessions)
        return chosen(snapshot(fast, node("b", shard("0-29", decode_ms=2.6))))

    assert [pick(sessions) for sessions in range(5)] == ["a[0-29]"] * 4 + ["b[0-29]"]


def test_equal_costs_go_to_fewer_hops_and_then_to_the_lower_ids_whatever_the_order() -> None:
    nodes = [node("c", "0-29"), node("b", "0-29"), node("d", "0-14"), node("a", "15-29")]
    for seed in range(5):
        random.Random(seed).shuffle(nodes)
        assert chosen(Snapshot(tuple(nodes))) == "b[0-29]"


def test_equal_costs_over_different_boundaries_go_to_the_lower_ids_too() -> None:
    early, late = [node("c", "0-9"), node("d", "10-29")], [node("a", "0-19"), node("b", "20-29")]
    assert chosen(snapshot(*early, *late)) == "a[0-19] -> b[20-29]"
    assert chosen(snapshot(node("a", "0-9"), node("d", "10-29"), node("c", "0-19"), late[1])) == "a[0-9] -> d[10-29]"


def test_a_shard_not_measured_yet_costs_what_its_device_and_dtype_let_expect() -> None:
    def unmeasured(device: str, dtype: str, rival_ms: float = 0.4) -> Snapshot:
        new = node("new", shard("0-29", dtype=dtype, decode_ms=None), device=device)
        return snapshot(node("old", shard("0-29", decode_ms=rival_ms)), new)

    assert chosen(unmeasured("cpu", "bfloat16")) == "old[0-29]"
    assert chosen(unmeasured("cpu", "bfloat16", rival_ms=0.7)) == "new[0-29]"
    assert chosen(unmeasured("cpu", "float32", rival_ms=0.7)) == "old[0-29]"
    assert chosen(unmeasured("mps", "bfloat16")) == "new[0-29]"
    assert chosen(unmeasured("cuda", "float32")) == "new[0-29]"
    assert chosen(unmeasured("tpu", "bfloat16")) == "old[0-29]"  # an unknown device is taken for a CPU


def test_a_shard_that_must_be_loaded_first_is_taken_where_the_loaded_one_is_far_slower_or_missing() -> None:
    unloaded = node("a", shard("0-29", loaded=False))
    assert chosen(snapshot(unloaded)) == "a[0-29]"
    assert chosen(snapshot(unloaded, node("b", shard("0-29", decode_ms=2.0)))) == "b[0-29]"
    assert chosen(snapshot(unloaded, node("b", shard("0-29", decode_ms=3.0)))) == "a[0-29]"


def test_a_draining_or_excluded_node_is_left_out() -> None:
    spare = node("z", shard("0-29", decode_ms=50.0))
    assert chosen(snapshot(node("a", "0-29", draining=True), spare)) == "z[0-29]"
    assert chosen(snapshot(node("a", "0-29"), spare), excluded=frozenset({"a"})) == "z[0-29]"


def test_different_fingerprints_never_share_a_route() -> None:
    snap = snapshot(node("a", "0-14"), node("b", shard("15-29", fingerprint="f2")))
    assert refusal(snap) == (
        "layers 15-29 of m are served by no node that can be used: b holds 15-29 but of fingerprint f2, "
        "30 layers of width 8, not fingerprint f1, 30 layers of width 8"
    )


def test_a_running_answer_stays_with_its_fingerprint() -> None:
    old, new = node("a", shard("0-29", decode_ms=9.0)), node("b", shard("0-29", fingerprint="f2"))
    assert chosen(snapshot(old, new)) == "b[0-29]"
    assert chosen(snapshot(old, new), fingerprint="f1") == "a[0-29]"
    assert refusal(snapshot(new), fingerprint="f1") == "no node serves m with fingerprint f1; it is served with f2"


def test_shards_that_tell_different_shapes_of_one_model_never_share_a_route() -> None:
    odd = node("b", shard("15-29", num_layers=31), shard("30", num_layers=31))
    assert "b holds 15-29 but of fingerprint f1, 31 layers" in refusal(snapshot(node("a", "0-14"), odd))


def test_the_nodes_of_a_route_have_one_wire_protocol_in_common() -> None:
    old, both, new = (
        node("old", "0-14", protocol_min=1, protocol_max=1),
        node("two", "15-29", protocol_min=1, protocol_max=2),
        node("new", shard("0-14", decode_ms=0.1), protocol_min=2, protocol_max=2),
    )
    assert chosen(snapshot(old, both, new), protocols=range(1, 2)) == "old[0-14] -> two[15-29]"
    assert chosen(snapshot(old, both, new), protocols=range(1, 3)) == "new[0-14] -> two[15-29]"
    lone = node("two", "15-29", protocol_min=2, protocol_max=2)
    message = refusal(snapshot(old, lone), protocols=range(1, 3))
    assert (
        message
        == "layers 0-14 of m are served by no node that can be used: old holds 0-14 but speaks wire protocol 1-1, not 2"
    )


def test_a_gap_is_named_as_people_count_layers() -> None:
    assert refusal(snapshot(node("a", "0-14"))) == "layers 15-29 of m are served by no node"
    assert refusal(snapshot(node("a", "0-4", "6-28"))) == (
        "layer 5 of m is served by no node; layer 29 of m is served by no node"
    )


def test_a_shard_inside_another_one_opens_no_gap() -> None:
    assert refusal(snapshot(node("a", "0-19", "5-9"))) == "layers 20-29 of m are served by no node"


def test_who_holds_missing_layers_in_vain_is_named_with_the_reason() -> None:
    snap = snapshot(node("a", "0-14"), node("b", "15-29", draining=True), node("c", "20-29"))
    assert refusal(snap, excluded=frozenset({"c"})) == (
        "layers 15-29 of m are served by no node that can be used: b holds 15-29 but is draining, "
        "c holds 20-29 but is excluded"
    )


def test_a_message_about_a_large_mesh_stays_short() -> None:
    drained = [node(f"n{index}", "0-29", draining=True) for index in range(500)]
    assert refusal(Snapshot(tuple(drained))).endswith("and 492 more")
    sieve = node("a", *(str(layer) for layer in range(0, 30, 2)))
    assert refusal(snapshot(sieve)).endswith("; and 7 more gaps")


def test_an_unknown_model_is_refused_with_the_names_there_are() -> None:
    snap = snapshot(node("a", "0-29", shard("0-29", model="other")))
    with pytest.raises(ModelNotFoundError, match=r"^no node serves 'x'; the mesh serves m, other$"):
        plan_route(snap, "x")
    with pytest.raises(ModelNotFoundError, match="no node has registered any model yet"):
        plan_route(snapshot(), "x")


def test_served_models_tell_what_is_whole_and_what_is_missing() -> None:
    whole, part, stale = served_models(
        snapshot(
            node("a", "0-14", shard("0-9", model="n", num_layers=24)),
            node("b", shard("15-29", dtype="bfloat16", max_positions=1024), shard("12-23", model="n", num_layers=24)),
            node("c", shard("0-29", model="o"), draining=True),
        )
    )
    assert (whole.name, whole.complete, whole.missing) == ("m", True, ())
    assert (whole.max_positions, whole.dtypes, whole.hidden_size) == (1024, ("bfloat16", "float32"), 8)
    assert (part.name, part.complete, part.missing) == ("n", False, (LayerRange(10, 12),))
    assert (stale.name, stale.complete, stale.missing) == ("o", False, (LayerRange(0, 30),))


@pytest.mark.long
def test_a_route_of_very_many_hops_is_planned() -> None:
    layers = 5000
    nodes = [node(f"n{at:04}", shard(str(at), num_layers=layers)) for at in range(layers)]
    assert len(plan_route(Snapshot(tuple(nodes)), "m").hops) == layers
