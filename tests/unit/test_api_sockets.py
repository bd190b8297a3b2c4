"""The API on a real port: clients that leave, a server that stops, tokens one by one, OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from openai.types.chat import ChatCompletionChunk

from api_client import USER, app_of
from meshnet_cli.serving import listen, port_of, serving_asgi
from meshnet_core.errors import DeadlineError, LayersUnavailableError
from meshnet_core.sampling import SampledToken
from meshnet_gateway.api import create_app
from meshnet_gateway.generation import GenerationRequest, PrefillProgress
from meshnet_gateway.text_model import TextModel
from scripted_engine import FixedMesh, ScriptedEngine, ScriptedGeneration, summary, tokens
from tiny_tokenizers import byte_level_files

SOON = 30.0  # seconds; loaded test machines are slow, and what fails here hangs for good


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel.from_files("tiny", "f" * 64, byte_level_files())


@asynccontextmanager
async def port_with(app: FastAPI) -> AsyncIterator[int]:
    sock = listen("127.0.0.1", 0)
    async with serving_asgi(app, sock):
        yield port_of(sock)


def request_bytes(**body: Any) -> bytes:
    content = json.dumps({"model": "tiny", "messages": USER, **body}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode() + content


async def closed(engine: ScriptedEngine, count: int = 1) -> None:
    async with asyncio.timeout(SOON):
        while len(engine.closed) < count:  # noqa: ASYNC110 - what it waits for has no event, being the real thing's
            await asyncio.sleep(0.005)


# where the client leaves: what the engine does before it waits, whether streamed, what the client reads before
LEAVINGS: dict[str, tuple[list[PrefillProgress | SampledToken], bool, bytes]] = {
    "before the first chunk of the prefill": ([], True, b""),
    "during the prefill": ([PrefillProgress(256, 1000)], True, b"prefill 256/1000"),
    "while tokens come": ([PrefillProgress(5, 5), *tokens([40, 41])], True, b'"content"'),
    "not streamed, during the prefill": ([PrefillProgress(256, 1000)], False, b""),
    "not streamed, while tokens come": ([*tokens([40, 41])], False, b""),
}


@pytest.mark.parametrize("where", LEAVINGS)
async def test_a_client_that_leaves_ends_its_generation(where: str, model: TextModel) -> None:
    before, stream, until = LEAVINGS[where]
    never = asyncio.Event()
    engine = ScriptedEngine([*before, never, *tokens([42] * 10)])
    app = app_of(engine, model)
    async with port_with(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes(stream=stream))
        async with asyncio.timeout(SOON):
            if until:
                await reader.readuntil(until)
            await engine.waiting.wait()
        assert engine.closed == []
        writer.close()
        await closed(engine)
        figures = app.state.door.figures.to_json()
        assert figures["active_generations"] == 0
        assert figures["requests"] == {"client_gone": 1}
        assert engine.given == len(before)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_all_of_its_n_generations(model: TextModel, stream: bool) -> None:
    engine = ScriptedEngine([*tokens([40]), asyncio.Event()])
    async with port_with(app_of(engine, model)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes(stream=stream, n=3))
        async with asyncio.timeout(SOON):
            while engine.given < 3:  # noqa: ASYNC110 - each of them waits within its script by then
                await asyncio.sleep(0.01)
        writer.close()
        await closed(engine, 3)
    assert sorted(engine.closed) == ["s-1", "s-2", "s-3"]


async def test_a_client_that_leaves_with_the_last_event_had_its_answer(model: TextModel) -> None:
    class SlowToEnd(ScriptedEngine):
        def start(self, request: GenerationRequest) -> ScriptedGeneration:
            generation = super().start(request)
            close = generation.aclose

            async def aclose() -> None:
                await left.wait()
                await close()

            generation.aclose = aclose  # type: ignore[method-assign]
            return generation

    left = asyncio.Event()
    engine = SlowToEnd(tokens([40]))
    app = app_of(engine, model)
    async with port_with(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes(stream=True))
        async with asyncio.timeout(SOON):
            await reader.readuntil(b"[DONE]")
        writer.close()
        async with asyncio.timeout(SOON):
            while not app.state.door.figures.to_json()["requests"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert app.state.door.figures.to_json()["requests"] == {"ok": 1}
        assert engine.closed == []  # that is not waited for
        left.set()
        await closed(engine)


async def test_a_client_that_leaves_while_its_model_loads_starts_nothing(model: TextModel) -> None:
    loading, left = asyncio.Event(), asyncio.Event()

    class SlowTexts:
        async def get(self, name: str) -> TextModel:
            loading.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                left.set()
                raise
            return model

    engine = ScriptedEngine()
    async with port_with(create_app(engine, SlowTexts(), FixedMesh())) as port:
        for stream in (True, False):
            loading.clear()
            left.clear()
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes(stream=stream))
            async with asyncio.timeout(SOON):
                await loading.wait()
                writer.close()
                await left.wait()
    assert engine.requests == []


async def test_a_server_that_stops_gives_every_generation_back(model: TextModel) -> None:
    engine = ScriptedEngine([*tokens([40]), asyncio.Event()])
    async with asyncio.timeout(4 * SOON), port_with(app_of(engine, model)) as port:
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for stream, (_, writer) in enumerate(connections):
            writer.write(request_bytes(stream=bool(stream)))
            await engine.waiting.wait()
            engine.waiting.clear()
        assert engine.closed == []
    assert sorted(engine.closed) == ["s-1", "s-2"]


@pytest.mark.parametrize("sent", ["head", "some", "all but the last byte"])
async def test_a_body_that_ends_too_early_is_answered(sent: str, model: TextModel) -> None:
    """The client closes its side alone, and reads on."""
    engine = ScriptedEngine([*tokens([40])])
    async with port_with(app_of(engine, model)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        whole = request_bytes()
        cut = {"head": whole.index(b"\r\n\r\n") + 4, "some": len(whole) - 20}.get(sent, len(whole) - 1)
        writer.write(whole[:cut])
        writer.write_eof()
        async with asyncio.timeout(SOON):
            answer = await reader.read()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "cut_body"
        writer.close()
        assert engine.requests == []
        reader, writer = await asyncio.open_connection("127.0.0.1", port)  # and the next good one works
        writer.write(whole)
        async with asyncio.timeout(SOON):
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.close()


async def test_others_go_on_when_one_leaves(model: TextModel) -> None:
    go = asyncio.Event()
    engine = ScriptedEngine(lambda request: [*tokens([40]), go, *tokens(model.encode("the fox"))])
    async with port_with(app_of(engine, model)) as port:
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in connections:
            writer.write(request_bytes(stream=True))
        async with asyncio.timeout(SOON):
            for reader, _ in connections:
                await reader.readuntil(b'"content"')
            connections[1][1].close()
            await closed(engine)
            go.set()
            for reader, writer in (connections[0], connections[2]):
                assert b"[DONE]" in await reader.readuntil(b"[DONE]")
                writer.close()
        await closed(engine, 3)


async def test_a_token_is_sent_when_it_comes(model: TextModel) -> None:
    go = asyncio.Event()
    engine = ScriptedEngine([*tokens(model.encode("the")), go, *tokens(model.encode(" fox"))])
    async with port_with(app_of(engine, model)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes(stream=True))
        async with asyncio.timeout(SOON):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b'{"content":"he"}')
            go.set()
            await reader.readuntil(b"[DONE]")
        writer.close()
    assert b"200 OK" in head
    assert b"text/event-stream" in head
    assert b"content-length" not in head


# -- OpenAI's own client -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def openai_client(app: FastAPI) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        port_with(app) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def read(stream: openai.AsyncStream[ChatCompletionChunk], texts: list[str]) -> None:
    """Note each piece when it comes, so that those before an error are known."""
    async for chunk in stream:
        texts.append(chunk.choices[0].delta.content or "")  # noqa: PERF401


async def test_openais_client_gets_answers(model: TextModel) -> None:
    said = [SampledToken(token, -0.5, ((token, -0.5), (40, -2.0))) for token in model.encode("the fox 你好")]
    engine = ScriptedEngine([PrefillProgress(9, 18), *said])
    async with openai_client(app_of(engine, model, FixedMesh([summary("tiny")]))) as client:
        assert [served.id async for served in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).owned_by == "meshnet"

        whole = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], logprobs=True, top_logprobs=2, seed=1
        )
        assert whole.choices[0].message.content == "the fox 你好"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == len(said)
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.content or []) == len(said)
        assert whole.model_extra is not None
        assert whole.model_extra["meshnet"]["session"] == "s-1"

        history: Any = [{"role": "user", "content": "hello"}, whole.choices[0].message]
        stream = await client.chat.completions.create(
            model="tiny",
            messages=history,
            stream=True,
            stream_options={"include_usage": True},
            stop=[" 你"],
            extra_body={"top_k": 5, "meshnet": {"cache": "off"}},
        )
        text, usage, finish = "", None, None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        assert (text, finish) == ("the fox", "stop")
        assert usage is not None
        assert engine.requests[-1].cache is False

        plain = await client.completions.create(model="tiny", prompt="the", max_tokens=40)
        assert plain.choices[0].text == "the fox 你好"


async def test_openais_client_gets_errors(model: TextModel) -> None:
    engine = ScriptedEngine([LayersUnavailableError("layers 2-3 of tiny are served by no node")])
    async with openai_client(app_of(engine, model)) as client:
        hello: Any = {"messages": [{"role": "user", "content": "hello"}]}
        with pytest.raises(openai.BadRequestError, match="store is not supported") as refused:
            await client.chat.completions.create(model="tiny", store=True, **hello)
        assert refused.value.param == "store"
        assert refused.value.code == "unsupported_parameter"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", **hello)
        with pytest.raises(openai.InternalServerError, match="served by no node"):
            await client.chat.completions.create(model="tiny", stream=True, **hello)

        engine.script = [*tokens(model.encode("the fox")), DeadlineError("node-b did not answer", hop_index=1)]
        stream = await client.chat.completions.create(model="tiny", stream=True, **hello)
        texts: list[str] = []
        with pytest.raises(openai.APIError, match="node-b did not answer"):
            await read(stream, texts)
        assert "".join(texts) == "the fox"


async def test_openais_client_cancels(model: TextModel) -> None:
    engine = ScriptedEngine([*tokens([40]), asyncio.Event()])
    async with openai_client(app_of(engine, model)) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        await anext(aiter(stream))
        await stream.close()
        await closed(engine)
