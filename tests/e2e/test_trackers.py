"""Two trackers over one redis-server, as real processes, under answers that never cease: either tracker is killed,
Redis is, and all of them are. Answers go on and are the same, the status says what is degraded, and in the end all is
whole again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoTokenizer

from free_ports import free_port
from in_process_mesh import reference_greedy, reference_model
from meshnet_cli.chat_stream import Ended, Gateway, Text
from meshnet_cli.children import Child, Children
from process_mesh import START_TIMEOUT_S, fetch_json
from redis_server import RedisServer, needs_redis, redis_server
from tiny_models import save_tiny
from tiny_tokenizers import ascii_files

pytestmark = [pytest.mark.long, needs_redis, pytest.mark.timeout(900)]

PATIENCE_S = 90.0  # for what takes a few seconds where nothing else runs
NODES = {"head": "0-1", "tail-a": "2-3", "tail-b": "2-3"}
QUESTION = [{"role": "user", "content": "who is there?"}]
COUNT = 400  # tokens of one answer: some seconds
CHATS = 2  # that run at the same time, all the time


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, whose answers have no end of their own."""
    folder = save_tiny("llama", tmp_path_factory.mktemp("model") / "tiny")
    for name, content in ascii_files().items():
        if name != "config.json":
            (folder / name).write_bytes(content)
    made = reference_model(folder)
    with torch.no_grad():
        made.get_output_embeddings().weight[[0, 2]] = 0.0  # what would end an answer is never the likeliest
    made.save_pretrained(folder)
    return folder


@dataclass
class Parts:
    """The processes by name, each watched by itself."""

    folder: Path
    model: Path
    redis: RedisServer
    trackers: dict[str, int]  # with their ports
    running: dict[str, tuple[Children, Child]] = field(default_factory=dict)
    starts: int = 0

    def tracker_url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.trackers[name]}"

    @property
    def at_trackers(self) -> list[str]:
        return ["--tracker", ",".join(map(self.tracker_url, self.trackers)), "--insecure"]

    def start(self, name: str, arguments: list[str]) -> None:
        self.starts += 1
        folder = self.folder / f"{self.starts}-{name}"
        folder.mkdir()
        children = Children(folder)
        self.running[name] = (children, children.start(name, arguments))

    def start_tracker(self, name: str) -> None:
        port, registry = str(self.trackers[name]), self.redis.url
        self.start(name, ["tracker", "--port", port, "--registry", registry, "--insecure"])
        self.wait_ready(name)

    def start_node(self, name: str) -> None:
        options = ["--layers", NODES[name], "--name", name, "--port", "0", "--dtype", "float32", "--threads", "1"]
        self.start(name, ["node", str(self.model), *options, *self.at_trackers])

    def wait_ready(self, *names: str) -> str:
        for name in names:
            children, child = self.running[name]
            children.wait_ready(child, timeout_s=START_TIMEOUT_S)
        return str(self.running[names[-1]][1].url)

    def kill(self, name: str) -> None:
        """SIGKILL."""
        _, child = self.running[name]
        child.process.kill()
        child.process.wait()

    def stop(self) -> None:
        for children, child in self.running.values():
            child.process.kill()
            child.process.wait()
            children.stop()


@pytest.fixture
def parts(model: Path, tmp_path: Path) -> Iterator[Parts]:
    """Two trackers, three nodes and a gateway, all ready."""
    with ExitStack() as closing:
        redis = closing.enter_context(redis_server(tmp_path))
        made = Parts(tmp_path, model, redis, {"one": free_port(), "two": free_port()})
        closing.callback(made.stop)
        for name in made.trackers:
            made.start_tracker(name)
        for name in NODES:
            made.start_node(name)
        made.start("gateway", ["gateway", "--port", "0", *made.at_trackers])
        made.wait_ready(*NODES)
        yield made


class Chats:
    """Answers that run all the time; every one is compared with what it must be."""

    def __init__(self, gateway: Gateway, model: str) -> None:
        self._gateway = gateway
        self._model = model
        self.running: dict[int, int] = {}  # answers under way, with the pieces that came
        self.begun = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.texts: list[str] = []
        self.reports: list[dict[str, Any]] = []

    async def one(self) -> None:
        number, self.begun = self.begun, self.begun + 1
        self.running[number] = 0
        text = ""
        async for event in self._gateway.chat(self._model, QUESTION, max_tokens=COUNT, temperature=0):
            match event:
                case Text(piece):
                    text += piece
                    self.running[number] += 1
                case Ended(finish_reason, _, report):
                    assert finish_reason == "length"
                    self.reports.append(report)
                case _:
                    pass
        del self.running[number]
        self.texts.append(text)

    async def ceaselessly(self) -> None:
        while True:
            await self.one()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self.ceaselessly()) for _ in range(CHATS)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def look(self) -> None:
        """Raises what an answer failed with."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                self.look()
                await asyncio.sleep(0.02)

    async def under_way(self) -> set[int]:
        """The answers that are being written now; there is at least one."""
        await self.until(lambda: any(pieces > 3 for pieces in self.running.values()))
        return set(self.running)

    async def all_done(self, numbers: set[int]) -> None:
        await self.until(lambda: not numbers & set(self.running))


async def until_told(url: str, right: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What is told at ``url``, once it is right."""
    told: dict[str, Any] = {}
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    told = await fetch_json(url)
                except aiohttp.ClientError as error:
                    told = {"no answer": str(error)}
                else:
                    if right(told):
                        return told
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"{url} told to the end: {told}")


async def leases(url: str) -> dict[str, float]:
    """Of a tracker: how many nodes tell it themselves that they are there, and of how many it knows through others."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    prefix = 'meshnet_tracker_leases{told_by="'
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines if line.startswith(prefix)}


async def until_leases(url: str, **wanted: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while {name: count for name, count in (await leases(url)).items() if name in wanted} != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@asynccontextmanager
async def chatting(api: str) -> AsyncIterator[Chats]:
    async with Gateway(api) as gateway:
        await until_told(f"{api}/meshnet/status", lambda told: any(one["complete"] for one in told["models"]))
        (name,) = await gateway.models()
        chats = Chats(gateway, name)
        chats.start()
        try:
            yield chats
            chats.look()
        finally:
            await chats.stop()


async def test_whatever_of_trackers_and_redis_dies_answers_go_on_and_all_is_whole_again(parts: Parts) -> None:
    api = await asyncio.to_thread(parts.wait_ready, "gateway")
    status = f"{api}/meshnet/status"
    everybody = sorted(NODES)

    async def degraded(*words: str) -> None:
        """The status says so, an answer that was under way when it began is whole, and a new one too."""
        await until_told(status, lambda told: all(any(word in said for said in told["degraded"]) for word in words))
        begun = chats.begun
        await chats.until(lambda: chats.begun >= begun + CHATS)
        await chats.all_done(set(range(begun + CHATS)))

    async def whole() -> None:
        """Nothing is degraded, and every tracker knows every node, from the others or by itself."""
        await until_told(status, lambda told: told["degraded"] == [] and len(told["trackers"]) == 2)
        for name in parts.trackers:
            url = parts.tracker_url(name)
            await until_told(f"{url}/v1/snapshot", lambda told: [one["node_id"] for one in told["nodes"]] == everybody)
            await until_told(
                f"{url}/healthz", lambda told: told["registry"]["reachable"] and len(told["trackers"]) == 1
            )

    async with chatting(api) as chats:
        await whole()

        for gone, other in (("one", "two"), ("two", "one")):
            under_way = await chats.under_way()
            parts.kill(gone)
            await degraded("trackers that do not answer", parts.tracker_url(gone))
            await until_leases(parts.tracker_url(other), node=3, tracker=0)  # every node has gone over
            await chats.all_done(under_way)
            await asyncio.to_thread(parts.start_tracker, gone)
            await until_leases(parts.tracker_url(gone), node=0, tracker=3)  # known from the registry alone
            await whole()

        under_way = await chats.under_way()
        parts.redis.kill()
        await degraded("do not reach their registry", parts.tracker_url("one"), parts.tracker_url("two"))
        for name in parts.trackers:
            await until_leases(parts.tracker_url(name), node=3)  # each is told by every node itself
        await chats.all_done(under_way)
        parts.redis.start()
        await whole()

        under_way = await chats.under_way()
        parts.redis.kill()
        for name in parts.trackers:
            parts.kill(name)
        await degraded("no tracker answers")
        await chats.all_done(under_way)
        parts.redis.start()
        for name in parts.trackers:
            await asyncio.to_thread(parts.start_tracker, name)
        await whole()
        await chats.under_way()

    assert len(chats.texts) >= 10
    assert set(chats.texts) == {right_answer(parts.model)}
    assert {report["epochs"] for report in chats.reports} == {1}  # not one had to be recovered


def right_answer(model: Path) -> str:
    """What the unsharded model says."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    return str(tokenizer.decode(reference_greedy(reference_model(model), prompt, COUNT), skip_special_tokens=True))
