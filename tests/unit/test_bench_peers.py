"""Peers of the benchmarks: who is found, why the others are not, and how their streams are read. None is started."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from benchmarks.llama_rpc import LlamaRpcSystem, tokens_of
from benchmarks.models import PreparedModel
from benchmarks.openai_peer import openai_system, pieces_of
from benchmarks.peers import Absent, Peer, PeerOptions, found_peers, options_of

from app_thread import serving_app
from scripted_gateway import ScriptedGateway, serving

GGUF = PreparedModel("m", "m", "folder", (1, 2), "m.gguf")


def reasons(options: PeerOptions, prepared: PreparedModel, on_path: set[str]) -> list[str]:
    found = found_peers(options, prepared, 2, lambda name: f"/bin/{name}" if name in on_path else None)
    return [peer.reason if isinstance(peer, Absent) else "found" for peer in found]


def test_each_peer_is_found_or_has_its_reason(tmp_path: Path) -> None:
    pipes = "give --language-pipes-python PATH, or --language-pipes URL of one that runs"
    assert reasons(PeerOptions(), GGUF, {"llama-server", "rpc-server"}) == ["found", pipes]
    assert reasons(PeerOptions(), GGUF, {"llama-server"}) == [
        "no ggml-rpc-server in the path; give --llama-bin DIR",
        pipes,
    ]
    assert reasons(PeerOptions(tmp_path), GGUF, {"llama-server", "rpc-server"})[0].startswith(
        "no llama-server and ggml-rpc-server in "
    )
    (tmp_path / "llama-server").touch()
    (tmp_path / "ggml-rpc-server").touch()
    assert reasons(PeerOptions(tmp_path), GGUF, set())[0] == "found"
    assert reasons(PeerOptions(tmp_path), PreparedModel("m", "m", "folder", (1,)), set()) == [
        "it reads GGUF files, and this model is none",
        pipes,
    ]
    assert reasons(PeerOptions(pipes_url="http://a/v1"), GGUF, set())[1] == "found"
    python = tmp_path / "python"
    texts = replace(GGUF, texts="folder")
    assert reasons(PeerOptions(pipes_python=python), GGUF, set())[1] == "it reads text, and this model has no tokenizer"
    assert reasons(PeerOptions(pipes_python=python), texts, set())[1] == f"there is no {python}"
    python.touch()
    assert reasons(PeerOptions(pipes_python=python), texts, set())[1] == "found"


def test_options_without_values_are_the_path_and_no_address() -> None:
    names = ("llama_bin", "language_pipes_python", "language_pipes", "language_pipes_model")
    nothing: dict[str, str | None] = dict.fromkeys(names)
    assert options_of(nothing) == PeerOptions()
    given = {"llama_bin": "b", "language_pipes": "http://a/v1", "language_pipes_model": "x"}
    assert options_of(given) == PeerOptions(Path("b"), None, "http://a/v1", "x")
    assert options_of({"language_pipes_python": "p"}) == PeerOptions(pipes_python=Path("p"))


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        (b'data: {"tokens": [7], "content": "a", "stop": false}\n', [7]),
        (b'data: {"tokens": [8, 9], "stop": false}\n', [8, 9]),
        (b'data: {"tokens": [], "stop": true, "timings": {}}\n', []),
        (b"data: [DONE]\n", []),
        (b"\n", []),
    ],
)
def test_tokens_are_read_off_the_stream_of_llama_server(line: bytes, tokens: list[int]) -> None:
    assert tokens_of(line) == tokens


@pytest.mark.parametrize("line", [b'error: {"code": 500}\n', b'data: {"error": {"message": "no slot"}}\n'])
def test_an_error_in_that_stream_is_one(line: bytes) -> None:
    with pytest.raises(RuntimeError, match="llama-server"):
        tokens_of(line)


@pytest.mark.parametrize(
    ("line", "pieces"),
    [
        (b'data: {"choices": [{"delta": {"content": "a"}}]}\n', 1),
        (b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n', 0),
        (b'data: {"choices": [{"delta": null}]}\n', 0),
        (b"data: [DONE]\n", 0),
        (b": a comment\n", 0),
    ],
)
def test_a_piece_of_text_counts_and_nothing_else(line: bytes, pieces: int) -> None:
    assert pieces_of(line) == pieces


@pytest.mark.parametrize("count", [3, 2])
def test_llama_server_is_asked_for_exactly_so_many_tokens(count: int) -> None:
    asked: list[dict[str, Any]] = []

    async def completion(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token in range(3):
            await response.write(f"data: {json.dumps({'tokens': [token], 'stop': False})}\n\n".encode())
        return response

    async def run(url: str) -> tuple[int, ...]:
        async with aiohttp.ClientSession() as session:
            system = LlamaRpcSystem("llama", url, {}, session)
            assert system.peak_rss() == {}
            return (await system.run((5, 6), count)).tokens

    app = web.Application()
    app.router.add_post("/completion", completion)
    with serving_app(app) as url:
        if count == 3:
            assert asyncio.run(run(url)) == (0, 1, 2)
        else:
            with pytest.raises(RuntimeError, match="3 tokens instead of 2"):
                asyncio.run(run(url))
    assert (asked[0]["prompt"], asked[0]["n_predict"], asked[0]["temperature"]) == ([5, 6], count, 0)
    assert (asked[0]["ignore_eos"], asked[0]["cache_prompt"]) == (True, False)


def test_any_openai_server_can_be_timed_by_its_pieces() -> None:
    async def run(url: str) -> Any:
        async with openai_system("pipes", url, "tiny") as system:
            return await system.run((1,), 5)

    with serving(ScriptedGateway([["one", " two", " three"]])) as gateway:
        found = asyncio.run(run(gateway.url))
    assert (found.facts, found.tokens, len(found.times.times)) == ({"pieces": 3}, (), 3)
    assert gateway.requests[0]["max_tokens"] == 5


def test_what_is_found_can_be_started() -> None:
    (llama, pipes) = found_peers(PeerOptions(pipes_url="http://a/v1"), GGUF, 2, lambda name: f"/bin/{name}")
    assert isinstance(llama, Peer)
    assert isinstance(pipes, Peer)
    assert (llama.name, pipes.name) == ("llama.cpp RPC", "language-pipes")
