"""Text models fetched from nodes over a real socket: which node, how often, and what is not believed."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from meshnet_core.coverage import ModelSummary
from meshnet_core.errors import HopUnreachableError, ModelNotFoundError
from meshnet_core.layer_range import LayerRange
from meshnet_core.membership import NodeInfo
from meshnet_gateway import text_store
from meshnet_gateway.text_model import TextModel
from meshnet_gateway.text_store import TextStore, read_text_files
from meshnet_gateway.warm_up import keep_warm
from scripted_engine import FixedMesh, FixedTexts, summary
from tiny_tokenizers import byte_level_files
from web_on_socket import serving


def encoded(files: dict[str, bytes]) -> bytes:
    return json.dumps({name: base64.b64encode(data).decode() for name, data in files.items()}).encode()


class FilesNode:
    """A node that answers /text/ with a body, and counts."""

    def __init__(self, body: bytes, status: int = 200) -> None:
        self.body, self.status = body, status
        self.asked: list[str] = []
        self.arrived, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()

    async def text(self, request: web.Request) -> web.Response:
        self.asked.append(request.match_info["fingerprint"])
        self.arrived.set()
        await self.go.wait()
        return web.Response(body=self.body, status=self.status, content_type="application/json")


class Holders:
    """One model, served by the nodes at some URLs."""

    def __init__(self, urls: list[str], model: ModelSummary) -> None:
        self.urls, self.served = urls, model

    async def model(self, name: str) -> ModelSummary:
        if name != self.served.name:
            raise ModelNotFoundError(f"no node serves a model {name!r}")
        return self.served

    async def nodes_of(self, model: ModelSummary) -> list[NodeInfo]:
        return [NodeInfo(f"node-{index}", url, "b-1", "0", "cpu", ()) for index, url in enumerate(self.urls)]


@asynccontextmanager
async def store_over(*nodes: FilesNode, dead: bool = False) -> AsyncIterator[tuple[TextStore, Holders]]:
    async with AsyncExitStack() as stack:
        urls = ["http://127.0.0.1:9"] if dead else []
        for node in nodes:
            app = web.Application()
            app.router.add_get("/text/{fingerprint}", node.text)
            urls.append(await stack.enter_async_context(serving(app)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        holders = Holders(urls, summary("tiny", max_positions=48))
        yield TextStore(holders, session), holders


async def test_a_model_is_fetched_once_and_bounded_by_what_the_nodes_hold() -> None:
    node = FilesNode(encoded(byte_level_files()))
    async with store_over(node) as (store, _):
        model = await store.get("tiny")
        assert (model.name, model.fingerprint, model.max_positions) == ("tiny", "f" * 64, 48)
        assert model.decode(model.encode("the fox")) == "the fox"
        await store.get("tiny")
        assert node.asked == ["f" * 64]


async def test_another_fingerprint_is_another_model() -> None:
    node = FilesNode(encoded(byte_level_files()))
    async with store_over(node) as (store, holders):
        await store.get("tiny")
        holders.served = ModelSummary("tiny", "e" * 64, 4, 8, 32, True, (), ("float32",))
        assert (await store.get("tiny")).max_positions == 32
        assert node.asked == ["f" * 64, "e" * 64]


async def test_many_at_once_load_once_and_one_that_is_cancelled_spoils_nothing() -> None:
    node = FilesNode(encoded(byte_level_files()))
    node.go.clear()
    async with store_over(node) as (store, _):
        waiting = [asyncio.create_task(store.get("tiny")) for _ in range(4)]
        await node.arrived.wait()
        waiting[0].cancel()
        node.go.set()
        first, *others = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(first, asyncio.CancelledError)
        assert {type(other).__name__ for other in others} == {"TextModel"}
        assert len(node.asked) == 1


async def test_a_node_that_cannot_is_passed_over() -> None:
    good = FilesNode(encoded(byte_level_files()))
    async with store_over(FilesNode(b"", 404), FilesNode(b"<html>"), good, dead=True) as (store, _):
        assert (await store.get("tiny")).vocab_size
        assert len(good.asked) == 1


async def test_when_no_node_can_each_ones_reason_is_told_and_the_next_try_asks_again() -> None:
    bad = FilesNode(encoded({"tokenizer.json": b"{}"}))
    async with store_over(FilesNode(b"", 404), bad) as (store, _):
        with pytest.raises(HopUnreachableError, match=r"node-0: .*status 404; node-1: .*make no tokenizer"):
            await store.get("tiny")
        bad.body = encoded(byte_level_files())
        assert await store.get("tiny")


async def test_too_much_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_store, "MAX_TEXT_BYTES", 1000)
    async with store_over(FilesNode(b"x" * 5_000_000)) as (store, _):
        with pytest.raises(HopUnreachableError, match="more than 1000 bytes"):
            await store.get("tiny")


async def test_an_unknown_model_is_not_found() -> None:
    async with store_over() as (store, _):
        with pytest.raises(ModelNotFoundError):
            await store.get("other")
        with pytest.raises(HopUnreachableError, match="none holds it any more"):
            await store.get("tiny")


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"{", b'{"tokenizer.json": 1}', b'{"tokenizer.json": "%%%"}', b"[" * 100_000, b"\xff\xfe"],
)
def test_garbage_is_refused(body: bytes) -> None:
    with pytest.raises(HopUnreachableError, match="no JSON object of base64"):
        read_text_files(body)


@pytest.mark.parametrize("name", ["../evil.json", "modeling_evil.py", "model.safetensors", "/etc/passwd", ""])
def test_a_file_that_is_none_of_a_tokenizers_is_refused(name: str) -> None:
    with pytest.raises(HopUnreachableError, match="none of the files of a tokenizer"):
        read_text_files(encoded({**byte_level_files(), name: b"{}"}))


async def test_models_are_read_before_anyone_asks_for_them() -> None:
    mesh = FixedMesh([summary("tiny"), summary("part", missing=[LayerRange(2, 4)]), summary("broken")])
    asked: list[str] = []
    seen = asyncio.Event()

    class Texts(FixedTexts):
        async def get(self, name: str) -> TextModel:
            asked.append(name)
            if name == "whole later":
                seen.set()
            return await super().get(name)

    task = asyncio.create_task(keep_warm(mesh, Texts({}), every_s=0.001))
    async with asyncio.timeout(30):
        while len(asked) < 2:  # noqa: ASYNC110 - a loop that runs for good has no event to wait for
            await asyncio.sleep(0.001)
        mesh.served.append(summary("whole later"))
        await seen.wait()
    task.cancel()
    assert asked == ["broken", "tiny", "whole later"]
