"""llama.cpp over two RPC servers on loopback, as a system to compare: `llama-server` drives, by its own HTTP API."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from benchmarks.figures import TokenTimes
from benchmarks.memory import peak_rss
from benchmarks.peer_process import free_port, listens, peer_process, until
from benchmarks.systems import Run

SERVERS = 2
CONTEXT = 4096
ALL_LAYERS = "99"


@dataclass(frozen=True, slots=True)
class LlamaPrograms:
    """Paths of the two programs."""

    server: str
    rpc_server: str


class LlamaRpcSystem:
    """A running `llama-server` over RPC servers; see `llama_rpc_system`."""

    def __init__(self, name: str, url: str, pids: dict[str, int], session: aiohttp.ClientSession) -> None:
        self.name = name
        self._url = url
        self._pids = pids
        self._session = session

    async def run(self, prompt: Sequence[int], new_tokens: int) -> Run:
        """See `System`. Raises `RuntimeError` where it does not answer with so many tokens."""
        request = completion_request(prompt, new_tokens)
        times: list[float] = []
        tokens: list[int] = []
        began = time.perf_counter()
        async with self._session.post(f"{self._url}/completion", json=request) as response:
            if response.status != 200:
                raise RuntimeError(f"llama-server answers with status {response.status}: {await response.text()}")
            async for line in response.content:
                for token in tokens_of(line):
                    times.append(time.perf_counter() - began)
                    tokens.append(token)
        if len(tokens) != new_tokens:
            raise RuntimeError(f"llama-server gave {len(tokens)} tokens instead of {new_tokens}")
        return Run(TokenTimes(tuple(times)), tuple(tokens))

    def peak_rss(self) -> dict[str, int | None]:
        """See `System`."""
        return {name: peak_rss(pid) for name, pid in self._pids.items()}


def completion_request(prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """What is posted: token ids, greedy, exactly so many tokens, nothing kept from the prompt before."""
    return {
        "prompt": list(prompt),
        "n_predict": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "return_tokens": True,
    }


def tokens_of(line: bytes) -> list[int]:
    """Token ids that a line of the stream brings; its last event repeats none.

    Raises:
        RuntimeError: the stream tells of an error.
    """
    if line.startswith(b"error:"):
        raise RuntimeError(f"llama-server: {line.decode('utf-8', 'replace').strip()}")
    if not line.startswith(b"data:") or line.removeprefix(b"data:").strip() == b"[DONE]":
        return []
    event = json.loads(line.removeprefix(b"data:"))
    if "error" in event:
        raise RuntimeError(f"llama-server: {event['error']}")
    return [] if event.get("stop") else [int(token) for token in event.get("tokens", ())]


@asynccontextmanager
async def llama_rpc_system(
    name: str, programs: LlamaPrograms, gguf: str, threads: int
) -> AsyncIterator[LlamaRpcSystem]:
    """Start `SERVERS` RPC servers and a `llama-server` over them, all layers on the servers; end them with the block.

    Raises:
        RuntimeError: one ended, or did not listen in time; what it said is on standard error.
    """
    async with AsyncExitStack() as running:
        pids: dict[str, int] = {}
        addresses = []
        for index in range(SERVERS):
            port = free_port()
            command = [programs.rpc_server, "-H", "127.0.0.1", "-p", str(port), "-t", str(threads)]
            process = await running.enter_async_context(peer_process(command))
            await until([process], partial(listens, port))
            pids[f"rpc-server-{index + 1}"] = process.pid
            addresses.append(f"127.0.0.1:{port}")
        port = free_port()
        command = [programs.server, "-m", gguf, "--rpc", ",".join(addresses), "-ngl", ALL_LAYERS, "-c", str(CONTEXT)]
        command += ["-t", str(threads), "-np", "1", "--host", "127.0.0.1", "--port", str(port), "--no-webui"]
        process = await running.enter_async_context(peer_process(command))
        pids["llama-server"] = process.pid
        # The server closes a connection that the other systems' turns leave idle, just when it is used again.
        connector = aiohttp.TCPConnector(force_close=True)
        session = await running.enter_async_context(aiohttp.ClientSession(connector=connector))
        url = f"http://127.0.0.1:{port}"
        await until([process], partial(_healthy, session, url))
        yield LlamaRpcSystem(name, url, pids, session)


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False
