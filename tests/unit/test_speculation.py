"""What is drafted from a text, how much of it a step carries, and which frames carry it: all pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet_core.errors import CacheFullError, CacheMissError, HopFailedError, InvalidInputError, MissReason
from meshnet_core.frames import MAX_DRAFT, FrameReply, HopTiming, Phase
from meshnet_core.open_document import FallBack, OpenReply
from meshnet_core.sampling import SampledToken
from meshnet_gateway.epoch_frames import EpochFrames
from meshnet_gateway.ngram_drafter import LONGEST, NO_DRAFT, SHORTEST, TAKEN_IN, Draft, NgramDrafter
from meshnet_gateway.speculation import AUTO, OFF, PAYS, Speculate, Speculation, StepCost, drafts_that_pay
from meshnet_gateway.step_frames import MOST_AGAIN, StepFrames, fall_back_of

NONE: frozenset[int] = frozenset()


def reply(*ids: int, forward_ms: float = 0.0) -> FrameReply:
    return FrameReply(0, tuple(map(SampledToken, ids)), (HopTiming(0, forward_ms=forward_ms),))


# -- drafts -----------------------------------------------------------------------------------------------------------


def test_a_draft_is_what_followed_where_the_text_last_ended_as_it_does_now() -> None:
    assert NgramDrafter([1, 2, 3, 4, 9, 1, 2]).draft(3, NONE) == Draft((3, 4, 9), 2)
    assert NgramDrafter([1, 2, 3, 1, 2, 4, 1, 2]).draft(1, NONE) == Draft((4,), 2)  # the last place counts
    assert NgramDrafter([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]).draft(1, NONE) == Draft((3,), 3)  # but the longest first
    assert NgramDrafter([1, 2, 3, 4, 5]).draft(3, NONE) == NO_DRAFT
    assert NgramDrafter([]).draft(3, NONE) == NO_DRAFT
    assert NgramDrafter([5]).draft(3, NONE) == NO_DRAFT


def test_a_loop_goes_round() -> None:
    assert NgramDrafter([1, 2, 3, 1, 2, 3, 1]).draft(7, NONE).tokens == (2, 3, 1, 2, 3, 1, 2)


def test_a_draft_ends_before_a_token_that_ends_the_answer() -> None:
    drafter = NgramDrafter([1, 2, 3, 4, 9, 1, 2])
    assert drafter.draft(5, frozenset({4})).tokens == (3,)
    assert drafter.draft(5, frozenset({3})) == NO_DRAFT


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, MAX_DRAFT))
def test_a_draft_is_found_as_a_search_through_all_of_the_text_finds_it(tokens: list[int], most: int) -> None:
    drafter = NgramDrafter()
    for token in tokens:
        drafter.extend([token])
    found = drafter.draft(most, NONE)
    for length in range(LONGEST, SHORTEST - 1, -1):
        starts = [at for at in range(len(tokens) - length) if tokens[at : at + length] == tokens[-length:]]
        if starts:
            text = list(tokens)
            begin = starts[-1] + length
            for place in range(begin, begin + most):
                text[len(tokens) :] = [*text[len(tokens) :], text[place]]
            assert found == Draft(tuple(text[len(tokens) :]), length)
            return
    assert found == NO_DRAFT


class CountedToken(int):
    """A token id that counts how often it is looked at to find its place."""

    looks = 0

    def __hash__(self) -> int:
        CountedToken.looks += 1
        return int.__hash__(self)


def test_a_long_text_keeps_nobody_waiting_and_all_of_it_is_found_in_the_end() -> None:
    length = 10 * TAKEN_IN
    text = list(map(CountedToken, range(length)))
    drafter = NgramDrafter(text)
    each_time = []
    while drafter.behind:
        CountedToken.looks = 0
        drafter.draft(MAX_DRAFT)
        each_time.append(CountedToken.looks)
    assert len(each_time) == 10
    assert max(each_time) <= sum(range(SHORTEST, LONGEST + 1)) * (TAKEN_IN + 1)
    drafter.extend(text[length - 9 : length - 4])
    assert drafter.draft(4).tokens == tuple(text[length - 4 :])
    drafter.extend(text[3:7])
    assert drafter.draft(4).tokens == tuple(text[7:11])


def test_a_prompt_is_looked_at_while_it_is_prefilled() -> None:
    speculation = Speculation(AUTO)
    text = list(range(3 * TAKEN_IN))
    for left in (2, 1, 0):
        speculation.sees(text)
        assert isinstance(speculation.drafter, NgramDrafter)
        assert speculation.drafter.behind == left * TAKEN_IN
    Speculation(OFF).sees(text)


# -- how many ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chance", "cost", "least", "most"),
    [
        (0.9, StepCost(60, 5), 3, 12),  # a slow link
        (0.97, StepCost(400, 1), MAX_DRAFT, MAX_DRAFT),
        (0.2, StepCost(60, 1), 1, 2),  # a position costs next to nothing: one right in five is worth it
        (0.05, StepCost(60, 5), 0, 0),
        (0.9, StepCost(20, 20), 0, 0),  # on loopback, where each position costs a step
        (0.97, StepCost(20, 4), 4, 16),
        (0.5, StepCost(0, 0), 0, 0),
    ],
)
def test_as_many_are_drafted_as_pay(chance: float, cost: StepCost, least: int, most: int) -> None:
    assert least <= drafts_that_pay(chance, MAX_DRAFT, cost) <= most


@given(st.floats(0, 0.97), st.floats(0.1, 1000), st.floats(0, 1000), st.integers(0, MAX_DRAFT))
def test_drafts_that_pay_make_more_tokens_in_a_time(chance: float, single: float, position: float, most: int) -> None:
    count = drafts_that_pay(chance, most, StepCost(single, position))
    assert 0 <= count <= most
    if count:
        tokens = sum(chance**right for right in range(count + 1))
        assert tokens / (single + count * position) >= PAYS / single * (1 - 1e-9)


def test_what_drafts_are_worth_is_known_before_one_is_sent() -> None:
    """On text that only looks as if it repeats itself, none are sent once that shows; on one that does, many are."""
    for right in (True, False):
        speculation = Speculation(AUTO)
        text = [1, 2, 3]
        sent = []
        for at in range(40):
            draft = speculation.drafts(text, MAX_DRAFT)
            sent.append(len(draft))
            come = [*draft, 1 + (text[-1] % 3)] if right else [1 + (text[-1] + at) % 2, 4 + at][at % 2 : at % 2 + 1]
            speculation.came(
                reply(*come, forward_ms=20), 60.0 + 5 * len(draft), positions=1 + len(draft), drafted=len(draft)
            )
            text += come
        if right:
            assert max(sent[:8]) > 1
            assert speculation.accepted == speculation.drafted > 100
        else:
            assert not any(sent[20:])


def test_a_fixed_number_is_drafted_wherever_there_is_a_draft_and_none_where_it_is_off() -> None:
    text = [1, 2, 3, 4, 5, 1, 2]
    assert Speculation(Speculate(3, always=True)).drafts(text, MAX_DRAFT) == (3, 4, 5)
    assert Speculation(Speculate(3, always=True)).drafts(text, 2) == (3, 4)
    assert Speculation(Speculate(3, always=True)).drafts(text, 0) == ()
    assert Speculation(Speculate(3, always=True)).drafts(text, -1) == ()
    assert Speculation(OFF).drafts(text, MAX_DRAFT) == ()
    assert Speculation(AUTO).drafts(text, MAX_DRAFT) == ()  # no step was measured yet


@pytest.mark.parametrize(
    ("failure", "goes_on"),
    [
        (CacheFullError("full"), False),
        (CacheMissError("gone", reason=MissReason.EVICTED), False),
        (CacheMissError("gone", reason=MissReason.EXPIRED), True),
        (HopFailedError("broke"), True),
    ],
)
def test_where_room_ran_out_nothing_is_drafted_any_more(failure: Exception, goes_on: bool) -> None:
    speculation = Speculation(Speculate(3, always=True))
    speculation.failed(failure)  # type: ignore[arg-type]
    assert bool(speculation.drafts([1, 2, 3, 1, 2], 9)) is goes_on


@pytest.mark.parametrize("text", ["auto", "off", "1", "16"])
def test_a_choice_reads_as_it_is_written(text: str) -> None:
    assert str(Speculate.parse(text)) == text


@pytest.mark.parametrize("text", ["", "on", "0", "17", "-1", "2.5", "AUTO", "²"])
def test_a_choice_that_is_none_is_told(text: str) -> None:
    with pytest.raises(InvalidInputError, match="auto, off, or a number of tokens from 1 to 16"):
        Speculate.parse(text)


# -- frames -----------------------------------------------------------------------------------------------------------

FRAMES = EpochFrames("s", 2, 0, 1000, cache=True)


def test_without_drafts_a_step_is_a_decode_step() -> None:
    frame = StepFrames(FRAMES, FallBack.BEGIN).next([5, 6, 7], ())
    assert (frame.phase, frame.position, frame.seq_len, frame.sample, frame.draft) == (Phase.DECODE, 2, 1, 1, ())


def test_where_hops_can_be_cut_back_each_frame_begins_at_the_newest_position() -> None:
    steps = StepFrames(FRAMES, FallBack.ANYWHERE)
    frame = steps.next([5, 6, 7], (8, 9))
    assert (frame.phase, frame.position, frame.seq_len, frame.sample, frame.draft) == (Phase.VERIFY, 2, 3, 3, (8, 9))
    steps.took(frame, reply(8, 1))
    assert steps.next([5, 6, 7, 8, 1], ()).position == 4
    assert steps.most_drafts(5) == MAX_DRAFT


def test_where_one_falls_back_to_the_beginning_what_was_right_is_sent_again_for_a_while() -> None:
    steps = StepFrames(FRAMES, FallBack.BEGIN)
    text = [5, 6, 7]
    carried = []
    while True:
        drafts = (8, 9)[: steps.most_drafts(len(text))]
        frame = steps.next(text, drafts)
        assert frame.position == 2
        assert frame.known == len(text)
        carried.append(frame.seq_len)
        text.append(1)
        steps.took(frame, reply(1))
        if not drafts:
            break
    assert carried == [*range(3, MOST_AGAIN + 3), MOST_AGAIN + 1]
    assert steps.next(text, ()).phase is Phase.DECODE
    assert steps.most_drafts(len(text)) == MAX_DRAFT


def test_where_all_drafts_were_right_nothing_is_sent_again() -> None:
    steps = StepFrames(FRAMES, FallBack.BEGIN)
    steps.took(steps.next([5, 6, 7], (8, 9)), reply(8, 9, 4))
    assert steps.next([5, 6, 7, 8, 9, 4], (3,)).position == 5


@pytest.mark.parametrize("ids", [(), (8, 9, 4, 4), (7, 9), (8, 7, 4)])
def test_a_reply_that_cannot_be_one_to_the_frame_is_no_answer(ids: tuple[int, ...]) -> None:
    steps = StepFrames(FRAMES, FallBack.ANYWHERE)
    frame = steps.next([5, 6, 7], (8, 9))
    with pytest.raises(HopFailedError, match="with 2 drafts"):
        steps.took(frame, reply(*ids))


def test_a_route_falls_back_as_far_as_its_least_able_hop_and_takes_no_drafts_where_one_hop_does_not() -> None:
    anywhere, begin, none = (OpenReply("b", verify=way) for way in (FallBack.ANYWHERE, FallBack.BEGIN, None))
    assert fall_back_of([anywhere, anywhere]) is FallBack.ANYWHERE
    assert fall_back_of([anywhere, begin]) is FallBack.BEGIN
    assert fall_back_of([anywhere, begin, none]) is None
    assert StepFrames(FRAMES, None).most_drafts(3) == 0


def test_a_way_to_fall_back_that_is_not_known_here_is_none() -> None:
    for way in (FallBack.ANYWHERE, FallBack.BEGIN, None):
        told = OpenReply("b", verify=way)
        assert OpenReply.from_wire(told.to_wire()) == told
    for strange in ("sideways", 3, None, ["begin"], {}):
        assert OpenReply.from_wire({"boot": "b", "reserved_bytes": 0, "verify": strange}).verify is None
