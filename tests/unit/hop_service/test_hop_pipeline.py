"""Three hops: chunks of a prefill run on all of them at once, and one that was acknowledged too early is not lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from hop_line import HIDDEN, PROMPT, SESSION, Gate, decode_frame, document, settle, tokens_frame, until
from in_process_mesh import FINGERPRINT, MODEL, TinyMesh, tiny_mesh
from meshnet_core.errors import HopUnreachableError
from meshnet_core.frames import Frame
from meshnet_core.layer_range import LayerRange
from meshnet_core.route import Hop, Route
from meshnet_node.cache_store import SessionKey
from meshnet_node.hop_session import HopSession
from meshnet_node.shard_work import ShardResult, ShardWork

RANGES = ["0-0", "1-1", "2-3"]
CHUNKS = [tokens_frame(PROMPT[at : at + 4], at, sample=int(at == 8)) for at in (0, 4, 8)]


@pytest.fixture
async def mesh(folder: Path) -> AsyncIterator[TinyMesh]:
    """A session is open on three hops."""
    async with tiny_mesh(folder, RANGES) as mesh:
        hops = tuple(Hop(url[7:], url, LayerRange.parse(RANGES[at])) for at, url in enumerate(mesh.urls))
        terms = document(route=Route(MODEL, FINGERPRINT, 4, hops))
        for at, url in enumerate(mesh.urls):
            await mesh.transport.open(url, terms.for_hop(at))
        yield mesh


def held(mesh: TinyMesh, hop: int) -> HopSession:
    found = mesh.services[mesh.urls[hop]].store.find(SessionKey(SESSION, hop))
    assert found is not None
    return found[0]


def note_forwards(mesh: TinyMesh, hop: int, gate: Gate | None = None) -> list[int]:
    """Positions of the frames that run at ``hop``, which ``gate`` holds up."""
    backend, forwards = mesh.backends[hop], list[int]()
    forward = backend.forward

    def noted(works: Sequence[ShardWork]) -> list[ShardResult | Exception]:
        if gate is not None:
            gate()
        forwards.extend(work.position for work in works)
        return forward(works)

    backend.forward = noted  # type: ignore[method-assign]
    return forwards


async def test_a_chunk_is_acknowledged_as_soon_as_the_next_hop_has_it(
    mesh: TinyMesh, gate: Gate, expected: list[int]
) -> None:
    """The second hop is busy; the first takes in chunk after chunk meanwhile, and what waits is counted."""
    note_forwards(mesh, 1, gate)
    first = mesh.services[mesh.urls[0]]
    for frame in CHUNKS[:2]:
        reply = await asyncio.wait_for(first.forward(frame), 20)
        assert (reply.position, reply.tokens) == (frame.position + 4, ())
    assert held(mesh, 1).in_flight == 2
    assert held(mesh, 1).nbytes == 2 * 4 * HIDDEN * 4
    last = asyncio.create_task(first.forward(CHUNKS[2]))
    await settle()
    assert not last.done()
    gate.open()
    assert (await last).tokens[0].id == expected[0]


@pytest.mark.parametrize("breaks", [1, 3])
async def test_a_chunk_whose_delivery_broke_after_it_was_acknowledged_is_delivered_before_the_next(
    mesh: TinyMesh, expected: list[int], breaks: int
) -> None:
    """Nobody would send it again. Once is healed on the spot; where it goes on, the next frame says so."""
    broken: list[int] = []

    def break_(url: str, frame: Frame) -> None:
        if url == mesh.urls[2] and frame.position == 0 and len(broken) < breaks:
            broken.append(frame.position)
            raise HopUnreachableError("broken on purpose", hop_index=2)

    forwards = [note_forwards(mesh, hop) for hop in range(3)]
    mesh.transport.on_forward = break_
    first = mesh.services[mesh.urls[0]]
    await first.forward(CHUNKS[0])
    await until(lambda: held(mesh, 1).in_flight == 0)
    await first.forward(CHUNKS[1])
    await until(lambda: held(mesh, 1).in_flight == 0)
    if breaks > 1:
        assert broken == [0, 0, 0]
    reply = await asyncio.wait_for(first.forward(CHUNKS[2]), 5)  # well before an early frame would be given up
    assert reply.tokens[0].id == expected[0]
    assert (await first.forward(decode_frame(expected[0], 12))).tokens[0].id == expected[1]
    assert forwards == [[0, 4, 8, 12]] * 3
