"""An OpenAI-style chat stream as events. Speaks HTTP with a gateway; knows no terminal.

data: {"choices": [{"delta": {"content": "Hel"}}]}        -> Text("Hel")
: meshnet prefill 256/1000                                -> Prefill(256, 1000)
data: {"choices": [...], "usage": {...}, "meshnet": {...}} -> Ended(...)
data: {"error": {...}}                                    -> CommandFailedError
data: [DONE]
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from meshnet_cli import access
from meshnet_cli.complaint import CommandFailedError
from meshnet_core.connection_words import connection_words
from meshnet_core.errors import InvalidInputError
from meshnet_core.remedies import REMEDIES
from meshnet_core.web_address import is_web_address

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 120.0  # longer than a gateway waits for one step of its nodes
_OF_THE_MESH = frozenset(
    {"layers_unavailable", "cache_full", "hop_failed", "hop_unreachable", "deadline", "tracker_unreachable"}
)
_PREFILL = re.compile(r": meshnet prefill (\d+)/(\d+)")


class GatewayUnreachableError(CommandFailedError):
    """Nothing answers at the gateway's address."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """``done`` of ``total`` tokens of the prompt have been taken in."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """The next piece of what a model that thinks says before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer is whole; ``report`` is the gateway's ``meshnet`` object."""

    finish_reason: str | None
    usage: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)


Event = Prefill | Thought | Text | Ended


class Gateway:
    """One gateway, by the address of its API. Use it with ``async with``.

    Args:
        url: of the API.
        key: API key to bring; None for that of the environment, where there is one.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        if not is_web_address(url):
            raise InvalidInputError(f"--url {url!r} is no address; write it like http://127.0.0.1:8000/v1")
        self.url = url.rstrip("/")
        self._headers = access.headers_with(key or access.client_key())
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def models(self) -> list[str]:
        """Names of the models served."""
        document = await self.get("/models")
        return [str(model["id"]) for model in document.get("data", [])]

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at ``path`` below the API's address."""
        try:
            async with self._client.get(self.url + path) as response:
                if response.status == 404 and not self.url.endswith("/v1"):
                    raise CommandFailedError(
                        f"no API of a gateway is at {self.url}; it is usually at /v1: --url {self.url}/v1"
                    )
                return await self._object(response)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def chat(self, model: str, messages: list[dict[str, str]], **fields: Any) -> AsyncGenerator[Event]:
        """Stream an answer.

        Raises:
            CommandFailedError: the gateway is not reached, refuses, or ends the stream with an error.
        """
        request = {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        reader = StreamReader()
        try:
            async with self._client.post(f"{self.url}/chat/completions", json=request | fields) as response:
                if response.status != 200:
                    await self._object(response)
                async for raw in response.content:
                    for event in reader.feed(raw.decode("utf-8")):
                        yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error
        yield reader.ended()

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use the gateway with `async with`")
        return self._session

    async def _object(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        text = await response.text()
        try:
            document = json.loads(text)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise CommandFailedError(
                f"what answers at {self.url} is no meshnet gateway (status {response.status}); check --url"
            )
        if response.status == 401:
            told = error_text(document, response.status).partition(";")[0]
            raise CommandFailedError(f"{told}; bring one of its keys with --api-key KEY, or in {access.VARIABLE}")
        if response.status != 200:
            raise CommandFailedError(error_text(document, response.status))
        return document

    def _unreachable(self, error: Exception) -> GatewayUnreachableError:
        if isinstance(error, TimeoutError):
            reason = "no answer in time"
        else:  # a gateway's certificate is its own affair, not the mesh's
            reason = str(error) if isinstance(error, aiohttp.ClientSSLError) else connection_words(error)
        return GatewayUnreachableError(
            f"no gateway answers at {self.url} ({reason}); start one with `meshnet up smollm2`, "
            "or name yours with --url"
        )


class StreamReader:
    """Reads a stream line by line; no line is needed twice."""

    def __init__(self) -> None:
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._report: dict[str, Any] = {}
        self._done = False

    def feed(self, line: str) -> list[Event]:
        """The events of one line.

        Raises:
            CommandFailedError: the line brings an error, or is not of such a stream.
        """
        line = line.rstrip("\r\n")
        if match := _PREFILL.fullmatch(line):
            return [Prefill(int(match[1]), int(match[2]))]
        if not line.startswith("data:"):
            return []
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            self._done = True
            return []
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise CommandFailedError(f"the stream holds what is no JSON: {data[:80]!r}") from error
        if "error" in chunk:
            raise CommandFailedError(error_text(chunk, None))
        self._usage = chunk.get("usage") or self._usage
        self._report = chunk.get("meshnet") or self._report
        events: list[Event] = []
        for choice in chunk.get("choices", []):
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            if thought := choice.get("delta", {}).get("reasoning_content"):
                events.append(Thought(thought))
            if text := choice.get("delta", {}).get("content"):
                events.append(Text(text))
        return events

    def ended(self) -> Ended:
        """What is known at the stream's end.

        Raises:
            CommandFailedError: the stream was cut short.
        """
        if not self._done:
            raise CommandFailedError("the answer was cut short: the gateway closed the stream before its end")
        return Ended(self._finish_reason, self._usage, self._report)


def error_text(document: dict[str, Any], status: int | None) -> str:
    """The message of an OpenAI-style error object; where the mesh is to be mended, with what to do in a second line."""
    error = document.get("error")
    if isinstance(error, dict) and error.get("message"):
        code = str(error.get("code"))
        remedy = f"\n{REMEDIES[code].remedy}" if code in _OF_THE_MESH else ""
        return f"the {'answer failed' if status is None else 'gateway refused'}: {error['message']}{remedy}"
    return (
        f"the gateway answered with status {status}" if status is not None else "the answer failed, for no reason given"
    )
