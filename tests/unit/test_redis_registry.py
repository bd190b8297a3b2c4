"""The registry in a real redis-server: what is kept and for how long, what is told, and what its ends look like."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from announcements import node
from meshnet_core.clock import SystemClock
from meshnet_core.errors import InvalidInputError, RegistryUnreachableError
from meshnet_tracker.directory import Directory
from meshnet_tracker.redis_registry import BATCH, RedisRegistry
from meshnet_tracker.registry import Entry, RegistryAddress
from meshnet_tracker.sharing import Sharing, TrackerInfo
from redis_server import RedisServer, needs_redis, redis_server

PATIENCE_S = 30


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


@pytest.fixture
async def registry(server: RedisServer) -> AsyncIterator[RedisRegistry]:
    made = RedisRegistry(RegistryAddress.parse(server.url), "m")
    yield made
    await made.close()
    await made.close()


@needs_redis
async def test_what_is_put_is_there_for_its_time(registry: RedisRegistry) -> None:
    await registry.put([Entry("a", "ä\n1", 60.0), Entry("b", "2", 0.001)])
    async with asyncio.timeout(PATIENCE_S):
        while await registry.keys() != ["a"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (found,) = await registry.fetch(["a", "b", "c"])
    assert (found.key, found.text) == ("a", "ä\n1")
    assert 59 < found.left_s <= 60
    assert await registry.fetch([]) == []


@needs_redis
async def test_many_entries_go_in_batches(registry: RedisRegistry) -> None:
    count = 3 * BATCH + 1
    await registry.put([Entry(f"k{at:05}", str(at), 60.0) for at in range(count)])
    keys = await registry.keys()
    assert len(keys) == count
    assert [entry.text for entry in await registry.fetch(keys)] == [str(at) for at in range(count)]


@needs_redis
async def test_changes_are_told_from_the_moment_of_following(registry: RedisRegistry) -> None:
    await registry.put([Entry("before", "x", 60.0)])
    async with registry.changes() as changes:
        await registry.put([Entry("a", "1", 60.0), Entry("b", "2", 60.0)])
        async with asyncio.timeout(PATIENCE_S):
            assert [await anext(changes), await anext(changes)] == ["a", "b"]


@needs_redis
async def test_meshes_and_databases_do_not_see_each_other(server: RedisServer, registry: RedisRegistry) -> None:
    other = RedisRegistry(RegistryAddress.parse(server.url), "m2")
    database = RedisRegistry(RegistryAddress.parse(server.url.replace("/0", "/1")), "m")
    await registry.put([Entry("a", "1", 60.0)])
    for strange in (other, database):
        assert await strange.keys() == []
        assert await strange.fetch(["a"]) == []
        await strange.close()


@needs_redis
async def test_what_strangers_left_there_is_no_entry(server: RedisServer, registry: RedisRegistry) -> None:
    redis = Redis(port=server.port)
    await redis.set("meshnet:1:m:for-ever", "x")
    await redis.set("meshnet:1:m:bytes", b"\xff\xfe", ex=60)
    await redis.aclose()
    (unreadable,) = await registry.fetch(["bytes", "for-ever"])
    assert unreadable.text == "\ufffd\ufffd"


@needs_redis
async def test_a_redis_that_is_gone_is_told_with_its_address_and_is_used_again_when_it_is_back(
    server: RedisServer, registry: RedisRegistry
) -> None:
    await registry.put([Entry("a", "1", 60.0)])
    async with registry.changes() as changes:
        server.kill()
        for call in (registry.put([Entry("a", "1", 60.0)]), registry.fetch(["a"]), registry.keys(), anext(changes)):
            with pytest.raises(RegistryUnreachableError, match=f"redis://127.0.0.1:{server.port}/0 does not answer"):
                await call  # type: ignore[misc]
    server.start()
    await registry.put([Entry("b", "2", 60.0)])
    assert await registry.keys() == ["b"]


@needs_redis
async def test_a_redis_that_hangs_is_given_up(server: RedisServer) -> None:
    impatient = RedisRegistry(RegistryAddress.parse(server.url), "m", timeout_s=0.2)
    await impatient.put([Entry("a", "1", 60.0)])
    server.hang()
    with pytest.raises(RegistryUnreachableError, match="does not answer"):
        await impatient.put([Entry("a", "1", 60.0)])
    server.go_on()
    await impatient.put([Entry("a", "2", 60.0)])
    await impatient.close()


@asynccontextmanager
async def tracker(server: RedisServer, name: str) -> AsyncIterator[tuple[Directory, Sharing]]:
    clock = SystemClock()
    directory = Directory(clock)
    registry = RedisRegistry(RegistryAddress.parse(server.url), "m")
    sharing = Sharing(directory, registry, TrackerInfo(f"t-{name}", f"http://{name}:7400", "0.1.0"), clock)
    task = asyncio.create_task(sharing.run())
    try:
        yield directory, sharing
    finally:
        task.cancel()
        await asyncio.wait([task])
        await registry.close()


async def until(directory: Directory, ids: list[str]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while [entry.node_id for entry in directory.snapshot().nodes] != ids:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@needs_redis
async def test_two_trackers_share_through_it_and_outlive_it(server: RedisServer) -> None:
    async with tracker(server, "one") as (one, sharing), tracker(server, "two") as (two, _):
        one.announce(node("a", "0-14", beat=1))
        two.announce(node("b", "15-29", beat=1))
        for directory in (one, two):
            await until(directory, ["a", "b"])
        server.kill()
        one.announce(node("c", beat=1))
        async with asyncio.timeout(PATIENCE_S):
            while sharing.reachable:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert str(two.plan("m")) == "a[0-14] -> b[15-29]"
        server.start()
        await until(two, ["a", "b", "c"])
        async with tracker(server, "three") as (three, _):
            await until(three, ["a", "b", "c"])
            one.leave("a", "b-a")
            for directory in (one, two, three):
                await until(directory, ["b", "c"])


@needs_redis
async def test_what_is_kept_is_json_under_the_names_of_its_mesh(server: RedisServer) -> None:
    async with tracker(server, "one") as (one, sharing):
        async with asyncio.timeout(PATIENCE_S):
            while not sharing.reachable:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        one.announce(node("a", beat=1))
        redis = Redis(port=server.port, decode_responses=True)
        async with asyncio.timeout(PATIENCE_S):
            while (kept := await redis.get("meshnet:1:m:node/t-one/a")) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert json.loads(kept)["node"] == node("a", beat=1).to_wire()
        assert 0 < await redis.pttl("meshnet:1:m:node/t-one/a") <= 15_000
        assert {str(key).partition("/")[0] for key in await redis.keys()} == {"meshnet:1:m:node", "meshnet:1:m:tracker"}
        await redis.aclose()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://10.0.0.5:6379/0", "redis://10.0.0.5:6379/0"),
        ("redis://host", "redis://host:6379/0"),
        ("rediss://user:p%40ss@host:7000/3", "rediss://host:7000/3"),
        ("redis://[::1]/2", "redis://[::1]:6379/2"),
    ],
)
def test_an_address_is_read_and_shown_without_its_secrets(url: str, shown: str) -> None:
    assert str(RegistryAddress.parse(url)) == shown


def test_the_parts_of_an_address_are_told_apart() -> None:
    address = RegistryAddress.parse("rediss://user:p%40ss@host:7000/3")
    assert address == RegistryAddress("host", 7000, 3, "user", "p@ss", tls=True)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("memcached://host", "is not supported; give a Redis"),
        ("http://user:secret@host", "is not supported; give a Redis"),
        ("10.0.0.5:6379", "is not supported; give a Redis"),
        ("", "is not supported; give a Redis"),
        ("unix:///run/redis.sock", "is not supported"),
        ("redis://", "cannot be read; write redis://HOST:PORT/DATABASE"),
        ("redis://host:port", "cannot be read"),
        ("redis://host:99999", "cannot be read"),
        ("redis://host/mesh", "cannot be read"),
        ("redis://user:secret@host/0?socket_timeout=9", "cannot be read"),
        ("redis://host/0#x", "cannot be read"),
    ],
)
def test_an_address_that_is_none_is_refused_without_telling_its_secrets(url: str, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why) as caught:
        RegistryAddress.parse(url)
    assert "secret" not in caught.value.message
