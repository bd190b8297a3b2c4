"""Talking to the API in this process: no sockets, no server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from meshnet_gateway.api import create_app
from meshnet_gateway.text_model import TextModel
from scripted_engine import FixedMesh, FixedTexts, ScriptedEngine, summary

USER = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


def app_of(engine: ScriptedEngine, model: TextModel, mesh: FixedMesh | None = None, **options: Any) -> FastAPI:
    return create_app(engine, FixedTexts({model.name: model}), mesh or FixedMesh([summary("tiny")]), **options)


async def post(app: FastAPI, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    async with client_of(app) as client:
        return await client.post(path, json={"model": "tiny", **body})


def events_of(response: httpx.Response) -> list[Any]:
    """Parsed data of each event; comments as strings that begin with a colon."""
    found: list[Any] = []
    for block in response.text.split("\n\n")[:-1]:
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append("[DONE]" if data == "[DONE]" else json.loads(data))
        else:
            found.append(block)
    return found


def content_of(events: list[Any]) -> str:
    choices = [choice for event in events if isinstance(event, dict) for choice in event.get("choices", [])]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


async def get(app: FastAPI, path: str) -> httpx.Response:
    async with client_of(app) as client:
        return await client.get(path)
