"""Opening a session: what is refused, and what a second open of the same session comes to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hop_line import EPOCH, GOOD, LIMITS, PROMPT, STEPS, URLS, Line, decode_frame, document
from meshnet_core.errors import BadFrameError, CacheFullError, CacheMissError, DrainingError, HopError, MissReason
from meshnet_core.layer_range import LayerRange
from meshnet_core.route import Hop
from meshnet_core.sampling import SamplingParams
from tiny_models import VOCAB

# -- opens that are refused --------------------------------------------------------------------------------------------


ROUTE = document().route
OTHER_SPLIT = replace(
    ROUTE, hops=tuple(Hop(f"n{at}", URLS[at], LayerRange(*ends)) for at, ends in enumerate([(0, 1), (1, 4)]))
)
LONGER = replace(ROUTE, num_layers=5, hops=(*ROUTE.hops, Hop("n2", "http://node-2", LayerRange(4, 5))))

REFUSED_OPENS: dict[str, tuple[dict[str, Any], type[HopError], str]] = {
    "another width": ({"hidden_size": 64}, BadFrameError, "hidden size 64 asked for, the model has 32"),
    "another depth": ({"route": LONGER}, BadFrameError, "5 layers asked for, the model has 4"),
    "too long": ({"expected_length": 513}, BadFrameError, "513 positions, the model takes 512"),
    "another model": ({"route": replace(ROUTE, fingerprint="e" * 64)}, CacheMissError, "no shard of the model"),
    "another dtype": (
        {"route": replace(ROUTE, hops=tuple(replace(hop, dtype="bfloat16") for hop in ROUTE.hops))},
        CacheMissError,
        "compute in bfloat16, the shard computes in float32",
    ),
    "layers not held": ({"route": OTHER_SPLIT}, CacheMissError, "layers 0-0 asked for, 0-1 held"),
    "a history too short": ({"hop_index": 1, "history": tuple(PROMPT[1:])}, BadFrameError, "12 token ids .* not 11"),
    "a history of other words": (
        {"hop_index": 1, "history": (*PROMPT[1:], VOCAB)},
        BadFrameError,
        f"id {VOCAB} lies outside",
    ),
}


@pytest.mark.parametrize("name", REFUSED_OPENS)
async def test_an_open_that_cannot_be_is_refused_and_leaves_nothing(line: Line, expected: list[int], name: str) -> None:
    changes, kind, message = REFUSED_OPENS[name]
    terms = document(**changes)
    hop = line.hops[terms.hop_index]
    with pytest.raises(kind, match=message) as caught:
        await hop.open(terms)
    assert (caught.value.hop_index, caught.value.boot) == (terms.hop_index, hop.boot)
    assert len(hop.store) == hop.store.nbytes == 0
    await line.open()
    assert await line.decode(await line.prefill(PROMPT)) == expected


async def test_refused_opens_name_their_reasons(line: Line) -> None:
    for name, reason in (
        ("another model", MissReason.MODEL_MISMATCH),
        ("another dtype", MissReason.MODEL_MISMATCH),
        ("layers not held", MissReason.RANGE_MISMATCH),
    ):
        with pytest.raises(CacheMissError) as caught:
            await line.hops[0].open(document(**REFUSED_OPENS[name][0]))
        assert caught.value.reason is reason


async def test_no_room_is_a_429_that_changes_nothing(line: Line, expected: list[int]) -> None:
    store = line.hops[0].store
    await line.open()
    store.limits = replace(LIMITS, budget_bytes=store.nbytes * 3 // 2)
    with pytest.raises(CacheFullError) as caught:
        await line.hops[0].open(document(session="s-other"))
    assert (caught.value.hop_index, caught.value.boot, caught.value.never) == (0, "b-0", False)
    with pytest.raises(CacheFullError) as caught:
        await line.hops[0].open(document(session="s-other", prompt=[5] * 400))
    assert caught.value.never
    assert len(store) == 1
    assert await line.decode(await line.prefill(PROMPT)) == expected


# -- opening twice -----------------------------------------------------------------------------------------------------


async def test_the_same_open_again_is_the_same_yes(line: Line, expected: list[int]) -> None:
    for at, hop in enumerate(line.hops):
        terms = document().for_hop(at)
        assert await hop.open(terms) == await hop.open(terms)
        assert len(hop.store) == 1
    reply = await line.prefill(PROMPT)
    again = await line.hops[1].open(document().for_hop(1))
    assert again.reserved_bytes == line.hops[1].store.nbytes
    assert await line.decode(reply) == expected


@pytest.mark.parametrize("changes", [{"expected_length": 90}, {"sampling": SamplingParams(seed=1)}, {"cache": False}])
async def test_the_same_epoch_on_other_terms_is_refused_and_the_first_terms_stay(
    line: Line, expected: list[int], changes: dict[str, Any]
) -> None:
    await line.open()
    with pytest.raises(BadFrameError, match="open on other terms"):
        await line.hops[0].open(document(**changes))
    assert await line.decode(await line.prefill(PROMPT)) == expected


async def test_a_newer_epoch_replaces_the_older_and_its_late_frames_are_stale(line: Line, expected: list[int]) -> None:
    await line.begin(epoch=EPOCH - 1)
    await line.open()
    late = await line.refusal(replace(GOOD, epoch=EPOCH - 1))
    assert isinstance(late, CacheMissError)
    assert late.reason is MissReason.EPOCH_STALE
    with pytest.raises(CacheMissError) as caught:
        await line.open(epoch=EPOCH - 1)
    assert caught.value.reason is MissReason.EPOCH_STALE
    assert await line.decode(await line.prefill(PROMPT)) == expected


async def test_a_node_that_drains_takes_nobody_new_and_serves_those_it_has(line: Line, expected: list[int]) -> None:
    await line.open()
    reply = await line.prefill(PROMPT)
    line.hops[1].drain()
    with pytest.raises(DrainingError) as caught:
        await line.hops[1].open(document(session="s-new").for_hop(1))
    assert (caught.value.hop_index, caught.value.boot) == (1, "b-1")
    await line.hops[1].open(document().for_hop(1))
    assert await line.decode(reply) == expected
    told = await line.send(decode_frame(expected[-1], len(PROMPT) + STEPS - 1))
    assert told.draining == (1,)
