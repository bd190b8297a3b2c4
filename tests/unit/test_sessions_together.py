"""Decode steps of several sessions in one forward answer as each does alone, for every family; so do those beside them.

Sessions of different lengths, beyond a sliding window and short of it, join and leave; tokens are given, so that one
that differs hides nothing, and logits are compared. What must not happen is shown to be seen: rows swapped, state lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshnet_core.errors import CacheMissError, HopFailedError, MissReason
from meshnet_node.layer_view import ForwardCancelledError
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.ragged_cache import RaggedCache
from meshnet_node.session_state import SessionState
from meshnet_node.shard_work import ShardResult, ShardWork
from shard_routes import Models, Route, assert_close, assert_far
from tiny_models import ALL, CORE, VOCAB, num_layers

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (5, 17, 30, 1, 12, 9, 23, 11)
"""Of the prompts: windows of the tiny models are of 11 positions."""
STEPS = 16
ALONE = {"deepseek_v3", "falcon_h1", "kimi_linear", "llama4_text", "minimax", "zamba2"}
"""Families whose steps run one by one."""


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


PROMPTS = [tokens(length, 10 + length) for length in LENGTHS]
ANSWERS = [tokens(STEPS, 50 + length) for length in LENGTHS]


def two_hops(models: Models, family: str) -> Route:
    """The second with an effective start inside its shard, where the family can be cut."""
    layers = num_layers(family)
    if family in ("gemma3n_text", "zamba2"):
        return models.route(family, [(0, layers, 0)])
    cut = layers // 2
    return models.route(family, [(0, cut, 0), (cut - 1, layers, cut)])


def prefilled(route: Route, session: int) -> list[SessionState]:
    states = route.open()
    route.prefill(PROMPTS[session], states, chunk=7)
    return states


def step(session: int, at: int, state: SessionState, **changes: Any) -> ShardWork:
    """The frame of a session's step into the first hop."""
    payload = torch.tensor(ANSWERS[session][at : at + 1], dtype=torch.int32).numpy().tobytes()
    work = ShardWork(0, state, len(PROMPTS[session]) + at, 1, payload, "float32", sample=1)
    return replace(work, **changes)


def run(route: Route, works: Sequence[ShardWork], states: Sequence[Sequence[SessionState]]) -> list[torch.Tensor]:
    """Frames of several sessions through all hops, together at each; logits ``[vocab]`` of each."""
    for hop, (shard, start) in enumerate(route.hops):
        works = [replace(work, start=start, state=state[hop]) for work, state in zip(works, states, strict=True)]
        results = shard.forward(works)
        done = [result for result in results if isinstance(result, ShardResult)]
        assert len(done) == len(works), results
        if done[0].logits is not None:
            return [result.logits[-1] for result in done if result.logits is not None]
        works = [replace(work, payload=result.hidden) for work, result in zip(works, done, strict=True)]
    raise AssertionError("the route has no last shard")


@pytest.fixture(scope="module")
def alone(models: Models) -> Callable[[str], list[torch.Tensor]]:
    """Logits ``[STEPS, vocab]`` of each session's steps, one session after the other."""

    @functools.cache
    def answers(family: str) -> list[torch.Tensor]:
        route = two_hops(models, family)
        return [route.decode(ANSWERS[at], len(PROMPTS[at]), prefilled(route, at)) for at in range(len(LENGTHS))]

    return answers


families = pytest.mark.parametrize(
    "family", [*CORE, *(pytest.param(family, marks=pytest.mark.long) for family in ALL if family not in CORE)]
)


@families
def test_sessions_that_join_and_leave_answer_as_each_does_alone(
    family: str, models: Models, alone: Callable[[str], list[torch.Tensor]]
) -> None:
    route = two_hops(models, family)
    limit = 1 if family in ALONE else 32
    assert [shard.batch_limit for shard, _ in route.hops] == [limit] * len(route.hops)
    begins = [0, 0, 0, 2, 3, 3, 5, 7]  # the round in which a session makes its first step
    states: dict[int, list[SessionState]] = {}
    found: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for turn in range(STEPS + max(begins)):
        here = [at for at, first in enumerate(begins) if first <= turn < first + STEPS]
        here = here[turn % len(here) :] + here[: turn % len(here)]  # rows change places from step to step
        for at in here:
            states.setdefault(at, prefilled(route, at) if turn == begins[at] else [])
        works = [step(at, turn - begins[at], states[at][0]) for at in here]
        for at, row in zip(here, run(route, works, [states[at] for at in here]), strict=True):
            found[at].append(row)
    for at, expected in enumerate(alone(family)):
        logits = torch.stack(found[at])
        assert_close(logits, expected)
        assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "lfm2", "mamba2"])
def test_a_step_that_ran_with_others_leaves_the_state_that_it_leaves_alone(family: str, models: Models) -> None:
    route = two_hops(models, family)
    states = [prefilled(route, at) for at in range(3)]
    run(route, [step(at, 0, states[at][0]) for at in range(3)], states)
    for at in range(3):
        by_itself = prefilled(route, at)
        route.decode(ANSWERS[at][:1], len(PROMPTS[at]), by_itself)
        for ours, theirs in zip(states[at], by_itself, strict=True):
            assert (ours.position, ours.spoiled, ours.nbytes) == (theirs.position, False, theirs.nbytes)
            for one, other in zip(ours.tensors(), theirs.tensors(), strict=True):
                assert one.dtype == other.dtype
                assert_close(one, other)


# -- what would be wrong is seen -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_moe_text", "lfm2"])
def test_rows_that_change_places_are_seen(
    family: str, models: Models, alone: Callable[[str], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    route = two_hops(models, family)
    states = [prefilled(route, at) for at in range(2)]
    made = RaggedCache.__init__

    def swapped(self: RaggedCache, caches: Sequence[Any], apart: Collection[int]) -> None:
        made(self, caches[::-1], apart)

    monkeypatch.setattr(RaggedCache, "__init__", swapped)
    rows = run(route, [step(at, 0, states[at][0]) for at in range(2)], states)
    for at in range(2):
        assert_far(rows[at], alone(family)[at][0])


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "mamba2"])
def test_linear_states_that_are_not_given_back_are_seen(
    family: str, models: Models, alone: Callable[[str], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    route = two_hops(models, family)
    states = [prefilled(route, at) for at in range(2)]
    monkeypatch.setattr(RaggedCache, "give_back", lambda _self: None)
    for turn in range(4):
        rows = run(route, [step(at, turn, states[at][0]) for at in range(2)], states)
    for at in range(2):
        assert_far(rows[at], alone(family)[at][3])


# -- which frames run together, and what one of them does to the others ---------------------------------------------


@pytest.fixture
def shard(models: Models) -> TorchModelShard:
    return models.shard("llama", 0, num_layers("llama"))


@pytest.fixture
def route(shard: TorchModelShard) -> Route:
    return Route([(shard, 0)])


def works_of(route: Route, count: int = 3) -> list[ShardWork]:
    return [step(at, 0, prefilled(route, at)[0]) for at in range(count)]


def counted(monkeypatch: pytest.MonkeyPatch, shard: TorchModelShard) -> list[int]:
    """How many rows each forward of several sessions has."""
    rows: list[int] = []
    view = shard._view(0)
    together = view.forward_together

    def count(inputs: torch.Tensor, **arguments: Any) -> torch.Tensor:
        rows.append(len(inputs))
        return together(inputs, **arguments)

    monkeypatch.setattr(view, "forward_together", count)
    return rows


def test_only_steps_on_state_run_together(
    shard: TorchModelShard, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = counted(monkeypatch, shard)
    steps = works_of(route, 5)
    ids = torch.tensor([7, 8, 9], dtype=torch.int32).numpy().tobytes()
    beside = [
        replace(steps[3], exact=True),
        replace(steps[4], seq_len=3, payload=ids),
        ShardWork(0, None, 0, 3, ids, "float32", sample=1),
        ShardWork(0, shard.new_state(0), 0, 1, ids[:4], "float32", sample=1),
    ]
    assert [shard.batch_key(work) for work in steps[:3]] == [0, 0, 0]
    assert [shard.batch_key(work) for work in beside] == [None] * 4
    results = shard.forward([beside[0], steps[0], beside[1], steps[1], beside[2], steps[2], beside[3]])
    assert all(isinstance(result, ShardResult) for result in results)
    assert rows == [3]


def test_steps_that_start_at_other_layers_do_not_run_together(shard: TorchModelShard) -> None:
    hidden = torch.zeros(32).numpy().tobytes()
    work = ShardWork(1, shard.new_state(1), 4, 1, hidden, "float32")
    assert shard.batch_key(work) == 1
    assert shard.batch_key(replace(work, start=77)) is None


def test_a_frame_that_is_refused_leaves_the_others_to_the_forward(
    shard: TorchModelShard, route: Route, monkeypatch: pytest.MonkeyPatch, alone: Callable[[str], list[torch.Tensor]]
) -> None:
    rows = counted(monkeypatch, shard)
    works = works_of(route)
    works[1] = replace(works[1], position=3)
    results = shard.forward(works)
    assert isinstance(results[1], CacheMissError)
    assert results[1].reason is MissReason.POSITION_MISMATCH
    assert rows == [2]
    for at in (0, 2):
        result = results[at]
        assert isinstance(result, ShardResult)
        assert result.logits is not None
        assert_close(result.logits[0], alone("llama")[at][0])
    assert [work.state is not None and work.state.spoiled for work in works] == [False] * 3


@pytest.mark.parametrize("looks", [0, 3])
def test_a_frame_that_is_cancelled_before_or_while_it_runs_is_the_only_one(
    shard: TorchModelShard, route: Route, looks: int, alone: Callable[[str], list[torch.Tensor]]
) -> None:
    works = works_of(route)
    seen = iter(range(1000))
    works[0] = replace(works[0], cancelled=lambda: next(seen) >= looks)
    results = shard.forward(works)
    assert isinstance(results[0], ForwardCancelledError)
    assert works[0].state is not None
    assert works[0].state.spoiled
    for at in (1, 2):
        result, state = results[at], works[at].state
        assert isinstance(result, ShardResult)
        assert result.logits is not None
        assert_close(result.logits[0], alone("llama")[at][0])
        assert state is not None
        assert not state.spoiled


def test_a_forward_that_all_have_left_ends_between_two_layers(shard: TorchModelShard, route: Route) -> None:
    looked: list[int] = []

    def cancelled() -> bool:
        looked.append(1)
        return len(looked) > 4

    works = [replace(work, cancelled=cancelled) for work in works_of(route, 2)]
    results = shard.forward(works)
    assert [type(result) for result in results] == [ForwardCancelledError] * 2
    assert [work.state is not None and work.state.spoiled for work in works] == [True] * 2


def test_a_forward_that_fails_spoils_the_states_of_all_in_it_and_no_other(
    shard: TorchModelShard, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = works_of(route, 4)
    works[3] = replace(works[3], exact=True)
    monkeypatch.setattr(RaggedCache, "give_back", lambda _self: 1 / 0)
    results = shard.forward(works)
    assert [type(result) for result in results] == [HopFailedError] * 3 + [ShardResult]
    assert [work.state is not None and work.state.spoiled for work in works] == [True] * 3 + [False]
    again = shard.forward([replace(works[0], position=works[0].position + 1)])
    assert isinstance(again[0], CacheMissError)
    assert again[0].reason is MissReason.FAILED


def test_what_overflows_the_wire_costs_its_own_session_alone(models: Models) -> None:
    front = models.shard("llama", 0, 2)
    route = Route([(front, 0)])
    works = []
    for at in range(2):
        (state,) = route.open()
        ids = torch.tensor(PROMPTS[at], dtype=torch.int32).numpy().tobytes()
        assert isinstance(front.forward([ShardWork(0, state, 0, len(PROMPTS[at]), ids, "float32")])[0], ShardResult)
        works.append(step(at, 0, state, sample=0))
    works[0] = replace(works[0], wire_dtype="float16")
    embedding = front._model.get_input_embeddings()
    assert isinstance(embedding, torch.nn.Embedding)
    token = ANSWERS[0][0]
    assert token != ANSWERS[1][0]
    kept = embedding.weight.data[token].clone()
    embedding.weight.data[token] = 3e5
    try:
        results = front.forward(works)
    finally:
        embedding.weight.data[token] = kept
    assert isinstance(results[0], HopFailedError)
    assert isinstance(results[1], ShardResult)
    assert [work.state is not None and work.state.spoiled for work in works] == [True, False]


def test_a_closed_shard_says_so_to_each(models: Models, tmp_path: Path) -> None:
    own = Models(tmp_path)
    shard = own.shard("llama", 0, num_layers("llama"))
    works = works_of(Route([(shard, 0)]), 2)
    shard.close()
    results = shard.forward(works)
    assert [type(result) for result in results] == [HopFailedError] * 2
