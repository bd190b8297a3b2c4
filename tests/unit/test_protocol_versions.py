"""A mesh of two versions of the wire protocol: routes only where they agree, and an upgrade that loses no answer.

Real shards behind real sockets, each part with the versions that it is given; the numbers alone differ.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from announcements import node
from in_process_mesh import MODEL, random_prompt, reference_greedy, reference_model
from meshnet_core.clock import ManualClock
from meshnet_core.errors import LayersUnavailableError, ProtocolMismatchError
from meshnet_core.http_transport import HttpTransport
from meshnet_core.route import Route
from meshnet_core.tracker_client import TrackerClient
from meshnet_tracker.directory import Directory
from meshnet_tracker.server import create_app
from socket_fleet import SocketFleet, fleet_client, socket_fleet
from web_on_socket import serving

OLD, BOTH, NEW = range(1, 2), range(1, 3), range(2, 3)
PROMPT, COUNT = random_prompt(17), 40


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    return reference_greedy(reference_model(llama), PROMPT, COUNT)


@pytest.fixture
async def fleet(llama: Path) -> AsyncIterator[SocketFleet]:
    async with serving(create_app(Directory(ManualClock()))) as url, socket_fleet(llama, url) as running:
        yield running


async def test_an_answer_is_spoken_in_the_version_that_all_of_its_route_agree_on(
    fleet: SocketFleet, expected: list[int]
) -> None:
    for name, layers, protocols in (("old", "0-1", OLD), ("new", "0-1", NEW), ("both", "2-3", BOTH)):
        await fleet.start(name, layers, protocols=protocols)
    head = {1: "old", 2: "new"}
    for protocols in (OLD, BOTH, NEW):
        async with fleet_client(fleet.tracker_url, protocols=protocols) as client:
            route = await client.mesh.route(await client.mesh.model(MODEL), frozenset())
            assert route.protocol in protocols
            assert [hop.node_id for hop in route.hops] == [head[route.protocol], "both"]
            ids, _ = await client.answer(PROMPT, COUNT)
            assert ids == expected
            assert all(len(running.service.store) == 0 for running in fleet.nodes.values())  # the release agreed too


async def test_where_they_do_not_agree_there_is_no_route_and_the_error_says_why(fleet: SocketFleet) -> None:
    await fleet.start("old", "0-1", protocols=OLD)
    await fleet.start("new", "2-3", protocols=NEW)
    async with fleet_client(fleet.tracker_url, protocols=BOTH) as client:
        (model,) = await client.mesh.models()
        assert not model.complete
        with pytest.raises(LayersUnavailableError, match="speaks wire protocol"):
            await client.mesh.route(model, frozenset())


async def test_while_no_tracker_answers_the_gateways_own_plan_agrees_too(fleet: SocketFleet) -> None:
    for name, layers, protocols in (("old", "0-3", OLD), ("new", "0-3", NEW)):
        await fleet.start(name, layers, protocols=protocols)
    for protocols, chosen in ((OLD, "old"), (NEW, "new")):
        async with fleet_client(fleet.tracker_url, protocols=protocols) as client:
            model = await client.mesh.model(MODEL)
            client.mesh._tracker_answers = False
            route = await client.mesh.route(model, frozenset())
            assert [hop.node_id for hop in route.hops] == [chosen]
            assert route.protocol == protocols[0]


async def test_a_node_refuses_a_version_that_it_does_not_speak(fleet: SocketFleet) -> None:
    await fleet.start("old", "0-3", protocols=OLD)
    url = f"http://127.0.0.1:{fleet.ports['old']}"
    strange = HttpTransport(protocols=range(3, 5))
    with pytest.raises(ProtocolMismatchError, match="is 3; this node speaks 1"):
        await strange.probe(url, None)
    newer = HttpTransport(protocols=range(1, 5))
    assert (await newer.probe(url, None)).queued == 0  # asked in 4, 3, 2, and then in 1
    assert await newer.release(url, "s-1") == 0
    await strange.close()
    await newer.close()


async def test_a_rolling_upgrade_loses_no_answer(fleet: SocketFleet, expected: list[int]) -> None:
    """First every node learns the new version, then every node forgets the old one, while one answer is written."""
    for name, layers in (("a", "0-1"), ("b", "2-3"), ("c", "2-3")):
        await fleet.start(name, layers, protocols=OLD)
    upgrades = iter([("a", BOTH), ("b", BOTH), ("c", BOTH), ("b", NEW), ("a", NEW), ("c", NEW)])

    async def upgrade(made: int) -> None:
        if made % 6 == 3 and (step := next(upgrades, None)):
            name, protocols = step
            await fleet.stop(name)
            await fleet.start(name, protocols=protocols)

    async with fleet_client(fleet.tracker_url, protocols=BOTH) as client:
        ids, report = await client.answer(PROMPT, COUNT, upgrade)
        assert next(upgrades, None) is None
        assert ids == expected
        assert report["epochs"] > 1
        route = await client.mesh.route(await client.mesh.model(MODEL), frozenset())
        assert route.protocol == 2
        assert (await client.answer(PROMPT, COUNT))[0] == expected


async def test_a_tracker_plans_for_versions_that_it_does_not_speak_itself() -> None:
    directory = Directory(ManualClock())
    directory.announce(node("a", "0-29", protocol_min=7, protocol_max=8))
    async with serving(create_app(directory)) as url:
        client = TrackerClient(url, protocols=range(6, 9))
        route = await client.route("m")
        assert route.protocol == 8
        assert Route.from_wire(route.to_wire()) == route
        await client.close()
