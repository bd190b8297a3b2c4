"""Generations over a transport on which much goes wrong: every answer is right, and nothing is left behind."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from chaos_transport import ChaosTransport
from drafters import KnowingDrafter, counted, now_and_then
from in_process_mesh import MODEL, TinyMesh, random_prompt, reference_greedy, reference_model, tiny_mesh
from meshnet_core.errors import MissReason
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_gateway.generation import GenerationEngine, GenerationRequest
from meshnet_gateway.prefix_reuse import PrefixWish
from meshnet_gateway.recovery import Replay
from meshnet_gateway.speculation import Drafter, Speculate
from meshnet_node.cache_store import SessionKey
from prefix_chat import HOLDING
from tiny_models import save_tiny

AT_ONCE, COUNT = 4, 12
PROMPTS = [random_prompt(3 + 4 * index, seed=index) for index in range(6)]
DRAFTS = Speculate(4, always=True)
HOT = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=5)


@dataclass(frozen=True)
class Mix:
    """A model, cut, and the share of the generations that it gets."""

    family: str
    ranges: tuple[str, ...]
    share: float


MIXES = [
    Mix("llama", ("0-1", "2-3"), 0.35),
    Mix("llama", ("0-1", "1-3", "2-3", "0-0"), 0.25),  # others cover, one from inside its shard
    Mix("qwen3_5_moe_text", ("0-0", "1-2", "3-4"), 0.4),
]


def requests(count: int) -> list[GenerationRequest]:
    """Mostly cached, some stateless, some replayed exactly, some sampled or with drafts; most begin on what others
    left."""
    ways = itertools.cycle(
        [
            {},
            {"recovery": Replay.EXACT},
            {"sampling": HOT, "speculate": DRAFTS},
            {"speculate": DRAFTS},
            {"sampling": HOT, "recovery": Replay.EXACT},
            {"cache": False},
            {"speculate": DRAFTS},
            {"sampling": HOT},
        ]
    )
    made = []
    for index, way in zip(range(count), ways, strict=False):
        prompt = tuple(PROMPTS[index % len(PROMPTS)])
        prefix = PrefixWish(keep_at=(2, len(prompt) - 1)) if index % 4 else None
        fields: dict[str, object] = {"sampling": SamplingParams(), "prefix": prefix, **way}
        made.append(GenerationRequest(MODEL, prompt, COUNT, **fields))  # type: ignore[arg-type]
    return made


async def ids_of(
    engine: GenerationEngine, request: GenerationRequest, evict: Callable[[str], None] | None = None
) -> tuple[list[int], dict[str, object]]:
    """The answer's token ids and the report; ``evict`` is told the session once, after its third token."""
    generation = engine.start(request)
    ids: list[int] = []
    try:
        async for event in generation:
            if isinstance(event, SampledToken):
                ids.append(event.id)
                if evict is not None and len(ids) == 3:
                    evict(generation.session)
    finally:
        await generation.aclose()
    return ids, generation.report()


async def expected_answers(folder: Path, ranges: Sequence[str]) -> dict[tuple[tuple[int, ...], bool], list[int]]:
    """The right answer by (prompt, sampled): the unsharded model's, and what an undisturbed mesh draws."""
    model = reference_model(folder)
    answers = {(tuple(prompt), False): reference_greedy(model, prompt, COUNT) for prompt in PROMPTS}
    async with tiny_mesh(folder, ranges) as calm:
        for prompt in PROMPTS:
            request = GenerationRequest(MODEL, tuple(prompt), COUNT, HOT, cache=False)
            answers[tuple(prompt), True], _ = await ids_of(calm.engine(chunk=5), request)
    return answers


async def storm(
    mesh: TinyMesh, todo: list[GenerationRequest], drafter: Callable[[], Drafter]
) -> tuple[list[list[int]], Counter[str]]:
    """Answer all of them, a few at a time, every fifth evicted at one hop; what was done about failures, counted."""
    engine = mesh.engine(chunk=5, step_deadline_s=20, drafter=drafter)
    answers: list[list[int]] = [[] for _ in todo]
    done: Counter[str] = Counter()
    queue = list(enumerate(todo))

    def evict(session: str) -> None:
        for service in mesh.services.values():
            for held in list(service.store):
                if held.document.session == session:
                    service.store.prefixes.give_way(1)  # what was told of at some open may be gone at its first frame
                    service.store.drop(SessionKey(session, held.document.hop_index), MissReason.EVICTED)
                    return

    async def worker() -> None:
        while queue:
            index, request = queue.pop(0)
            answers[index], report = await ids_of(engine, request, evict if index % 5 == 0 else None)
            done.update(event["action"] for event in report["recoveries"])  # type: ignore[attr-defined]
            done["reused"] += bool(report["cached_tokens"])
            done["drafted"] += int(report.get("drafted_tokens", 0))  # type: ignore[call-overload]
            done["accepted"] += int(report.get("accepted_tokens", 0))  # type: ignore[call-overload]

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())
    return answers, done


async def check(mix: Mix, folder: Path, count: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    save_tiny(mix.family, folder)
    expected = await expected_answers(folder, mix.ranges)
    transport = ChaosTransport(seed)
    async with tiny_mesh(folder, mix.ranges, limits=HOLDING, transport=transport, measured=True) as mesh:
        todo = requests(count)
        texts = [[*prompt, *answer] for (prompt, _), answer in expected.items()]
        answers, done = await storm(mesh, todo, lambda: KnowingDrafter(texts, now_and_then, counted))
        for request, answer in zip(todo, answers, strict=True):
            assert answer == expected[request.prompt_ids, request.sampling is HOT]
        await transport.settle()
        assert mesh.held_sessions == 0
        for service in mesh.services.values():
            assert service.store.nbytes == service.store.prefixes.nbytes
    return transport.faults, done


def name(mix: Mix) -> str:
    return f"{mix.family} {' '.join(mix.ranges)}"


@pytest.mark.parametrize("mix", MIXES, ids=name)
async def test_60_generations_in_a_storm_are_all_right(mix: Mix, tmp_path: Path) -> None:
    faults, done = await check(mix, tmp_path, round(60 * mix.share), seed=1)
    assert all(faults[fault] for fault in ("lost", "reply_lost", "delayed", "doubled", "doubled_late", "cut"))
    assert done["Retry"]
    assert done["RePrefill"] + done["Reroute"]
    assert done["drafted"] > done["accepted"] > 0


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mix", MIXES, ids=name)
async def test_1000_generations_in_a_storm_are_all_right(mix: Mix, tmp_path: Path) -> None:
    faults, done = await check(mix, tmp_path, round(1000 * mix.share), seed=2)
    print(name(mix), dict(faults), dict(done))
    assert all(faults.values())
    assert done["Retry"]
    assert done["reused"]  # of sixty, measured routes may lead each past what another node holds
    assert done["RePrefill"] + done["Reroute"]
