"""Several trackers of one mesh with certificates: whose a node is holds at all of them, machines find the others
through the first, and nodes that leave their layers to the tracker ask over TLS."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from announcements import node as announcement
from memory_registry import MemoryRegistry, MemoryStore
from mesh_identities import machine_of, new_mesh
from meshnet_cli import find_trackers
from meshnet_cli.auto_layers import ASK_S, AutoLayers
from meshnet_cli.node import Place
from meshnet_cli.node_shards import WeightsWanted
from meshnet_cli.trust import Identity
from meshnet_core.clock import ManualClock, SystemClock
from meshnet_core.errors import ForbiddenError, TrackerUnreachableError
from meshnet_core.mesh_folder import MeshFolder
from meshnet_core.secure_site import SecureSite
from meshnet_core.tracker_client import TrackerClient
from meshnet_core.trackers import Trackers
from meshnet_tracker.directory import Directory
from meshnet_tracker.placement_desk import PlacementDesk
from meshnet_tracker.server import create_app, new_doorkeeper
from meshnet_tracker.sharing import Sharing, TrackerInfo
from tiny_models import save_tiny
from web_on_socket import serving


class SecureTracker:
    """One tracker over TLS, until it is stopped."""

    def __init__(self, name: str, mesh: MeshFolder, store: MemoryStore) -> None:
        self._name = name
        self._mesh = mesh
        self._store = store
        self.url = ""
        self.stop = AsyncExitStack().aclose

    async def start(self) -> None:
        clock, doorkeeper, credentials = SystemClock(), new_doorkeeper(), self._mesh.credentials()
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setblocking(False)
        self.url = f"https://127.0.0.1:{sock.getsockname()[1]}"
        directory = Directory(clock)
        info = TrackerInfo(f"t-{self._name}", self.url, "0.1.0")
        sharing = Sharing(directory, MemoryRegistry(self._store), info, clock)
        runner = web.AppRunner(create_app(directory, doorkeeper, sharing=sharing), shutdown_timeout=0.1)
        self.stop = runner.cleanup
        await runner.setup()
        await SecureSite(runner, sock, credentials.server_context(optional_client=True), doorkeeper).start()


@asynccontextmanager
async def client_of(url: str, folder: MeshFolder) -> AsyncIterator[TrackerClient]:
    client = TrackerClient(url, tls=folder.credentials().client_context())
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
def mesh(tmp_path: Path) -> MeshFolder:
    return new_mesh(tmp_path / "mesh")


@pytest.fixture
async def two(mesh: MeshFolder) -> AsyncIterator[list[SecureTracker]]:
    """Two that share what they know, and know of each other."""
    store = MemoryStore(SystemClock())
    made = [SecureTracker(name, mesh, store) for name in ("one", "two")]
    for tracker in made:
        await tracker.start()
    async with asyncio.timeout(30):
        for tracker in made:
            async with client_of(tracker.url, mesh) as client:
                while not client.told.others:
                    await client.snapshot()
    yield made
    for tracker in made:
        await tracker.stop()


async def known(client: TrackerClient, *ids: str) -> None:
    async with asyncio.timeout(30):
        while [node.node_id for node in (await client.snapshot()).nodes] != list(ids):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_whose_a_node_is_holds_at_every_tracker(
    two: list[SecureTracker], mesh: MeshFolder, tmp_path: Path
) -> None:
    owner, rival = machine_of(mesh, tmp_path / "a"), machine_of(mesh, tmp_path / "b")
    info = announcement("a", "0-29", url="https://10.0.0.7:7410", beat=1, started=1)
    other = announcement("a", "0-29", url="https://10.0.0.66:7410", boot="b-other", beat=1, started=2)
    async with client_of(two[0].url, owner) as at_one, client_of(two[1].url, rival) as at_two:
        await at_one.heartbeat(info)
        await known(at_two, "a")
        with pytest.raises(ForbiddenError, match="another machine"):
            await at_two.heartbeat(other)
        with pytest.raises(ForbiddenError):
            await at_two.leave("a", boot="b-a")
        assert (await at_one.snapshot()).nodes[0].url == info.url
    async with client_of(two[1].url, owner) as elsewhere:  # its own machine may, at whichever
        await elsewhere.leave("a", boot="b-a")
    async with client_of(two[0].url, rival) as at_one:
        await known(at_one)
        await at_one.heartbeat(other)
        await known(at_one, "a")


async def test_a_machine_that_starts_again_finds_the_tracker_that_is_left(
    two: list[SecureTracker], mesh: MeshFolder, tmp_path: Path
) -> None:
    folder = machine_of(mesh, tmp_path / "a")
    identity = Identity(folder, folder.credentials())
    found = await find_trackers.trackers_for([two[0].url], identity, insecure=False)
    assert found == [two[0].url, two[1].url]
    assert folder.trackers() == (two[0].url, two[1].url)
    await two[0].stop()
    assert (await find_trackers.trackers_for([], identity, insecure=False))[0] == two[1].url
    with pytest.raises(TrackerUnreachableError):
        await find_trackers.trackers_for([two[0].url], identity, insecure=False)


async def test_a_node_that_leaves_its_layers_to_the_tracker_is_told_them_over_tls_and_by_the_one_that_is_left(
    two: list[SecureTracker], mesh: MeshFolder, tmp_path: Path
) -> None:
    folder = machine_of(mesh, tmp_path / "a")
    identity = Identity(folder, folder.credentials())
    model = save_tiny("llama", tmp_path / "tiny")
    auto = AutoLayers(str(model), None, WeightsWanted("float32", "auto"), "cpu", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        urls = (two[0].url, two[1].url)
        place = Place("auto", "127.0.0.1", sock, "https://127.0.0.1:1", urls, None, identity)
        await two[0].stop()
        async with asyncio.timeout(120):
            pool = await auto.load(place)
    (offer,) = pool
    assert offer.layers == auto.placeable().target
    trackers = Trackers(urls, tls=identity.credentials.client_context())
    assert [node.node_id for node in (await trackers.snapshot()).nodes] == ["auto"]
    await trackers.close()


async def test_a_node_that_waits_for_layers_outlives_its_tracker(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "tiny")
    clock = ManualClock()
    directory = Directory(SystemClock())
    waiting = PlacementDesk(clock, directory.snapshot)  # never a moment passes, so that nobody is told anything
    auto = AutoLayers(str(model), None, WeightsWanted("float32", "auto"), "cpu", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        async with asyncio.timeout(120):
            async with serving(create_app(directory, desk=waiting)) as url:
                place = Place("auto", "127.0.0.1", sock, "http://127.0.0.1:1", (url,), None)
                loading = asyncio.create_task(auto.load(place))
                while not directory.snapshot().nodes:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.sleep(2 * ASK_S)
            assert not loading.done()
            async with serving(create_app(Directory(SystemClock())), int(url.rpartition(":")[2])):
                pool = await loading
    assert len(list(pool)) == 1
