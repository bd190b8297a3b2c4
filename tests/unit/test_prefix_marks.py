"""Which prefixes are named, where a prompt's points are found, and what a generation settles on; pure, no mesh."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet_core.errors import InvalidInputError
from meshnet_core.layer_range import LayerRange
from meshnet_core.open_document import OpenDocument, OpenReply
from meshnet_core.prefix import MAX_MARKS, Mark, PrefixTerms, marks_of
from meshnet_core.route import Hop, Route
from meshnet_core.sampling import SamplingParams
from meshnet_gateway.prefix_memory import PrefixMemory, Whose
from meshnet_gateway.prefix_reuse import BLOCK, PrefixReuse, PrefixWish, longest_shared
from meshnet_gateway.prefix_scope import scope_of
from meshnet_gateway.prompt_points import chat_wish, text_wish
from meshnet_gateway.text_model import TextModel
from meshnet_node.held_prefixes import PrefixKind
from tiny_tokenizers import byte_level_files

STOP = 2
ids = st.lists(st.integers(0, 3), max_size=40)

# -- marks ------------------------------------------------------------------------------------------------------------


@given(ids, ids, st.sets(st.integers(-2, 50)))
def test_two_sequences_have_a_mark_in_common_exactly_where_they_are_the_same_so_far(
    one: list[int], other: list[int], positions: set[int]
) -> None:
    marks = set(marks_of(one, positions)) & set(marks_of(other, positions))
    same = {at for at in positions if 0 < at <= min(len(one), len(other)) and one[:at] == other[:at]}
    assert {mark.position for mark in marks} == same
    assert len({mark.key for mark in marks}) == len(marks)


def test_a_mark_is_the_hash_that_the_wire_protocol_names() -> None:
    """As another implementation would compute it."""
    (mark,) = marks_of((1, 9690, 198), (3,))
    assert mark == Mark(3, "960bf3086bc5b6c974fe089cca337943")
    page = Path(__file__).parents[2] / "docs" / "wire-protocol.md"
    assert f'`[3, "{mark.key}"]`' in page.read_text("utf-8")


def test_there_are_never_more_marks_than_a_document_takes() -> None:
    marks = marks_of(range(MAX_MARKS + 10), range(MAX_MARKS + 11))
    assert len(marks) == MAX_MARKS
    assert marks[-1].position == MAX_MARKS + 10
    with pytest.raises(InvalidInputError, match="more than"):
        PrefixTerms("a", (Mark(0, "0" * 32), *marks))


# -- what a generation asks, settles on and leaves --------------------------------------------------------------------


WISH = PrefixWish("mine", (3,))
ALONE = Route("m", "f", 4, (Hop("a", "http://a", LayerRange(0, 4)),))
ROUTE = Route("m", "f", 4, (Hop("a", "http://a", LayerRange(0, 2)), Hop("b", "http://b", LayerRange(2, 4))))


def reuse(prompt: Sequence[int], wish: PrefixWish | None = WISH, *, exact: bool = False) -> PrefixReuse:
    return PrefixReuse(wish, prompt, frozenset({STOP}), exact=exact, memory=PrefixMemory())


def test_marks_are_at_blocks_at_the_points_of_the_prompt_and_where_turns_ended() -> None:
    prompt = [5] * 40 + [STOP] + [5] * 30
    terms = reuse(prompt, PrefixWish("mine", (3, 65), (44,))).terms(prompt, cached=True)
    assert terms is not None
    assert [mark.position for mark in terms.marks] == [3, 32, 39, 40, 44, 64, 65, 71]
    assert (terms.scope, terms.keep_at) == ("mine", (3, 65))


@pytest.mark.parametrize(
    ("held", "length", "begins"),
    [
        ([(32, 64), (32, 64)], 100, 64),
        ([(32, 64), (32,)], 100, 32),
        ([(32, 64), ()], 100, 0),
        ([(21,), (32,)], 100, 0),
        ([(32, 100), (32, 100)], 100, 32),  # the last position is run, whatever is held
        ([(5,)], 5, 0),
    ],
)
def test_the_longest_that_all_hops_hold_is_taken(held: list[tuple[int, ...]], length: int, begins: int) -> None:
    assert longest_shared(held, length) == begins


def test_what_did_not_work_is_not_tried_again_before_a_token_came() -> None:
    prompt = [5] * 70
    one = reuse(prompt)
    replies = [OpenReply("b", held=(32, 64)), OpenReply("b", held=(32,), snapshots=True)]
    begun = []
    for _ in range(3):
        one.terms(prompt, cached=True)
        one.agree(ROUTE, replies)
        begun.append(one.begin)
    assert begun == [32, 0, 0]
    assert one.cuts == (3,)
    one.proven()
    assert one.cached_tokens == 0
    one.terms([*prompt, 7], cached=True)
    one.agree(ROUTE, replies)
    assert one.begin == 32


def test_cached_tokens_are_those_that_the_first_token_did_not_cost() -> None:
    prompt = [5] * 70
    one = reuse(prompt)
    one.terms(prompt, cached=True)
    one.agree(ALONE, [OpenReply("b", held=(64,))])
    assert one.cached_tokens == 0
    one.proven()
    one.terms([*prompt, 7], cached=True)
    one.agree(ALONE, [OpenReply("b", held=(32,))])
    one.proven()
    assert one.cached_tokens == 64


def test_without_state_without_a_wish_or_exactly_there_is_nothing_to_begin_on() -> None:
    prompt = [5] * 70
    for one, cached in ((reuse(prompt), False), (reuse(prompt, None), True), (reuse(prompt, exact=True), True)):
        terms = one.terms(prompt, cached=cached)
        if terms is not None:  # an exact answer may leave what it made
            one.agree(ALONE, [OpenReply("b", held=(64,), snapshots=True)])
        one.proven()
        assert (one.begin, one.cuts, one.cached_tokens) == (0, (), 0)


def test_what_is_left_are_the_blocks_beyond_the_prefill_and_both_ends() -> None:
    prompt, answer = [5] * 30, [6] * 40
    one = reuse(prompt)
    one.terms(prompt, cached=True)
    assert one.left(prompt) == ()  # not before it is open
    one.agree(ALONE, [OpenReply("b")])
    left = one.left([*prompt, *answer])
    assert [mark.position for mark in left] == [BLOCK, 2 * BLOCK, 69, 70]
    assert set(left) <= set(marks_of([*prompt, *answer, 9], range(80)))
    assert reuse(prompt, None).left(prompt) == ()


def test_nodes_are_remembered_by_what_answers_left_on_them_until_they_say_otherwise() -> None:
    prompt, memory = [5] * 70, PrefixMemory()
    first, second = (PrefixReuse(WISH, prompt, frozenset(), exact=False, memory=memory) for _ in range(2))
    assert first.held("f", prompt) == {}
    first.terms(prompt, cached=True)
    first.agree(ROUTE, [OpenReply("b"), OpenReply("b")])
    first.left([*prompt, 6, 7])
    longer = [*prompt, 6, 7, 9]
    assert second.held("f", longer) == {"a": 64, "b": 64}
    assert second.held("g", longer) == {}
    stranger = PrefixReuse(PrefixWish("yours", (3,)), prompt, frozenset(), exact=False, memory=memory)
    assert stranger.held("f", longer) == {}
    second.terms(longer, cached=True)
    second.agree(ROUTE, [OpenReply("b", held=(3, 32)), OpenReply("b", held=(3, 32, 64))])
    assert second.begin == 32
    assert second.held("f", longer) == {}  # it is in doubt until a token came
    second.proven()
    assert second.held("f", longer) == {"a": 32, "b": 64}


def test_what_cannot_be_cut_back_is_remembered_where_it_is_kept_alone() -> None:
    prompt, memory = [5] * 70, PrefixMemory()
    one = PrefixReuse(WISH, prompt, frozenset(), exact=False, memory=memory)
    one.terms(prompt, cached=True)
    one.agree(ALONE, [OpenReply("b", snapshots=True)])
    one.left([*prompt, 6, 7])
    assert memory.held(Whose("mine", "f"), marks_of(prompt, range(70))) == {"a": 3}


def test_a_memory_is_bounded_and_forgets_what_was_not_used_longest() -> None:
    memory, whose = PrefixMemory(most=3), Whose("mine", "f")
    marks = marks_of(range(10), range(11))
    memory.learn(whose, marks[:3], ["a"])
    memory.learn(whose, marks[:1], ["b"])
    memory.learn(whose, marks[3:4], ["c"])
    assert len(memory) == 3
    assert memory.held(whose, marks[:2]) == {"a": 1, "b": 1}


# -- the points of a prompt -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel.from_files("tiny", "f" * 64, byte_level_files())


def say(*texts: str, system: str | None = "be brief") -> list[dict[str, Any]]:
    """A conversation whose texts take turns, the user's first."""
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return [*([] if system is None else [{"role": "system", "content": system}]), *turns]


def wish_of(model: TextModel, messages: list[dict[str, Any]]) -> tuple[tuple[int, ...], PrefixWish]:
    def render(part: Sequence[Any], *, to_answer: bool = False) -> tuple[int, ...]:
        return model.render_chat(part, to_answer=to_answer)

    prompt = render(messages, to_answer=True)
    return prompt, chat_wish("mine", messages, prompt, render)


def test_a_chat_is_kept_at_the_end_of_its_instructions_and_of_its_question(model: TextModel) -> None:
    first, wish = wish_of(model, say("the fox"))
    other, its_wish = wish_of(model, say("a dog, or two"))
    head, question = wish.keep_at
    assert its_wish.keep_at[0] == head
    assert first[:head] == other[:head]
    assert first[head] != other[head]
    assert first[question:] == model.encode("<|im_start|>assistant\n")
    later, its_wish = wish_of(model, say("the fox", "jumps", "over what?"))
    assert its_wish.look_at == (question,)
    assert later[:question] == first[:question]


def test_a_template_that_drops_thinking_or_begins_with_it_shares_what_comes_before() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    thinking = TextModel.from_files("tiny", "f" * 64, byte_level_files(template=template))
    first, wish = wish_of(thinking, say("the fox"))
    later, its_wish = wish_of(thinking, say("the fox", "hm</think>jumps", "over what?"))
    assert its_wish.look_at == wish.keep_at[1:]
    assert later[: wish.keep_at[1]] == first[: wish.keep_at[1]]


def test_a_template_that_takes_no_other_conversation_gives_fewer_points() -> None:
    template = (
        "{% if messages[-1]['content'] == '?' %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    strict = TextModel.from_files("tiny", "f" * 64, byte_level_files(template=template))
    prompt, wish = wish_of(strict, say("the fox", system=None))
    assert wish == PrefixWish("mine", (len(prompt),))


@pytest.mark.parametrize(("length", "keep_at"), [(1, ()), (32, ()), (33, (32,)), (64, (32,)), (65, (64,))])
def test_a_text_is_kept_at_its_last_whole_block(length: int, keep_at: tuple[int, ...]) -> None:
    assert text_wish("mine", [5] * length) == PrefixWish("mine", keep_at)


# -- whose they are ---------------------------------------------------------------------------------------------------


def test_scopes_are_one_for_each_key_and_say_nothing_of_a_key_that_nobody_checked() -> None:
    mine, yours = {"authorization": "Bearer mine"}, {"authorization": "Bearer yours"}
    scopes = [
        scope_of(None, {}, None),
        scope_of(None, mine, None),
        scope_of(None, yours, None),
        scope_of(None, {"x-api-key": "mine"}, None),  # as Anthropic's clients say it
        scope_of(None, {"x-api-key": "yours"}, None),
        scope_of("0123", mine, None),
        scope_of("4567", mine, None),
        scope_of("0123", mine, "a"),
        scope_of("0123", mine, "b"),
        scope_of("4567", mine, "a"),
    ]
    assert len(set(scopes)) == len(scopes)
    assert all(PrefixTerms(scope, ()) for scope in scopes)  # fit for the wire
    assert scope_of("0123", yours, None) == scope_of("0123", mine, None)
    assert scope_of(None, mine, None) == scope_of(None, mine, None)


# -- what must be the same besides ------------------------------------------------------------------------------------


def kind(hops: Sequence[tuple[int, int, str]], at: int, **changes: Any) -> PrefixKind:
    route = Route(
        "m",
        changes.pop("fingerprint", "f"),
        hops[-1][1],
        tuple(
            Hop(f"n{index}", f"http://n{index}", LayerRange(start, stop), dtype)
            for index, (start, stop, dtype) in enumerate(hops)
        ),
    )
    fields: dict[str, Any] = {
        "session": "s", "epoch": 0, "hop_index": at, "route": route, "wire_dtype": "float32", "hidden_size": 4,
        "cache": True, "sampling": SamplingParams(), "prompt_length": 1, "prefill_length": 1, "expected_length": 2,
        "step_deadline_ms": 1,
    }  # fmt: skip
    return PrefixKind.of(OpenDocument(**(fields | changes)), "mine")


def test_state_is_of_one_kind_where_layers_model_and_all_that_rounded_it_are_the_same() -> None:
    f32, bf16 = "float32", "bfloat16"
    plain = kind([(0, 2, f32), (2, 4, f32)], 1)
    assert kind([(0, 1, f32), (1, 2, f32), (2, 4, f32)], 2) == plain  # another split of the same arithmetic
    others = [
        kind([(0, 1, f32), (1, 4, f32)], 1),
        kind([(0, 2, f32), (2, 3, f32), (3, 4, f32)], 1),
        kind([(0, 2, f32), (2, 4, f32)], 1, fingerprint="g"),
        kind([(0, 2, f32), (2, 4, bf16)], 1),
        kind([(0, 2, bf16), (2, 4, f32)], 1),
        kind([(0, 1, f32), (1, 2, bf16), (2, 4, f32)], 2),
        kind([(0, 2, bf16), (2, 4, bf16)], 1),
        kind([(0, 2, bf16), (2, 4, bf16)], 1, wire_dtype=bf16),
    ]
    assert len({plain, *others}) == len(others) + 1


def test_packed_hops_of_the_wires_dtype_round_nothing_between_them_but_hold_other_weights() -> None:
    bf16, int4 = "bfloat16", "bfloat16+int4"
    packed = kind([(0, 2, int4), (2, 4, int4)], 1, wire_dtype=bf16)
    assert kind([(0, 1, int4), (1, 2, int4), (2, 4, int4)], 2, wire_dtype=bf16) == packed
    others = [
        kind([(0, 2, bf16), (2, 4, bf16)], 1, wire_dtype=bf16),
        kind([(0, 2, bf16), (2, 4, int4)], 1, wire_dtype=bf16),
        kind([(0, 2, int4), (2, 4, bf16)], 1, wire_dtype=bf16),
        kind([(0, 1, int4), (1, 2, bf16), (2, 4, bf16)], 2, wire_dtype=bf16),
        kind([(0, 1, bf16), (1, 2, int4), (2, 4, bf16)], 2, wire_dtype=bf16),
    ]
    assert len({packed, *others}) == len(others) + 1
