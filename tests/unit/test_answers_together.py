"""Answers that are given at once over two nodes: their steps share forwards, and each is what it is alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from in_process_mesh import MODEL, TinyMesh, random_prompt, tiny_mesh
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_gateway.generation import Generation, GenerationRequest
from meshnet_gateway.recovery import Replay
from meshnet_node.forward_lane import ForwardLane
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.shard_work import ShardResult, ShardWork
from tiny_models import save_tiny

PROMPTS = [random_prompt(5 + 3 * at, seed=at) for at in range(6)]
SAMPLING = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=7),
    SamplingParams(logprobs=3),
    SamplingParams(temperature=1.0, top_k=20, seed=11),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(),
]
COUNT = 16
PATIENCE_S = 60


@pytest.fixture(scope="module", params=["llama", "qwen3_5_moe_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


class Gathering:
    """Holds the first step at a node, once all prompts have been taken in there, until all other sessions wait.

    The prompts are of different lengths. They may come in pieces, where steps of other sessions run already.
    """

    def __init__(self, shard: TorchModelShard, lane: ForwardLane, prompts: Sequence[Sequence[int]]) -> None:
        self._run: Callable[[Sequence[ShardWork]], list[ShardResult | Exception]] = shard.forward
        self._lane = lane
        self._sessions = len(prompts)
        self._awaited = {len(prompt) for prompt in prompts}
        self.gathered = threading.Event()
        shard.forward = self.forward  # type: ignore[method-assign]

    def forward(self, works: Sequence[ShardWork]) -> list[ShardResult | Exception]:
        is_step = works[0].seq_len == 1
        if is_step and not self._awaited and not self.gathered.is_set():
            give_up = time.monotonic() + PATIENCE_S
            while self._lane.queued < self._sessions and time.monotonic() < give_up:
                time.sleep(0.002)
            self.gathered.set()
        self._awaited -= {work.position + work.seq_len for work in works}
        return self._run(works)


def gather(mesh: TinyMesh, prompts: Sequence[Sequence[int]]) -> Gathering:
    return Gathering(mesh.backends[0], lane_of(mesh, 0), prompts)


def lane_of(mesh: TinyMesh, node: int) -> ForwardLane:
    return mesh.services[mesh.urls[node]]._lane


def alike(tokens: Sequence[SampledToken]) -> list[Any]:
    """What must not depend on who else is answered; logprobs but for rounding."""
    return [(token.id, None if token.logprob is None else pytest.approx(token.logprob, abs=1e-4)) for token in tokens]


async def test_answers_given_at_once_are_those_given_one_after_the_other(folder: Path) -> None:
    async with tiny_mesh(folder, ["0-1", "2-4" if "qwen" in folder.name else "2-3"]) as mesh:
        wanted = list(zip(PROMPTS, SAMPLING, strict=True))
        singly = [alike((await mesh.answer(prompt, COUNT, params))[0]) for prompt, params in wanted]
        assert set(lane_of(mesh, 0).batches) == {1}
        gathering = gather(mesh, PROMPTS)
        at_once = await asyncio.gather(*(mesh.answer(prompt, COUNT, params) for prompt, params in wanted))
        assert gathering.gathered.is_set()
        assert max(lane_of(mesh, 0).batches) >= len(wanted) / 2  # the others are at the other hop then
        for (tokens, report), expected in zip(at_once, singly, strict=True):
            assert [(token.id, token.logprob) for token in tokens] == expected
            assert (report["mode"], report["epochs"]) == ("cached", 1)
        assert mesh.held_sessions == 0


async def test_one_that_leaves_in_the_middle_changes_no_other_answer(folder: Path) -> None:
    async with tiny_mesh(folder, ["0-1", "2-4" if "qwen" in folder.name else "2-3"]) as mesh:
        expected = [[token.id for token in (await mesh.answer(prompt, COUNT))[0]] for prompt in PROMPTS[:4]]
        gather(mesh, PROMPTS[:4])
        tasks: list[asyncio.Task[Any]] = []

        def leave(at: int) -> Callable[[Generation, SampledToken], None]:
            made = iter(range(COUNT))

            def during(_generation: Generation, _token: SampledToken) -> None:
                if at == 1 and next(made) == 5:
                    tasks[at].cancel()

            return during

        tasks += [
            asyncio.create_task(mesh.answer(prompt, COUNT, during=leave(at))) for at, prompt in enumerate(PROMPTS[:4])
        ]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(outcomes[1], asyncio.CancelledError)
        for at in (0, 2, 3):
            assert not isinstance(outcomes[at], BaseException)
            assert [token.id for token in outcomes[at][0]] == expected[at]
        assert mesh.held_sessions == 0


async def test_sessions_whose_replay_is_to_be_exact_run_alone(folder: Path) -> None:
    async with tiny_mesh(folder, ["0-1", "2-4" if "qwen" in folder.name else "2-3"]) as mesh:
        gathering = gather(mesh, PROMPTS[:3])
        engine = mesh.engine(recovery=Replay.EXACT)  # type: ignore[arg-type]

        async def answer(prompt: list[int]) -> list[int]:
            generation = engine.start(GenerationRequest(MODEL, tuple(prompt), COUNT, SamplingParams()))
            try:
                return [event.id async for event in generation if isinstance(event, SampledToken)]
            finally:
                assert generation.report()["recovery"] == "exact"
                await generation.aclose()

        found = await asyncio.gather(*(answer(prompt) for prompt in PROMPTS[:3]))
        assert gathering.gathered.is_set()
        assert [set(lane_of(mesh, node).batches) for node in range(2)] == [{1}, {1}]
        assert found == [[token.id for token in (await mesh.answer(prompt, COUNT))[0]] for prompt in PROMPTS[:3]]
