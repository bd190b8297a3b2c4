"""Streamed chat answers of a gateway that runs as a process, line by line."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from process_mesh import fetch_json

TIMEOUT = aiohttp.ClientTimeout(total=280)


async def stream(api: str, prompt: str, **fields: object) -> AsyncIterator[str]:
    """The lines of a streamed answer that are not empty."""
    body = {**await chat_body(api, prompt), "stream": True, **fields}
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http, http.post(f"{api}/chat/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if line.strip():
                yield line.decode().strip()


async def whole(api: str, prompt: str, **fields: object) -> tuple[int, dict[str, Any]]:
    """Status and document of an answer that is not streamed."""
    body = {**await chat_body(api, prompt), **fields}
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http, http.post(f"{api}/chat/completions", json=body) as reply:
        return reply.status, await reply.json()


async def chat_body(api: str, prompt: str) -> dict[str, Any]:
    """One question to the mesh's only model."""
    (model,) = (await fetch_json(f"{api}/models"))["data"]
    return {"model": model["id"], "messages": [{"role": "user", "content": prompt}]}


def chunks(lines: Sequence[str]) -> list[dict[str, Any]]:
    """The documents among them."""
    written = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(text) for text in written if text != "[DONE]"]


@dataclass(frozen=True)
class Streamed:
    """A streamed answer that ended normally; tokens as (text, logprob), where they were asked for."""

    text: str
    finish: str | None
    report: dict[str, Any]
    tokens: list[tuple[str, float]]

    @classmethod
    def of(cls, lines: Sequence[str]) -> Streamed:
        assert lines[-1] == "data: [DONE]", lines[-2:]
        said = chunks(lines)
        choices = [choice for chunk in said for choice in chunk["choices"]]
        tokens = [token for choice in choices for token in (choice.get("logprobs") or {}).get("content") or ()]
        return cls(
            "".join(choice["delta"].get("content") or "" for choice in choices),
            choices[-1]["finish_reason"],
            said[-1]["meshnet"],
            [(token["token"], token["logprob"]) for token in tokens],
        )


def error_at_end(lines: Sequence[str]) -> dict[str, Any]:
    """The error object that a stream ended with."""
    assert lines[-1] == "data: [DONE]", lines[-2:]
    error: dict[str, Any] = chunks(lines)[-1]["error"]
    return error
