"""Any server of OpenAI's streamed chat completions as a system to compare, measured from outside: text, not token ids.

Each piece of the stream counts as one token, which is what such servers send; answers have at most so many tokens, and
one that ends sooner is an error, since its speed would be of something else.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from benchmarks.figures import TokenTimes
from benchmarks.models import QUESTION
from benchmarks.systems import Run

SILENCE_S = 300.0


class OpenAiSystem:
    """A server that somebody else started; see `openai_system`."""

    def __init__(self, name: str, url: str, model: str, session: aiohttp.ClientSession) -> None:
        self.name = name
        self._url = url.rstrip("/")
        self._model = model
        self._session = session

    async def run(self, prompt: Sequence[int], new_tokens: int) -> Run:
        """See `System`; the prompt is the question that ``prompt`` was made of, and no token ids come back."""
        del prompt
        request = {
            "model": self._model,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": new_tokens,
            "temperature": 0,
            "stream": True,
        }
        times: list[float] = []
        began = time.perf_counter()
        async with self._session.post(f"{self._url}/chat/completions", json=request) as response:
            if response.status != 200:
                raise RuntimeError(f"{self.name} answers with status {response.status}: {await response.text()}")
            async for line in response.content:
                times += [time.perf_counter() - began] * pieces_of(line)
        if len(times) < 2:
            raise RuntimeError(f"{self.name} gave {len(times)} pieces of text, which tell no speed")
        return Run(TokenTimes(tuple(times)), (), {"pieces": len(times)})

    def peak_rss(self) -> dict[str, int | None]:
        """See `System`; its processes are somebody else's."""
        return {}


def pieces_of(line: bytes) -> int:
    """How many pieces of text a line of the stream brings: one or none."""
    data = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return 0
    event: dict[str, Any] = json.loads(data)
    return sum(bool((choice.get("delta") or {}).get("content")) for choice in event.get("choices", ()))


@asynccontextmanager
async def openai_system(name: str, url: str, model: str) -> AsyncIterator[OpenAiSystem]:
    """Speak to a server at ``url``, which ends in ``/v1``."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield OpenAiSystem(name, url, model, session)
