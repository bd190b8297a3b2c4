"""Trackers of one mesh on two machines, with certificates, over one redis-server: as real processes on loopback."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from announcements import node
from meshnet_core.mesh_folder import MeshFolder
from meshnet_core.tracker_client import TrackerClient
from meshnet_process import run, running, wait_until
from redis_server import needs_redis, redis_server

pytestmark = [pytest.mark.long, needs_redis]


async def announced(url: str, home: str, name: str) -> None:
    """A node that the machine at ``home`` announces once."""
    client = TrackerClient(url, tls=MeshFolder(Path(home) / "mesh").credentials().client_context())
    try:
        await client.heartbeat(node(name, "0-29", url="https://10.0.0.7:7410", started=1, beat=1))
    finally:
        await client.close()


def test_two_machines_keep_one_list_and_let_machines_in_where_the_mesh_was_made(tmp_path: Path) -> None:
    kitchen, study, attic, other = (str(tmp_path / name) for name in ("kitchen", "study", "attic", "other"))
    assert run("mesh", "create", MESHNET_HOME=kitchen).returncode == 0
    assert run("mesh", "create", MESHNET_HOME=other).returncode == 0

    def nodes(home: str, *options: str) -> list[str]:
        told = run("nodes", "--json", *options, MESHNET_HOME=home)
        assert told.returncode == 0, told.stderr
        return [one["node"] for one in json.loads(told.stdout)]

    with redis_server(tmp_path) as redis:
        options = ("tracker", "--port", "0", "--registry", redis.url)
        with running(tmp_path / "one.log", *options, MESHNET_HOME=kitchen) as one:
            first = one.ready()
            ticket = run("mesh", "ticket", "--tracker", first, MESHNET_HOME=kitchen).stdout.strip()
            assert run("join", ticket, MESHNET_HOME=study).returncode == 0
            with (
                running(tmp_path / "two.log", *options, MESHNET_HOME=study) as two,
                running(tmp_path / "other.log", *options, MESHNET_HOME=other) as stranger,
            ):
                second, elsewhere = two.ready(), stranger.ready()
                wait_until(lambda: "is shared through" in one.output() and f"with {first}" in two.output(), 60)
                asyncio.run(announced(first, kitchen, "stove"))
                wait_until(lambda: nodes(study, "--tracker", second) == ["stove"], 60)
                assert nodes(other, "--tracker", elsewhere) == []  # another mesh in the same Redis
                assert "node stove joined" in run("events", "--tracker", second, MESHNET_HOME=study).stdout

                # The key of the authority is in the kitchen alone.
                alone = run("mesh", "ticket", "--tracker", second, MESHNET_HOME=kitchen).stdout.strip()
                assert "lets nobody in" in run("join", alone, MESHNET_HOME=attic).stderr
                both = run("mesh", "ticket", "--tracker", second, "--tracker", first, MESHNET_HOME=kitchen)
                joined = run("join", both.stdout.strip(), MESHNET_HOME=attic)
                assert joined.stdout.startswith(f"joined through {first}"), joined.stderr

                assert one.stop() == 0
                asyncio.run(announced(second, attic, "lamp"))
                assert sorted(nodes(attic)) == ["lamp", "stove"]  # the tracker that is left is known there
                wait_until(lambda: "lamp joined" in two.output())
                for tracker in (two, stranger):
                    assert tracker.stop() == 0
