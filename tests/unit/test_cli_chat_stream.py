"""Reading a gateway's stream, and what a person is told when it is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from meshnet_cli.chat_stream import Ended, Event, Gateway, Prefill, StreamReader, Text, Thought
from meshnet_cli.complaint import CommandFailedError
from meshnet_core.errors import InvalidInputError

STREAM = [
    ": meshnet prefill 256/1000",
    "",
    'data: {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}',
    "",
    'data: {"choices": [{"delta": {"content": "Hé"}, "finish_reason": null}]}',
    'data: {"choices": [{"delta": {"content": "llo"}}], "usage": null}',
    ": a comment of some proxy",
    'data: {"choices": [{"delta": {}, "finish_reason": "stop"}], "meshnet": {"session": "s-1"}}',
    'data: {"choices": [], "usage": {"completion_tokens": 2}}',
    "data: [DONE]",
]


def read(lines: list[str]) -> list[Event]:
    reader = StreamReader()
    events = [event for line in lines for event in reader.feed(line + "\n")]
    return [*events, reader.ended()]


def test_a_stream_becomes_progress_text_and_an_end() -> None:
    assert read(STREAM) == [
        Prefill(256, 1000),
        Text("Hé"),
        Text("llo"),
        Ended("stop", {"completion_tokens": 2}, {"session": "s-1"}),
    ]


def test_what_a_model_thinks_comes_apart() -> None:
    thought = 'data: {"choices": [{"delta": {"reasoning_content": "let me see"}}]}'
    assert read([thought, *STREAM])[0] == Thought("let me see")


def test_a_stream_without_its_end_was_cut_short() -> None:
    with pytest.raises(CommandFailedError, match="cut short"):
        read(STREAM[:-1])


def test_an_error_in_the_stream_is_raised_with_its_message() -> None:
    line = 'data: {"error": {"message": "layers 15-29 are served by no node", "code": "layers_unavailable"}}'
    with pytest.raises(CommandFailedError, match="the answer failed: layers 15-29 are served by no node"):
        read([line])


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(CommandFailedError, match="no JSON"):
        read(["data: <html>"])


async def serve(handler: Any) -> TestServer:
    app = web.Application()
    app.router.add_route("*", "/v1/{path:.*}", handler)
    server = TestServer(app)
    await server.start_server()
    return server


async def test_a_question_is_asked_and_its_answer_streamed() -> None:
    asked: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        return web.Response(text="\n".join(STREAM) + "\n", content_type="text/event-stream")

    server = await serve(handler)
    async with Gateway(str(server.make_url("/v1"))) as gateway:
        events = [event async for event in gateway.chat("m", [{"role": "user", "content": "hi"}], max_tokens=3)]
    await server.close()
    assert events[-1] == Ended("stop", {"completion_tokens": 2}, {"session": "s-1"})
    assert asked[0]["stream"] is True
    assert asked[0]["max_tokens"] == 3
    assert asked[0]["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (
            400,
            json.dumps({"error": {"message": "the prompt is too long"}}),
            "the gateway refused: the prompt is too long",
        ),
        (
            503,
            json.dumps({"error": {"message": "layers 0-14 of m are served by no node", "code": "layers_unavailable"}}),
            "served by no node\n`meshnet status` shows the gap",
        ),
        (503, json.dumps({"detail": "?"}), "status 503"),
        (200, "<html>", "no meshnet gateway"),
        (502, "Bad Gateway", "no meshnet gateway"),
    ],
)
async def test_other_answers_are_told_in_words(status: int, body: str, message: str) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body)

    server = await serve(handler)
    async with Gateway(str(server.make_url("/v1"))) as gateway:
        with pytest.raises(CommandFailedError, match=message):
            await gateway.models()
    await server.close()


async def test_a_gateway_that_is_not_there_is_named_with_the_remedy() -> None:
    async with Gateway("http://127.0.0.1:1/v1") as gateway:
        with pytest.raises(CommandFailedError, match=r"no gateway answers at http://127.0.0.1:1/v1.*meshnet up"):
            await gateway.models()


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "http://",
        "http://a b/v1",
        "http://[::1/v1",
        "http://h:99999/v1",
        "http://h:0",
        "ftp://h/v1",
        "HTTP://h",
    ],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError, match="write it like http"):
        Gateway(url)


async def test_an_address_without_v1_is_told_with_it() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "Not Found: GET /models"}}, status=404)

    server = await serve(handler)
    url = str(server.make_url("/v1/more"))
    async with Gateway(url) as gateway:
        with pytest.raises(CommandFailedError, match=f"usually at /v1: --url {url}/v1"):
            await gateway.models()
    await server.close()
