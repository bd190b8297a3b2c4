"""The next turn of a chat begins where the last one ended, and answers as if it had not: whole meshes, tiny models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from in_process_mesh import TinyMesh, add_node, random_prompt, tiny_mesh
from meshnet_core.coverage import ModelSummary
from meshnet_core.demand import Demand
from meshnet_core.errors import MissReason
from meshnet_core.frames import Frame, Phase
from meshnet_core.grammar import Grammar
from meshnet_core.route import Route
from meshnet_gateway.recovery import Replay
from meshnet_node.cache_store import SessionKey
from meshnet_node.held_prefixes import KEY_NBYTES
from prefix_chat import END, HOLDING, SYSTEM, Chat, Turn, far_apart
from tiny_models import save_tiny
from tiny_tokenizers import ascii_files

FAMILIES = {
    "llama": ["0-1", "2-3"],
    "mistral": ["0-1", "2-3"],  # a window shorter than the chat: it has slid, and cannot be cut back
    "gemma3_text": ["0-2", "3-4"],  # windows and full attention
    "lfm2": ["0-1", "2-4"],  # the first node holds conv layers alone
    "qwen3_next": ["0-1", "2-4"],  # the first node holds recurrent layers alone
    "qwen3_5_moe_text": ["0-2", "3-4"],
}
CUT_BACK, SLIDING, HYBRID = KINDS = ("llama", "mistral", "qwen3_next")  # what can be done with their state
TURNS = 5
TinyModel = Callable[[str], Path]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    root = tmp_path_factory.mktemp("models")
    return lru_cache(maxsize=None)(lambda family: save_tiny(family, root / family))


def prefilled(mesh: TinyMesh) -> int:
    """Positions that came to the first hop in prefill frames since this was asked last."""
    first = mesh.urls[0]
    frames = [frame for url, frame in mesh.transport.frames if url == first and frame.phase is not Phase.DECODE]
    mesh.transport.frames.clear()
    return sum(frame.seq_len for frame in frames)


async def alone(mesh: TinyMesh, seed: int = 0, turns: int = TURNS) -> list[Turn]:
    """The turns of a chat that uses no prefixes."""
    chat = Chat(mesh, seed, reuse=False)
    return [await chat.turn() for _ in range(turns)]


def forget(mesh: TinyMesh, url: str) -> None:
    mesh.services[url].store.prefixes.give_way(2**60)


# -- it saves what it says, and changes nothing -----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_turn_prefills_its_new_tokens_only_and_answers_as_without_reuse(
    tiny_model: TinyModel, family: str
) -> None:
    async with tiny_mesh(tiny_model(family), FAMILIES[family], limits=HOLDING) as mesh:
        without = await alone(mesh)
        prefilled(mesh)
        chat, ended = Chat(mesh), 0
        for at in range(TURNS):
            turn = await chat.turn()
            assert far_apart(turn.tokens, without[at].tokens) is None
            # An answer cut off by its length has a last token that no node has run.
            assert ended - 1 <= turn.cached <= ended or at == 0
            assert prefilled(mesh) == len(turn.prompt) - turn.cached
            ended = len(turn.prompt) + len(turn.ids)
        saved = [service.status()["prefill_positions_saved"] for service in mesh.services.values()]
        assert saved == [sum(turn.cached for turn in chat.turns)] * 2
        assert mesh.held_sessions == 0


@pytest.mark.parametrize("family", KINDS)
async def test_two_chats_over_one_system_prompt_fork_from_it_and_equal_themselves_alone(
    tiny_model: TinyModel, family: str
) -> None:
    async with tiny_mesh(tiny_model(family), FAMILIES[family], limits=HOLDING) as mesh:
        expected = [await alone(mesh, seed, 3) for seed in (1, 2)]
        chats = [Chat(mesh, 1), Chat(mesh, 2)]
        for at in range(3):
            turns = [await chats[0].turn(), await chats[1].turn()] if at == 0 else await both(chats)
            for turn, answers in zip(turns, expected, strict=True):
                assert far_apart(turn.tokens, answers[at].tokens) is None
        assert chats[1].turns[0].cached >= len(SYSTEM)
        assert all(turn.cached > len(SYSTEM) for chat in chats for turn in chat.turns[1:])


async def both(chats: list[Chat]) -> list[Turn]:
    return list(await asyncio.gather(*(chat.turn() for chat in chats)))


@pytest.mark.parametrize("family", KINDS)
async def test_an_answer_that_is_rendered_otherwise_goes_on_from_the_question_or_from_where_they_part(
    tiny_model: TinyModel, family: str
) -> None:
    """As where a template drops the thinking, or a client changes its history."""
    async with tiny_mesh(tiny_model(family), FAMILIES[family], limits=HOLDING) as mesh:
        chat, plain = Chat(mesh), Chat(mesh, reuse=False)
        for each in (plain, chat):
            first = await each.turn()
            each.said[len(first.prompt) + 4 :] = random_prompt(12, seed=5)
            await each.turn()
        assert far_apart(chat.turns[1].tokens, plain.turns[1].tokens) is None
        question = len(chat.turns[0].prompt) - 1
        assert question <= chat.turns[1].cached <= question + 5


@pytest.mark.parametrize("family", KINDS)
async def test_the_same_prompt_again_runs_what_follows_the_question_only(tiny_model: TinyModel, family: str) -> None:
    async with tiny_mesh(tiny_model(family), FAMILIES[family], limits=HOLDING) as mesh:
        chat = Chat(mesh)
        first = await chat.turn()
        again = await chat.answer(first.prompt)
        assert again.cached == len(first.prompt) - 1
        assert far_apart(again.tokens, first.tokens) is None


@pytest.mark.parametrize("ranges", [["0-4"], ["0-0", "1-1", "2-4"], ["0-3", "2-4"]])
async def test_any_split_of_a_hybrid(tiny_model: TinyModel, ranges: list[str]) -> None:
    """An effective start within a shard included."""
    async with tiny_mesh(tiny_model("qwen3_next"), ranges, limits=HOLDING) as mesh:
        expected = await alone(mesh, turns=3)
        chat = Chat(mesh, chunk=5)
        turns = [await chat.turn() for _ in range(3)]
        assert [far_apart(*pair) for pair in zip(map(ids, turns), map(ids, expected), strict=True)] == [None] * 3
        assert turns[2].cached >= len(turns[1].prompt)


def ids(turn: Turn) -> list[object]:
    return list(turn.tokens)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next", "lfm2"])
async def test_wrong_state_would_show(tiny_model: TinyModel, family: str) -> None:
    """What the tests above compare is not deaf to what they are about."""
    async with tiny_mesh(tiny_model(family), FAMILIES[family], limits=HOLDING) as mesh:
        expected = await alone(mesh, turns=2)
        chat = Chat(mesh)
        await chat.turn()
        for held in mesh.services[mesh.urls[0]].store.prefixes:
            with torch.inference_mode():
                for tensor in held.state.tensors():
                    if tensor.is_floating_point():
                        tensor.zero_()
        assert far_apart((await chat.turn()).tokens, expected[1].tokens) is not None


async def test_what_is_held_is_never_changed_by_those_who_begin_from_it(tiny_model: TinyModel) -> None:
    async with tiny_mesh(tiny_model("qwen3_next"), FAMILIES["qwen3_next"], limits=HOLDING) as mesh:
        chat = Chat(mesh)
        await chat.turn()
        held = [held.state for service in mesh.services.values() for held in service.store.prefixes]
        before = [[tensor.clone() for tensor in state.tensors()] for state in held]
        await chat.turn()
        for state, tensors in zip(held, before, strict=True):
            assert all(map(torch.equal, state.tensors(), tensors))


# -- what is held is no promise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [CUT_BACK, HYBRID])
async def test_a_prefix_evicted_between_turns_on_one_node_is_prefilled_again(
    tiny_model: TinyModel, family: str
) -> None:
    async with tiny_mesh(tiny_model(family), FAMILIES[family], limits=HOLDING) as mesh:
        expected = await alone(mesh, turns=3)
        chat = Chat(mesh)
        await chat.turn()
        forget(mesh, mesh.urls[1])
        turn = await chat.turn()
        assert (turn.cached, turn.report["recoveries"]) == (0, [])
        assert far_apart(turn.tokens, expected[1].tokens) is None
        assert (await chat.turn()).cached > len(turn.prompt)


async def test_a_prefix_that_goes_between_the_open_and_the_first_frame_is_a_miss_and_then_the_whole_prefill(
    tiny_model: TinyModel,
) -> None:
    async with tiny_mesh(tiny_model("llama"), FAMILIES["llama"], limits=HOLDING) as mesh:
        expected = await alone(mesh, turns=2)
        chat = Chat(mesh)
        await chat.turn()

        def forget_first(_url: str, frame: Frame) -> None:
            if frame.phase is Phase.RESUME:
                forget(mesh, mesh.urls[1])

        mesh.transport.on_forward = forget_first
        turn = await chat.turn()
        assert far_apart(turn.tokens, expected[1].tokens) is None
        assert turn.cached == 0
        assert [event["reason"] for event in turn.report["recoveries"]] == ["evicted"]


async def test_a_node_that_restarted_between_turns_has_nothing_and_a_node_that_holds_none_neither(
    tiny_model: TinyModel,
) -> None:
    folder = tiny_model("qwen3_next")
    async with tiny_mesh(folder, FAMILIES["qwen3_next"], limits=HOLDING) as mesh:
        expected = await alone(mesh, turns=4)
        chat = Chat(mesh)
        await chat.turn()
        for limits, cached in ((HOLDING, False), (HOLDING, False), (replace(HOLDING, max_prefixes=0), False)):
            await mesh.services[mesh.urls[1]].close()
            add_node(mesh, folder, mesh.urls[1], FAMILIES["qwen3_next"][1], limits)
            turn = await chat.turn()
            assert bool(turn.cached) == cached
        assert [far_apart(a.tokens, b.tokens) for a, b in zip(chat.turns, expected, strict=True)] == [None] * 4


async def test_another_scope_sees_nothing(tiny_model: TinyModel) -> None:
    async with tiny_mesh(tiny_model("llama"), FAMILIES["llama"], limits=HOLDING) as mesh:
        mine, theirs = Chat(mesh, scope="mine"), Chat(mesh, scope="theirs")
        for chat in (mine, theirs):
            assert (await chat.turn()).cached == 0
        assert far_apart(mine.turns[0].tokens, theirs.turns[0].tokens) is None
        assert (await theirs.turn()).cached > 0


async def test_a_request_that_wants_no_prefixes_takes_and_leaves_none(tiny_model: TinyModel) -> None:
    async with tiny_mesh(tiny_model("llama"), FAMILIES["llama"], limits=HOLDING) as mesh:
        await alone(mesh, turns=1)
        assert all(service.store.nbytes == 0 for service in mesh.services.values())
        first = await Chat(mesh).turn()
        assert (await Chat(mesh, reuse=False).answer(first.prompt)).cached == 0


async def test_exact_recovery_uses_none_so_that_its_bits_do_not_depend_on_who_came_before(
    tiny_model: TinyModel,
) -> None:
    async with tiny_mesh(tiny_model("llama"), FAMILIES["llama"], limits=HOLDING, dtype="bfloat16") as mesh:
        expected = await alone(mesh, turns=2)
        chat = Chat(mesh, recovery=Replay.EXACT)
        turns = [await chat.turn(), await chat.turn()]
        assert [turn.cached for turn in turns] == [0, 0]
        assert [far_apart(a.tokens, b.tokens, most=0.0) for a, b in zip(turns, expected, strict=True)] == [None] * 2


async def test_a_node_without_a_cache_answers_without_prefixes(tiny_model: TinyModel) -> None:
    limits = replace(HOLDING, budget_bytes=0)
    async with tiny_mesh(tiny_model("llama"), FAMILIES["llama"], limits=limits) as mesh:
        expected = await alone(mesh, turns=2)
        chat = Chat(mesh)
        turns = [await chat.turn(), await chat.turn()]
        assert [turn.cached for turn in turns] == [0, 0]
        assert [far_apart(a.tokens, b.tokens) for a, b in zip(turns, expected, strict=True)] == [None] * 2


@pytest.mark.parametrize("family", [CUT_BACK, HYBRID])
async def test_state_lost_in_mid_answer_is_made_again_from_what_is_held(tiny_model: TinyModel, family: str) -> None:
    async with tiny_mesh(tiny_model(family), FAMILIES[family], limits=HOLDING) as mesh:
        expected = await alone(mesh, turns=2)
        chat = Chat(mesh)
        first = await chat.turn()
        prefilled(mesh)
        store = mesh.services[mesh.urls[0]].store
        chat.during = lambda generation, made: (
            made == 5 and store.drop(SessionKey(generation.session, 0), MissReason.EVICTED)
        )
        turn = await chat.turn()
        assert far_apart(turn.tokens, expected[1].tokens) is None
        assert [event["reason"] for event in turn.report["recoveries"]] == ["evicted"]
        began = [
            frame.position
            for url, frame in mesh.transport.frames
            if url == mesh.urls[0] and frame.phase is Phase.RESUME
        ]
        assert began[0] >= len(first.prompt)
        assert began[1] >= began[0]  # for a hybrid what was copied at the end of the question


@pytest.mark.parametrize("family", [CUT_BACK, HYBRID])
async def test_an_answer_held_to_a_grammar_begins_on_a_prefix_and_outlives_its_tail(
    tiny_model: TinyModel, family: str
) -> None:
    grammar = Grammar('start: /[a-z]{12}/ ("yes" | "no") /[0-9]{9}/', (END,))
    first, last = FAMILIES[family]
    async with tiny_mesh(tiny_model(family), [first, last, last], limits=HOLDING, text_files=ascii_files()) as mesh:
        plain, chat = (Chat(mesh, reuse=reuse, count=40, grammar=grammar) for reuse in (False, True))
        expected = [await plain.turn(), await plain.turn()]
        chat.engine = mesh.engine()
        await chat.turn()

        def kill_tail(_: object, made: int) -> None:
            if made == 9:
                mesh.kill(next(url for url in mesh.urls[1:] if len(mesh.services[url].store)))

        chat.during = kill_tail
        turn = await chat.turn()
        assert turn.cached >= len(expected[0].prompt)
        assert turn.report["recoveries"]
        assert len(turn.ids) in (23, 24)
        assert turn.ids == expected[1].ids
        assert far_apart(turn.tokens, expected[1].tokens) is None


@pytest.mark.parametrize("family", KINDS)
async def test_what_a_client_left_in_mid_answer_serves_who_goes_on_from_there(
    tiny_model: TinyModel, family: str
) -> None:
    """As where a stop string or a cancelled request ends an answer that the model would have gone on with."""
    async with tiny_mesh(tiny_model(family), FAMILIES[family], limits=HOLDING) as mesh:
        whole = await Chat(mesh, reuse=False).turn()
        prompt = [*whole.prompt, *whole.ids[:4], END, *random_prompt(6, seed=8)]
        expected = await Chat(mesh, reuse=False).answer(prompt)

        def leave(_: object, made: int) -> None:
            if made == 4:
                raise ClientLeftError

        with pytest.raises(ClientLeftError):
            await Chat(mesh, during=leave).turn()
        turn = await Chat(mesh).answer(prompt)
        assert turn.cached == len(whole.prompt) + 3  # the fourth token was not run yet
        assert far_apart(turn.tokens, expected.tokens) is None
        assert mesh.held_sessions == 0


class ClientLeftError(Exception):
    pass


# -- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [CUT_BACK, HYBRID])
@pytest.mark.parametrize("share", [1.2, 2.5, 6.0])
async def test_under_any_budget_answers_are_right_and_the_budget_is_kept(
    tiny_model: TinyModel, family: str, share: float
) -> None:
    """Room for little more than one session, for one and a prefix, for several of both."""
    folder, ranges = tiny_model(family), FAMILIES[family]
    async with tiny_mesh(folder, ranges) as mesh:
        expected = [await alone(mesh, seed, 3) for seed in (1, 2)]
        one = max(backend.state_bytes(backend.layers.start, 130) for backend in mesh.backends)
    limits = replace(HOLDING, budget_bytes=int(share * (one + 4 * 256 * 32 * 4)))
    async with tiny_mesh(folder, ranges, limits=limits) as mesh:
        chats = [Chat(mesh, 1), Chat(mesh, 2)]
        for at in range(3):
            for turn, answers in zip(await both(chats), expected, strict=True):
                assert far_apart(turn.tokens, answers[at].tokens) is None
            assert all(service.store.nbytes <= limits.budget_bytes for service in mesh.services.values())
        assert all(len(service.store) == 0 for service in mesh.services.values())


@pytest.mark.parametrize("family", KINDS)
async def test_every_byte_held_is_counted_and_none_twice(tiny_model: TinyModel, family: str) -> None:
    async with tiny_mesh(tiny_model(family), FAMILIES[family], limits=HOLDING) as mesh:
        chats = [Chat(mesh, 1), Chat(mesh, 2)]
        for _ in range(2):
            await both(chats)
        for service in mesh.services.values():
            storages = {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for held in service.store.prefixes
                for tensor in held.state.tensors()
            }
            keys = sum(KEY_NBYTES * len(held.positions) for held in service.store.prefixes)
            assert service.store.nbytes == service.status()["prefix_bytes"] == sum(storages.values()) + keys > keys
            if family == CUT_BACK:  # what a longer state serves too is not held beside it
                assert len(service.store.prefixes) == len(chats)


# -- routes -----------------------------------------------------------------------------------------------------------


async def test_a_route_is_asked_for_with_what_nodes_hold_of_the_prompt(tiny_model: TinyModel) -> None:
    async with tiny_mesh(tiny_model(CUT_BACK), FAMILIES[CUT_BACK], limits=HOLDING) as mesh:
        demands: list[Demand] = []
        plain = mesh.route

        async def route(model: ModelSummary, excluded: frozenset[str], demand: Demand | None = None) -> Route:
            assert demand is not None
            demands.append(demand)
            return await plain(model, excluded, demand)

        mesh.route = route  # type: ignore[method-assign]
        chat, other = Chat(mesh, 1), Chat(mesh, 2)
        chat.engine = other.engine = mesh.engine()
        turns = [await each.turn() for each in (chat, chat, other)]
        nodes = [url.removeprefix("http://") for url in mesh.urls]
        assert [demand.held for demand in demands] == [{}, *(dict.fromkeys(nodes, turn.cached) for turn in turns[1:])]
        assert [demand.explore for demand in demands] == [True, False, False]
