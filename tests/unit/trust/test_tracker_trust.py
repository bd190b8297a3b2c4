"""Whom a tracker answers in a mesh: its machines, each for its own nodes, and not too often. Over real sockets."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest

from announcements import node as announcement
from mesh_identities import believing_all, machine_of, secured, without_certificate
from meshnet_core.clock import ManualClock, SystemClock
from meshnet_core.credentials import Credentials
from meshnet_core.doorkeeper import Doorkeeper
from meshnet_core.errors import (
    ForbiddenError,
    InvalidInputError,
    RateLimitedError,
    TrackerUnreachableError,
    UnauthorizedError,
    UnknownNodeError,
)
from meshnet_core.mesh_folder import MeshFolder
from meshnet_core.tracker_client import TrackerClient
from meshnet_tracker.directory import Directory
from meshnet_tracker.server import create_app


@dataclass
class Tracker:
    doorkeeper: Doorkeeper
    url: str


@pytest.fixture
async def tracker(mesh: MeshFolder) -> AsyncIterator[Tracker]:
    doorkeeper = Doorkeeper(SystemClock(), per_s=1000, burst=1000)
    app = create_app(Directory(SystemClock()), doorkeeper)
    async with secured(app, mesh.credentials(), doorkeeper, optional_client=True) as port:
        yield Tracker(doorkeeper, f"https://127.0.0.1:{port}")


@contextlib.asynccontextmanager
async def client_of(tracker: Tracker, tls: ssl.SSLContext) -> AsyncIterator[TrackerClient]:
    client = TrackerClient(tracker.url, tls=tls)
    try:
        yield client
    finally:
        await client.close()


async def test_a_tracker_answers_machines_of_its_mesh_alone(
    tracker: Tracker, mesh: MeshFolder, machine: Credentials, stranger: Credentials, tmp_path: Path
) -> None:
    info = announcement("a", "0-29", url="https://10.0.0.7:7410")
    async with client_of(tracker, machine.client_context()) as client:
        await client.heartbeat(info)
        assert [node.node_id for node in (await client.snapshot()).nodes] == ["a"]
    async with client_of(tracker, without_certificate(mesh)) as client:
        for call in (client.snapshot(), client.heartbeat(info), client.leave("a"), client.route("m")):
            with pytest.raises(UnauthorizedError, match="meshnet join TICKET"):
                await call
    ended = machine_of(mesh, tmp_path, ended=timedelta(hours=2)).credentials()
    for tls in (believing_all(stranger), ended.client_context()):
        async with client_of(tracker, tls) as client:
            with pytest.raises(TrackerUnreachableError):
                await client.snapshot()
    async with client_of(tracker, machine.client_context()) as client:
        assert [node.node_id for node in (await client.snapshot()).nodes] == ["a"]
    counts = tracker.doorkeeper.turned_away
    assert counts["no_certificate"] == 4
    assert counts["other_mesh"] >= 1
    assert counts["expired"] >= 1


async def test_a_node_belongs_to_the_machine_that_registered_it(
    tracker: Tracker, mesh: MeshFolder, machine: Credentials, tmp_path: Path
) -> None:
    info = announcement("a", "0-29", url="https://10.0.0.7:7410")
    taken_over = announcement("a", "0-29", url="https://10.0.0.66:7410", boot="b-other")
    other = machine_of(mesh, tmp_path).credentials()
    async with (
        client_of(tracker, machine.client_context()) as client,
        client_of(tracker, other.client_context()) as rival,
    ):
        await client.heartbeat(info)
        with pytest.raises(ForbiddenError, match="another machine"):
            await rival.heartbeat(taken_over)
        with pytest.raises(ForbiddenError):
            await rival.leave("a")
        assert [node.url for node in (await client.snapshot()).nodes] == [info.url]
        await client.leave("a")
        await rival.heartbeat(taken_over)
        with pytest.raises(UnknownNodeError):
            await client.leave("never-there")
    assert tracker.doorkeeper.turned_away["not_its_own"] == 2


async def test_a_node_at_a_plain_address_is_not_registered(tracker: Tracker, machine: Credentials) -> None:
    async with client_of(tracker, machine.client_context()) as client:
        with pytest.raises(InvalidInputError, match="https:// addresses"):
            await client.heartbeat(announcement("a", "0-29", url="http://10.0.0.7:7410"))


async def test_one_machine_may_not_ask_too_much_of_a_tracker(mesh: MeshFolder, machine: Credentials) -> None:
    clock = ManualClock()
    doorkeeper = Doorkeeper(clock, per_s=0.1, burst=2)
    app = create_app(Directory(SystemClock()), doorkeeper)
    async with secured(app, mesh.credentials(), doorkeeper, optional_client=True) as port:
        tracker = Tracker(doorkeeper, f"https://127.0.0.1:{port}")
        async with (
            client_of(tracker, machine.client_context()) as client,
            client_of(tracker, mesh.credentials().client_context()) as other,
        ):
            await client.snapshot()
            await client.snapshot()
            with pytest.raises(RateLimitedError) as caught:
                await client.snapshot()
            assert caught.value.retry_after_s == pytest.approx(10)
            await other.snapshot()
            clock.advance(10)
            await client.snapshot()
        connector = aiohttp.TCPConnector(ssl=machine.client_context())
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get(f"{tracker.url}/healthz") as response,
        ):
            assert (response.status, response.headers["Retry-After"]) == (429, "10")
    assert doorkeeper.turned_away["rate"] == 2


@pytest.mark.parametrize("url", ["http://10.0.0.5:7400", "https://10.0.0.5:7400"])
def test_an_address_that_does_not_fit_the_identity_is_told(url: str, machine: Credentials) -> None:
    tls = machine.client_context() if url.startswith("http:") else None
    with pytest.raises(InvalidInputError, match=r"--insecure|meshnet join TICKET"):
        TrackerClient(url, tls=tls)
