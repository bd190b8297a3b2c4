"""Two turns of sessions of every kind at once, on a mesh in this process.

Some draft, some lose their state in mid-answer, some have it replayed exactly. All have prompts of several chunks,
share forwards where they can, and begin their second turn on what the first one left.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from drafters import KnowingDrafter, counted, now_and_then
from in_process_mesh import MODEL, TinyMesh, random_prompt
from mesh_on_sockets import SocketTransport
from meshnet_core.errors import MissReason
from meshnet_core.frames import Frame, FrameReply, Phase
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_core.transport import FrameAnswered
from meshnet_gateway.generation import GenerationEngine, GenerationRequest
from meshnet_gateway.prefix_reuse import PrefixWish
from meshnet_gateway.recovery import Replay
from meshnet_gateway.speculation import OFF, Speculate
from meshnet_node.cache_store import SessionKey
from meshnet_node.frame_schedule import Sequences, greedy_answer
from meshnet_node.shard_work import ShardResult, ShardWork
from meshnet_node.unsplit_model import UnsplitModel

COUNT, CHUNK, QUESTION, PATIENCE_S = 12, 8, 5, 120
DRAFTS = Speculate(5, always=True)


@dataclass(frozen=True)
class Kind:
    """One session: whether it drafts, after which tokens it loses its state at which hop, and how that is mended."""

    speculate: Speculate = OFF
    lost: tuple[tuple[int, int], ...] = ()
    replay: Replay | None = None


KINDS = (
    Kind(),
    Kind(lost=((5, 0),)),
    Kind(lost=((8, 1),)),
    Kind(DRAFTS),
    Kind(DRAFTS, lost=((3, 1),)),  # so early that no step can have brought all of the answer
    Kind(replay=Replay.EXACT, lost=((6, 1),)),
    Kind(replay=Replay.EXACT),
)
PROMPTS = [tuple(random_prompt(19 + 3 * min(at, 5), seed=min(at, 5))) for at in range(len(KINDS))]  # the last two alike


class AllBegin(SocketTransport):
    """Holds first steps until every session has come so far, so that they are under way together."""

    def __init__(self) -> None:
        super().__init__()
        self.all_here = asyncio.Event()
        self._here: set[str] = set()

    async def forward(self, url: str, frame: Frame) -> FrameReply:
        if frame.phase is not Phase.PREFILL and frame.hop_index == 0:
            self._here.add(frame.session)
            if len(self._here) == len(KINDS):
                self.all_here.set()
            await self.all_here.wait()
        return await super().forward(url, frame)

    def send(self, url: str, frame: Frame, answered: FrameAnswered) -> Callable[[], None] | None:
        return super().send(url, frame, answered) if self.all_here.is_set() else None


def hold_first_step(mesh: TinyMesh, transport: AllBegin) -> None:
    """At the first node, until those of all other sessions wait there too: some then share a forward."""
    shard, lane = mesh.backends[0], mesh.services[mesh.urls[0]]._lane
    run, gathered = shard.forward, threading.Event()

    def forward(works: Sequence[ShardWork]) -> list[ShardResult | Exception]:
        if transport.all_here.is_set() and not gathered.is_set():
            give_up = time.monotonic() + PATIENCE_S
            while lane.queued < len(KINDS) and time.monotonic() < give_up:
                time.sleep(0.002)
            gathered.set()
        return run(works)

    shard.forward = forward  # type: ignore[method-assign]


async def answered(
    mesh: TinyMesh, engine: GenerationEngine, kind: Kind, prompt: tuple[int, ...], wish: PrefixWish
) -> tuple[Sequences, dict[str, Any]]:
    request = GenerationRequest(
        MODEL, prompt, COUNT, SamplingParams(), recovery=kind.replay, prefix=wish, speculate=kind.speculate
    )
    generation, lost = engine.start(request), dict(kind.lost)
    ids: list[int] = []
    try:
        async with aclosing(aiter(generation)) as events:
            async for event in events:
                if not isinstance(event, SampledToken):
                    continue
                ids.append(event.id)
                if (hop := lost.get(len(ids))) is not None:
                    store = mesh.services[mesh.urls[hop]].store
                    store.drop(SessionKey(generation.session, hop), MissReason.EXPIRED)
    finally:
        await generation.aclose()
    return Sequences(prompt, tuple(ids)), generation.report()


async def two_turns(mesh: TinyMesh, whole: UnsplitModel) -> list[Sequences]:
    """Of all sessions at once; that the options were at work is checked here."""
    prompts: list[tuple[int, ...]] = PROMPTS
    ends: list[tuple[int, ...]] = [()] * len(KINDS)
    engine, accepted = mesh.engine(chunk=CHUNK), 0
    given: list[Sequences] = []
    for turn in range(2):
        drafting = [prompt for kind, prompt in zip(KINDS, prompts, strict=True) if kind.speculate is DRAFTS]
        answers = [greedy_answer(whole, prompt, COUNT)[0] for prompt in drafting]
        engine.drafter = partial(KnowingDrafter, [[*a.prompt, *a.answer] for a in answers], now_and_then, counted)
        wishes = [PrefixWish(f"chat-{at}", (len(prompt) - 1,), ends[at]) for at, prompt in enumerate(prompts)]
        sessions = [answered(mesh, engine, *each) for each in zip(KINDS, prompts, wishes, strict=True)]
        runs, reports = zip(*await asyncio.gather(*sessions), strict=True)
        for kind, run, report in zip(KINDS, runs, reports, strict=True):
            assert (len(run.answer), report["mode"], report["epochs"]) == (COUNT, "cached", 1 + len(kind.lost))
            assert kind.speculate is DRAFTS or "drafted_tokens" not in report
            accepted += report.get("accepted_tokens", 0)
            # All of the turn before, but for a last token that no node has run; exact replays begin on nothing.
            reused = len(run.prompt) - QUESTION - 1 if turn and kind.replay is not Replay.EXACT else 0
            assert reused <= report["cached_tokens"] <= reused + bool(reused)
        assert runs[-1] == runs[-2]
        given += runs
        ends = [(len(run.prompt) + COUNT - 1, len(run.prompt) + COUNT) for run in runs]
        new = [random_prompt(QUESTION, seed=90 + min(at, 5)) for at in range(len(KINDS))]
        prompts = [(*run.prompt, *run.answer, *question) for run, question in zip(runs, new, strict=True)]
    assert accepted > 0
    assert max(mesh.services[mesh.urls[0]]._lane.batches) > 1
    assert mesh.held_sessions == 0
    return given
