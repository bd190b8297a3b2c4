"""Answers with drafts are the answers without: same tokens, fewer steps, whatever the drafts are worth.

Every shard is real and tiny, in fp32; the families hold all kinds of state: attention over everything, windows that
slid, recurrent states, convolutions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafters import KnowingDrafter, Wrongness, always, counted, never, now_and_then
from in_process_mesh import MODEL, TinyMesh, random_prompt, tiny_mesh
from meshnet_core.errors import MissReason
from meshnet_core.frames import MAX_DRAFT, Frame, Phase
from meshnet_core.grammar import Grammar
from meshnet_core.open_document import FallBack, OpenReply
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_gateway.answer_grammar import grammar_of_schema
from meshnet_gateway.generation import Generation, GenerationRequest
from meshnet_gateway.prefix_reuse import PrefixWish
from meshnet_gateway.recovery import Replay
from meshnet_gateway.speculation import AUTO, OFF, Speculate
from meshnet_gateway.step_frames import MOST_AGAIN
from meshnet_node.cache_store import SessionKey
from prefix_chat import HOLDING
from tiny_models import save_tiny
from tiny_tokenizers import ascii_files

FAMILIES = {
    "llama": ("0-1", "2-3"),
    "gemma3_text": ("0-1", "2-4"),
    "qwen3_5_moe_text": ("0-0", "1-2", "3-4"),
    "lfm2": ("0-1", "2-4"),
}
WAYS = {
    "llama": [FallBack.ANYWHERE] * 2,
    "gemma3_text": [FallBack.BEGIN] * 2,
    "qwen3_5_moe_text": [FallBack.BEGIN] * 3,
    "lfm2": [FallBack.BEGIN] * 2,
}
PROMPT = random_prompt(14)
COUNT = 26
HOT = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias=((7, 2.0),),
    seed=5,
)
LOOP = SamplingParams(logit_bias=((7, 60.0),))  # says the same for ever
SAMPLINGS = {"greedy": SamplingParams(logprobs=2), "sampled": replace(HOT, logprobs=2)}
DRAFTS: dict[str, Wrongness] = {"right": never, "wrong": always, "mixed": now_and_then}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(family, tmp_path_factory.mktemp(family))


@pytest.fixture
async def mesh(family: str, folder: Path) -> AsyncIterator[TinyMesh]:
    async with tiny_mesh(folder, FAMILIES[family], limits=HOLDING) as running:
        yield running


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
async def llama(tiny_llama: Path) -> AsyncIterator[TinyMesh]:
    async with tiny_mesh(tiny_llama, FAMILIES["llama"], limits=HOLDING) as running:
        yield running


def asked(sampling: SamplingParams | None = None, count: int = COUNT, **fields: Any) -> GenerationRequest:
    return GenerationRequest(MODEL, tuple(PROMPT), count, sampling or SamplingParams(), **fields)


async def answered(
    mesh: TinyMesh,
    request: GenerationRequest,
    speculate: Speculate = OFF,
    during: Callable[[Generation, int], None] = lambda _generation, _made: None,
    **options: Any,
) -> tuple[list[SampledToken], dict[str, Any]]:
    """The answer and the report; ``during`` is told how many tokens there are after each. Nothing is left on hops."""
    generation = mesh.engine(speculate=speculate, **options).start(request)
    tokens: list[SampledToken] = []
    try:
        async with aclosing(aiter(generation)) as events:
            async for event in events:
                if isinstance(event, SampledToken):
                    tokens.append(event)
                    during(generation, len(tokens))
    finally:
        await generation.aclose()
    assert mesh.held_sessions == 0
    report: dict[str, Any] = generation.report()
    return tokens, report


def knowing(
    answer: Sequence[SampledToken], wrong: Wrongness = never, count: Callable[[int], int] = counted
) -> dict[str, Any]:
    """An engine's option: a drafter that knows this answer."""
    text = [*PROMPT, *ids_of(answer)]
    return {"drafter": lambda: KnowingDrafter([text], wrong, count)}


def ids_of(tokens: Sequence[SampledToken]) -> list[int]:
    return [token.id for token in tokens]


def steps_into_the_first_hop(mesh: TinyMesh) -> list[Frame]:
    return [
        frame
        for _, frame in mesh.transport.frames
        if frame.hop_index == 0 and frame.phase in {Phase.DECODE, Phase.VERIFY}
    ]


def verifies(mesh: TinyMesh) -> list[Frame]:
    """Verify frames that went into the first hop."""
    return [frame for frame in steps_into_the_first_hop(mesh) if frame.phase is Phase.VERIFY]


@pytest.mark.parametrize("sampling", list(SAMPLINGS))
async def test_the_tokens_are_those_without_drafts(mesh: TinyMesh, sampling: str) -> None:
    request = asked(SAMPLINGS[sampling])
    plain, _ = await answered(mesh, request)
    steps = {}
    for name, wrong in DRAFTS.items():
        mesh.transport.frames.clear()
        tokens, report = await answered(mesh, request, Speculate(MAX_DRAFT, always=True), **knowing(plain, wrong))
        assert ids_of(tokens) == ids_of(plain)
        for ours, theirs in zip(tokens, plain, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert report["drafted_tokens"] == sum(len(frame.draft) for frame in verifies(mesh))
        steps[name] = sum(
            frame.hop_index == 0 and frame.phase is not Phase.PREFILL for _, frame in mesh.transport.frames
        )
        if name == "wrong":
            assert report["accepted_tokens"] == 0
        elif name == "right":
            assert report["accepted_tokens"] == report["drafted_tokens"]
    assert steps["right"] < steps["mixed"] < steps["wrong"] == COUNT - 1


async def test_hops_say_how_they_fall_back_and_are_sent_no_more_than_that_takes(mesh: TinyMesh, family: str) -> None:
    plain, _ = await answered(mesh, asked())
    ways = []

    def look(_: Generation, made: int) -> None:
        if made == 1:
            ways.extend(held.falls_back for service in mesh.services.values() for held in service.store)

    tokens, _ = await answered(
        mesh, asked(), Speculate(MAX_DRAFT, always=True), look, **knowing(plain, always, lambda _length: 2)
    )
    assert ids_of(tokens) == ids_of(plain)
    assert ways == WAYS[family]
    again = [frame.seq_len - frame.sample for frame in verifies(mesh)]
    assert max(again) == (0 if family == "llama" else MOST_AGAIN)
    assert all(frame.sample == len(frame.draft) + 1 for frame in verifies(mesh))


async def test_what_a_hop_keeps_to_fall_back_is_counted_and_gone_with_the_session(mesh: TinyMesh, family: str) -> None:
    plain, _ = await answered(mesh, asked())
    kept: list[int] = []

    def look(_: Generation, __: int) -> None:
        for service in mesh.services.values():
            for held in service.store:
                assert held.state is not None
                assert held.nbytes >= held.state_bytes >= held.state.snapshot_bytes
                assert held.state.snapshot_bytes <= held.snapshot_room(held.state.position)
                assert service.store.nbytes >= held.nbytes
                kept.append(held.state.snapshot_bytes)

    await answered(mesh, asked(), Speculate(4, always=True), look, **knowing(plain, now_and_then))
    assert (max(kept) > 0) is (family != "llama")
    assert all(service.store.nbytes == service.store.prefixes.nbytes for service in mesh.services.values())


@pytest.mark.parametrize("count", [1, 2, 3, 9])
async def test_an_answer_is_never_longer_than_asked_for(llama: TinyMesh, count: int) -> None:
    plain, _ = await answered(llama, asked(count=COUNT))
    tokens, report = await answered(
        llama, asked(count=count), Speculate(MAX_DRAFT, always=True), **knowing(plain, never, lambda _length: MAX_DRAFT)
    )
    assert ids_of(tokens) == ids_of(plain)[:count]
    assert report["completion_tokens"] == count
    assert all(frame.position + frame.seq_len < len(PROMPT) + count for frame in verifies(llama))


async def test_a_stop_token_in_the_middle_of_a_step_ends_the_answer(mesh: TinyMesh) -> None:
    plain, _ = await answered(mesh, asked())
    ids = ids_of(plain)
    at = next(at for at in range(4, COUNT) if ids[at] not in ids[:at])
    request = asked(stop_ids=frozenset({ids[at]}))
    for wrong in DRAFTS.values():
        tokens, report = await answered(mesh, request, Speculate(MAX_DRAFT, always=True), **knowing(plain, wrong))
        assert ids_of(tokens) == ids[:at]
        assert report["completion_tokens"] == at
    assert all(ids[at] not in frame.draft for frame in verifies(mesh))


async def test_who_stops_in_the_middle_of_a_step_leaves_nothing_behind(mesh: TinyMesh) -> None:
    plain, _ = await answered(mesh, asked())
    generation = mesh.engine(speculate=Speculate(6, always=True), **knowing(plain, never, lambda _length: 6)).start(
        asked()
    )
    made = 0
    async with aclosing(aiter(generation)) as events:
        async for event in events:
            made += isinstance(event, SampledToken)
            if made == 4:
                break
    await generation.aclose()
    assert mesh.held_sessions == 0
    assert ids_of((await answered(mesh, asked()))[0]) == ids_of(plain)


async def test_what_an_answer_with_drafts_leaves_behind_serves_the_next_turn_rightly(mesh: TinyMesh) -> None:
    """Hops hold states in which drafts that were wrong stand behind the last token: those are no part of a prefix."""
    plain, _ = await answered(mesh, asked())
    for made in (3, 4, 6, 9):
        text = [*PROMPT, *ids_of(plain)[:made]]
        wish = PrefixWish(scope=f"s-{made}", keep_at=(len(PROMPT) - 1,))
        await answered(
            mesh,
            asked(count=made, prefix=wish),
            Speculate(5, always=True),
            **knowing(plain, now_and_then, lambda _length: 5),
        )
        follow = replace(asked(count=6), prompt_ids=(*text, 11, 12))
        right, _ = await answered(mesh, follow)
        tokens, _ = await answered(mesh, replace(follow, prefix=wish))
        assert ids_of(tokens) == ids_of(right)


async def test_a_lost_state_in_mid_speculation_is_made_again_from_what_was_accepted(mesh: TinyMesh) -> None:
    plain, _ = await answered(mesh, asked())

    def lose(generation: Generation, made: int) -> None:
        if made in {3, 12, 13}:
            service = list(mesh.services.values())[made % len(mesh.services)]
            for held in list(service.store):
                service.store.drop(SessionKey(generation.session, held.document.hop_index), MissReason.EXPIRED)

    tokens, report = await answered(
        mesh, asked(), Speculate(4, always=True), lose, **knowing(plain, now_and_then, lambda _length: 4)
    )
    assert ids_of(tokens) == ids_of(plain)
    assert report["epochs"] > 1
    assert report["accepted_tokens"] > 0


async def test_where_room_runs_out_an_answer_goes_on_without_drafts(llama: TinyMesh) -> None:
    plain, _ = await answered(llama, asked())

    def lose(generation: Generation, made: int) -> None:
        if made == 3:
            llama.services["http://node-1"].store.drop(SessionKey(generation.session, 1), MissReason.EVICTED)

    llama.transport.frames.clear()
    tokens, _ = await answered(llama, asked(), Speculate(1, always=True), lose, **knowing(plain))
    assert ids_of(tokens) == ids_of(plain)
    assert {frame.epoch for frame in verifies(llama)} == {0}


@pytest.mark.parametrize(
    "fields", [{"recovery": Replay.EXACT}, {"cache": False}, {"speculate": OFF}], ids=["exact", "stateless", "off"]
)
async def test_who_asks_for_the_same_bits_or_no_drafts_gets_none(llama: TinyMesh, fields: dict[str, Any]) -> None:
    plain, _ = await answered(llama, asked())
    llama.transport.frames.clear()
    tokens, report = await answered(llama, asked(**fields), Speculate(4, always=True), **knowing(plain))
    assert ids_of(tokens) == ids_of(plain)
    assert verifies(llama) == []
    assert "drafted_tokens" not in report


async def test_a_hop_that_speaks_no_verify_frames_gets_none(llama: TinyMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = await answered(llama, asked())
    older = llama.services["http://node-1"]
    opened = older.open
    monkeypatch.setattr(older, "open", lambda document: _without_verify(opened(document)))
    tokens, _ = await answered(llama, asked(), Speculate(4, always=True), **knowing(plain))
    assert ids_of(tokens) == ids_of(plain)
    assert verifies(llama) == []


async def _without_verify(reply: Awaitable[OpenReply]) -> OpenReply:
    return replace(await reply, verify=None)


async def test_the_texts_own_repeats_are_drafted_and_the_request_may_ask_for_it(llama: TinyMesh) -> None:
    plain, _ = await answered(llama, asked(LOOP, count=60))
    llama.transport.frames.clear()
    tokens, report = await answered(llama, asked(LOOP, count=60, speculate=Speculate(8, always=True)))
    assert ids_of(tokens) == ids_of(plain)
    assert report["accepted_tokens"] > 40
    assert len(steps_into_the_first_hop(llama)) < 15


async def test_left_to_itself_it_drafts_over_a_slow_link_and_not_where_positions_cost_as_much(
    llama: TinyMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is the test's: a frame takes what the case says."""
    plain, _ = await answered(llama, asked(LOOP, count=60))
    now = 0.0
    cost_s = {"slow": (0.1, 0.001), "costly": (0.0, 0.05)}
    drafted = {}
    for name, (trip_s, position_s) in cost_s.items():

        def took(_: str, frame: Frame, trip_s: float = trip_s, position_s: float = position_s) -> None:
            nonlocal now
            if frame.hop_index == 0:
                now += trip_s + position_s * frame.seq_len

        monkeypatch.setattr(llama.transport, "on_forward", took)
        engine = llama.engine(speculate=AUTO)
        monkeypatch.setattr(engine, "clock", _Told(lambda: now))
        generation = engine.start(asked(LOOP, count=60))
        async with aclosing(aiter(generation)) as events:
            ids = [event.id async for event in events if isinstance(event, SampledToken)]
        await generation.aclose()
        assert ids == ids_of(plain)
        drafted[name] = generation.report().get("drafted_tokens", 0)
    assert drafted["slow"] > 25
    assert drafted["costly"] < 30  # which it tries, and finds that it does not pay


class _Told:
    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.5, seed=5)], ids=["greedy", "drawn"]
)
async def test_an_answer_that_is_held_to_a_grammar_stays_the_same(tiny_llama: Path, sampling: SamplingParams) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["cat", "dog"]}},
        "required": ["name", "kind"],
    }
    stop = 2
    grammar = Grammar(grammar_of_schema(schema, thinks=False), (stop,))
    request = asked(sampling, count=90, stop_ids=frozenset({stop}), grammar=grammar)
    async with tiny_mesh(tiny_llama, FAMILIES["llama"], text_files=ascii_files()) as mesh:
        plain, _ = await answered(mesh, request)
        assert len(plain) < 90  # it came to its end
        for wrong in DRAFTS.values():
            tokens, report = await answered(mesh, request, Speculate(6, always=True), **knowing(plain, wrong))
            assert ids_of(tokens) == ids_of(plain)
            assert report["recoveries"] == []
            assert report["drafted_tokens"]
