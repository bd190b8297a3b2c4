"""After a tail's death: prefilling everything again, against replaying only the lost span of layers.

    python -m benchmarks.lost_span [--repeats 3] [--positions 200,1500] [--dtype float32]

A prototype, driven from here over the real wire between real processes: this process stands between the nodes, keeps
the boundary activations that the hop before the tail sent (what such a hop would have to keep), and after the tail's
SIGKILL either prefills prompt and answer through the whole route with a spare tail, as `meshnet_gateway.generation`
does, or sends the kept activations to the spare alone. Both must give the same token. One thread a node, SmolLM2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import struct
import tempfile
import time
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from meshnet_cli import serving
from meshnet_cli.children import Child, Children
from meshnet_core.clock import SystemClock
from meshnet_core.errors import MeshnetError
from meshnet_core.frames import MAX_CHUNK, Frame, FrameReply, Phase
from meshnet_core.http_transport import HttpTransport
from meshnet_core.ids import mint_session_id
from meshnet_core.membership import NodeInfo
from meshnet_core.open_document import OpenDocument, OpenReply, ProbeReply
from meshnet_core.prefix import Mark
from meshnet_core.route import Hop, Route
from meshnet_core.sampling import SamplingParams
from meshnet_core.tracker_client import TrackerClient
from meshnet_gateway.prefill_cut import LEAST_IN_FLIGHT
from meshnet_node import torch_server

SPLITS = {2: ("0-14", "15-29"), 3: ("0-9", "10-19", "20-29")}
STEPS = 4
DEADLINE_MS = 120_000
HIDDEN = 576


@dataclass
class Keeper:
    """Runs a session hop by hop from here and keeps what went into the tail."""

    transport: HttpTransport
    document: OpenDocument
    kept: list[bytes] = field(default_factory=list)  # bodies into the tail, in order
    positions: int = 0

    async def open(self) -> None:
        hops = self.document.route.hops
        opens = (self.transport.open(hop.url, self.document.for_hop(i)) for i, hop in enumerate(hops))
        await asyncio.gather(*opens)

    async def prefill(self, tokens: list[int]) -> FrameReply:
        """As the gateway does it: chunks, several in flight, into the first hop; the hops pass them on."""
        in_flight: deque[asyncio.Task[FrameReply]] = deque()
        for start in range(0, len(tokens), MAX_CHUNK):
            chunk = tokens[start : start + MAX_CHUNK]
            if len(in_flight) == LEAST_IN_FLIGHT:
                await in_flight.popleft()
            frame = self._frame(
                0, Phase.PREFILL, start, len(chunk), int(start + len(chunk) == len(tokens)), _ids(chunk)
            )
            in_flight.append(asyncio.create_task(self.transport.forward(self.document.route.hops[0].url, frame)))
        while in_flight:
            reply = await in_flight.popleft()
        return reply

    async def replay(self, boundary: bytes, width: int) -> FrameReply:
        """Only the tail: the kept activations, a chunk at a time."""
        index = len(self.document.route.hops) - 1
        hop = self.document.route.hops[index]
        await self.transport.open(hop.url, self.document.for_hop(index))
        total = len(boundary) // width
        for start in range(0, total, MAX_CHUNK):
            end = min(start + MAX_CHUNK, total)
            body = boundary[start * width : end * width]
            frame = self._frame(index, Phase.PREFILL, start, end - start, int(end == total), body)
            reply = await self.transport.forward(hop.url, frame)
        return reply

    async def release(self) -> None:
        for hop in self.document.route.hops:
            await self.transport.release(hop.url, self.document.session)

    def _frame(self, index: int, phase: Phase, position: int, seq_len: int, sample: int, body: bytes) -> Frame:
        return Frame(
            session=self.document.session,
            epoch=self.document.epoch,
            hop_index=index,
            start_layer=self.document.route.hops[index].layers.start,
            phase=phase,
            position=position,
            seq_len=seq_len,
            sample=sample,
            deadline_ms=DEADLINE_MS,
            cache=True,
            body=body,
        )


def _ids(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def document_for(route: Route, tokens: list[int], dtype: str) -> OpenDocument:
    """Terms of a fresh session that prefills ``tokens``."""
    return OpenDocument(
        session=mint_session_id(),
        epoch=0,
        hop_index=0,
        route=route,
        wire_dtype=dtype,
        hidden_size=HIDDEN,
        cache=True,
        sampling=SamplingParams(),
        prompt_length=len(tokens),
        prefill_length=len(tokens),
        expected_length=len(tokens) + STEPS,
        step_deadline_ms=DEADLINE_MS,
        history=tuple(tokens),
    )


async def boundary_of(transport: HttpTransport, route: Route, tokens: list[int], dtype: str, tap: Tap) -> bytes:
    """The activations into the tail for ``tokens``, kept on their way by the tap that the tail is dialled through."""
    tap.bodies.clear()
    keeper = Keeper(transport, document_for(route, tokens, dtype))
    await keeper.open()
    await keeper.prefill(tokens)
    await keeper.release()
    return b"".join(body for _, body in sorted(tap.bodies))


class Tap:
    """An endpoint that passes everything on to the tail and keeps the bodies of its frames."""

    def __init__(self, transport: HttpTransport, url: str) -> None:
        self._transport = transport
        self._url = url
        self.bodies: list[tuple[int, bytes]] = []

    async def open(self, document: OpenDocument) -> OpenReply:
        return await self._transport.open(self._url, document)

    async def forward(self, frame: Frame) -> FrameReply:
        self.bodies.append((frame.position, bytes(frame.body)))
        return await self._transport.forward(self._url, frame)

    async def release(self, session: str, through_epoch: int | None = None, keep: tuple[Mark, ...] = ()) -> int:
        return await self._transport.release(self._url, session, through_epoch, keep)

    async def probe(self, session: str | None) -> ProbeReply:
        return await self._transport.probe(self._url, session)


def route_of(nodes: list[NodeInfo], tail_url: str | None = None) -> Route:
    """The nodes in order of their layers; the tail dialled elsewhere where ``tail_url`` says so."""
    shards = [(node, node.shards[0]) for node in nodes]
    hops = [Hop(node.node_id, node.url, shard.layers, shard.dtype, node.version) for node, shard in shards]
    if tail_url is not None:
        hops[-1] = replace(hops[-1], url=tail_url)
    shard = nodes[0].shards[0]
    return Route(shard.model, shard.fingerprint, shard.num_layers, tuple(hops))


async def measure(
    count: int, children: Children, tracker_url: str, options: argparse.Namespace
) -> list[dict[str, object]]:
    """One row for each number of positions, over ``count`` nodes and a spare tail."""
    names = [f"node-{index}" for index in range(count)]
    started: list[Child] = []
    common = ["--tracker", tracker_url, "--port", "0", "--dtype", options.dtype, "--quantize", "none", "--threads", "1"]
    for name, layers in zip([*names, "spare"], [*SPLITS[count], SPLITS[count][-1]], strict=True):
        arguments = ["node", "smollm2", "--layers", layers, *common, "--name", f"{name}-of-{count}", "--insecure"]
        started.append(children.start(f"{name}-of-{count}", arguments))
    children.wait_ready(*started, timeout_s=300)
    client, transport = TrackerClient(tracker_url), HttpTransport(SystemClock())
    known = {node.node_id: node for node in (await client.snapshot()).nodes}
    nodes = [known[f"{name}-of-{count}"] for name in names]
    spare = known[f"spare-of-{count}"]
    tap = Tap(transport, nodes[-1].url)
    app = torch_server.create_app(
        tap, boot="b-tap", status=dict, text_files=lambda fingerprint: None, max_body=64 * 2**20
    )
    sock, serving_tap = serving.listen("127.0.0.1", 0), AsyncExitStack()
    await serving_tap.enter_async_context(
        serving.serving_aiohttp(torch_server.runner_for(app), sock, None, torch_server.new_doorkeeper())
    )
    tapped = route_of(nodes, serving.url_of("127.0.0.1", serving.port_of(sock)))
    rescued = route_of([*nodes[:-1], spare])
    width = HIDDEN * (4 if options.dtype == "float32" else 2)
    rows: list[dict[str, object]] = []
    kept: dict[int, tuple[list[int], bytes]] = {}
    for positions in options.positions:
        tokens = [(7 * index + index * index // 3) % 40_000 + 100 for index in range(positions)]
        kept[positions] = (tokens, await boundary_of(transport, tapped, tokens, options.dtype, tap))
    # The death itself, noticed as the gateway notices it: the next frame finds nobody.
    victim = started[count - 1].process
    keeper = Keeper(transport, document_for(tapped, kept[options.positions[0]][0], options.dtype))
    await keeper.open()
    killed = time.perf_counter()
    victim.kill()
    victim.wait()
    try:
        await keeper.prefill(kept[options.positions[0]][0])
    except MeshnetError:
        noticed_ms = 1000 * (time.perf_counter() - killed)
    for positions, (tokens, boundary) in kept.items():
        full_ms, span_ms = [], []
        for _ in range(options.repeats):
            whole = Keeper(transport, document_for(rescued, tokens, options.dtype))
            began = time.perf_counter()
            await whole.open()
            token = (await whole.prefill(tokens)).tokens[0].id
            full_ms.append(1000 * (time.perf_counter() - began))
            await whole.release()
            span = Keeper(transport, document_for(rescued, tokens, options.dtype))
            began = time.perf_counter()
            replayed = (await span.replay(boundary, width)).tokens[0].id
            span_ms.append(1000 * (time.perf_counter() - began))
            await span.release()
            if replayed != token:
                raise SystemExit(f"the replayed span gave token {replayed}, the whole prefill {token}")
        rows.append(
            {
                "nodes": count,
                "positions": positions,
                "noticed_ms": round(noticed_ms, 1),
                "full_ms": round(statistics.median(full_ms), 1),
                "span_ms": round(statistics.median(span_ms), 1),
                "full_over_span": round(statistics.median(a / b for a, b in zip(full_ms, span_ms, strict=True)), 2),
                "kill_to_token_full_ms": round(noticed_ms + statistics.median(full_ms), 1),
                "kill_to_token_span_ms": round(noticed_ms + statistics.median(span_ms), 1),
                "kept_bytes": len(boundary),
            }
        )
    await serving_tap.aclose()
    await transport.close()
    await client.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--positions", type=lambda text: [int(n) for n in text.split(",")], default=[200, 1500])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for count in SPLITS:
        with tempfile.TemporaryDirectory() as folder, Children(Path(folder)) as children:
            tracker = children.start("tracker", ["tracker", "--port", "0", "--insecure"])
            children.wait_ready(tracker, timeout_s=60)
            rows += asyncio.run(measure(count, children, str(tracker.url), options))
    table = Table(
        "nodes", "positions", "noticed, ms", "to next token: all again, ms", "only the span, ms", "all / span", "kept"
    )
    for row in rows:
        keys = (
            "nodes",
            "positions",
            "noticed_ms",
            "kill_to_token_full_ms",
            "kill_to_token_span_ms",
            "full_over_span",
            "kept_bytes",
        )
        table.add_row(*(str(row[key]) for key in keys))
    Console().print(table)
    print(json.dumps({"benchmark": "lost_span", "dtype": options.dtype, "rows": rows}))


if __name__ == "__main__":
    main()
