"""The generation loop over real shards in this process, against the unsharded model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from in_process_mesh import (
    MODEL,
    add_node,
    random_prompt,
    reference_greedy,
    reference_model,
    tiny_mesh,
)
from meshnet_core.errors import (
    CacheMissError,
    HopUnreachableError,
    LayersUnavailableError,
    MissReason,
    RequestRefusedError,
)
from meshnet_core.frames import Frame, Phase
from meshnet_core.sampling import SampledToken, SamplingParams
from meshnet_gateway.generation import GenerationRequest
from meshnet_node.cache_store import SessionKey
from tiny_models import save_tiny

PROMPT = random_prompt(17)
COUNT = 24


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3_5_moe_text", tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    return reference_greedy(reference_model(llama), PROMPT, COUNT)


@pytest.mark.parametrize("ranges", [["0-3"], ["0-1", "2-3"], ["0-0", "1-1", "2-3"], ["0-2", "1-3"]])
@pytest.mark.parametrize("chunk", [256, 5])
async def test_cached_answer_equals_the_unsharded_model(
    llama: Path, expected: list[int], ranges: list[str], chunk: int
) -> None:
    async with tiny_mesh(llama, ranges) as mesh:
        tokens, report = await mesh.answer(PROMPT, COUNT, chunk=chunk)
        assert [token.id for token in tokens] == expected
        assert report["mode"] == "cached"
        assert report["epochs"] == 1
        assert report["recoveries"] == []
        assert mesh.held_sessions == 0


async def test_stateless_answer_equals_the_unsharded_model(llama: Path, expected: list[int]) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        tokens, report = await mesh.answer(PROMPT, COUNT, cache=False)
        assert [token.id for token in tokens] == expected
        assert report["mode"] == "stateless"
        assert all(frame.position == 0 and not frame.cache for _, frame in mesh.transport.frames)
        assert mesh.held_sessions == 0


async def test_hybrid_cached_equals_stateless_equals_unsharded(hybrid: Path) -> None:
    reference = reference_greedy(reference_model(hybrid), PROMPT, COUNT)
    async with tiny_mesh(hybrid, ["0-0", "1-2", "3-4"]) as mesh:
        cached, _ = await mesh.answer(PROMPT, COUNT, chunk=5)
        stateless, _ = await mesh.answer(PROMPT, COUNT, cache=False)
        assert [token.id for token in cached] == reference
        assert [token.id for token in stateless] == reference


async def test_seeded_sampling_is_the_same_cached_and_stateless(llama: Path) -> None:
    params = SamplingParams(
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        seed=11,
        logprobs=3,
    )
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        cached, _ = await mesh.answer(PROMPT, COUNT, params)
        stateless, _ = await mesh.answer(PROMPT, COUNT, params, cache=False)
        other, _ = await mesh.answer(PROMPT, COUNT, SamplingParams(temperature=0.9, seed=12))
    assert [token.id for token in cached] == [token.id for token in stateless]
    assert [token.id for token in cached] != [token.id for token in other]
    for a, b in zip(cached, stateless, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert len(a.top) == 3


async def test_the_wire_carries_one_session_and_one_position_per_step(llama: Path) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        _, report = await mesh.answer(PROMPT, 6, chunk=8)
        frames = mesh.transport.frames
        assert {frame.session for _, frame in frames} == {report["session"]}
        into_second = [frame for url, frame in frames if url == mesh.urls[1]]
        prefill = [frame for frame in into_second if frame.phase is Phase.PREFILL]
        decode = [frame for frame in into_second if frame.phase is Phase.DECODE]
        assert [(frame.position, frame.seq_len, frame.sample) for frame in prefill] == [
            (0, 8, 0),
            (8, 8, 0),
            (16, 1, 1),
        ]
        assert [frame.position for frame in decode] == [17, 18, 19, 20, 21]
        assert all(frame.seq_len == 1 and len(frame.body) == 32 * 4 for frame in decode)
        assert report["bytes_per_step"] == [4, 32 * 4]


async def test_a_stop_id_ends_the_answer_and_is_not_part_of_it(llama: Path, expected: list[int]) -> None:
    stop = expected[5]
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        tokens, _ = await mesh.answer(PROMPT, COUNT, stop_ids=frozenset({stop}))
    assert [token.id for token in tokens] == expected[: expected.index(stop)]


async def test_a_session_holds_only_its_own_layers_state(hybrid: Path) -> None:
    seen: list[tuple[str, int]] = []
    async with tiny_mesh(hybrid, ["0-1", "2-4"]) as mesh:

        def look(*_: object) -> None:
            for service in mesh.services.values():
                for held in service.store:
                    assert held.state is not None
                    seen.append((str(held.state.layers), len(held.state.cache.layers)))

        await mesh.answer(PROMPT, 3, during=look)
    assert set(seen) == {("0-1", 2), ("2-4", 3)}


async def test_eviction_in_mid_answer_is_a_miss_and_changes_nothing(llama: Path, expected: list[int]) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        count = 0

        def evict(generation: object, _: object) -> None:
            nonlocal count
            count += 1
            if count in {1, 7, 13}:
                service = mesh.services[mesh.urls[count % 2]]
                service.store.drop(SessionKey(generation.session, count % 2), MissReason.EVICTED)  # type: ignore[attr-defined]

        tokens, report = await mesh.answer(PROMPT, COUNT, during=evict)
        assert [token.id for token in tokens] == expected
        assert report["epochs"] == 4
        reasons = [event["reason"] for event in report["recoveries"]]  # type: ignore[attr-defined]
        assert reasons == ["evicted"] * 3
        assert mesh.held_sessions == 0


async def test_a_node_that_restarts_is_prefilled_again(llama: Path, expected: list[int]) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        old = []

        def restart(_: object, token: object) -> None:
            if len(mesh.transport.frames) == 2 * 5:
                old.append(mesh.kill(mesh.urls[1]))
                add_node(mesh, llama, mesh.urls[1], "2-3")

        tokens, report = await mesh.answer(PROMPT, COUNT, during=restart)
        assert old
        assert [token.id for token in tokens] == expected
        assert report["epochs"] == 2
        await old[0].close()


async def test_a_dead_node_is_routed_around(llama: Path, expected: list[int]) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3", "1-3"]) as mesh:
        victims = []

        def kill(_: object, token: object) -> None:
            if len(mesh.transport.frames) >= 2 * 8 and not victims:
                # Whichever of the two second nodes serves this route.
                victims.append(mesh.transport.frames[-1][0])
                mesh.kill(victims[0])

        tokens, report = await mesh.answer(PROMPT, COUNT, during=kill)
        assert [token.id for token in tokens] == expected
        assert report["epochs"] == 2
        assert victims[0].removeprefix("http://") not in {hop["node"] for hop in report["route"]}  # type: ignore[attr-defined]


async def test_ids_of_another_models_tokenizer_are_not_run(llama: Path) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        served = await mesh.model(MODEL)
        request = GenerationRequest(MODEL, tuple(PROMPT), 2, SamplingParams(), fingerprint=served.fingerprint)
        generation = mesh.engine().start(request)
        assert len([event async for event in generation if isinstance(event, SampledToken)]) == 2
        await generation.aclose()
        other = mesh.engine().start(replace(request, fingerprint="not the one"))
        with pytest.raises(LayersUnavailableError, match="other contents"):
            await anext(aiter(other))
        await other.aclose()
        assert mesh.held_sessions == 0


async def test_nobody_covering_ends_in_an_error_that_names_the_layers(llama: Path) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:

        def kill(_: object, token: object) -> None:
            mesh.transport.endpoints.pop(mesh.urls[1], None)
            mesh.down.add(mesh.urls[1])

        with pytest.raises(LayersUnavailableError, match="2-3"):
            await mesh.answer(PROMPT, COUNT, during=kill)
        assert mesh.services[mesh.urls[0]].store.nbytes == 0


async def test_a_broken_connection_costs_a_retry_and_no_prefill(llama: Path, expected: list[int]) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        broken = []

        def break_some(url: str, frame: Frame) -> None:
            if frame.phase is Phase.DECODE and frame.position % 5 == 0 and (url, frame.position) not in broken:
                broken.append((url, frame.position))
                raise HopUnreachableError("broken on purpose", hop_index=frame.hop_index)

        mesh.transport.on_forward = break_some
        tokens, report = await mesh.answer(PROMPT, COUNT)
        assert [token.id for token in tokens] == expected
        assert {url for url, _ in broken} == set(mesh.urls)
        assert report["epochs"] == 1


async def test_misses_without_end_come_down_to_the_stateless_path(llama: Path, expected: list[int]) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:

        def always_miss(url: str, frame: Frame) -> None:
            if frame.cache and frame.hop_index == 1:
                raise CacheMissError("on purpose", reason=MissReason.EVICTED, hop_index=1)

        mesh.transport.on_forward = always_miss
        tokens, report = await mesh.answer(PROMPT, COUNT)
        assert [token.id for token in tokens] == expected
        assert report["mode"] == "stateless"


async def test_eight_sessions_at_once_answer_as_when_alone(llama: Path) -> None:
    prompts = [random_prompt(9 + 3 * index, seed=index) for index in range(6)]
    shared = random_prompt(40, seed=99)
    prompts += [shared + random_prompt(5, seed=100), shared + random_prompt(5, seed=101)]
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        alone = [(await mesh.answer(prompt, 16))[0] for prompt in prompts]
        together = await asyncio.gather(*(mesh.answer(prompt, 16, chunk=7) for prompt in prompts))
        assert [tokens for tokens, _ in together] == alone
        assert mesh.held_sessions == 0


async def test_a_caller_that_leaves_in_mid_prefill_stops_it(llama: Path) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        request = GenerationRequest(MODEL, tuple(random_prompt(200)), 5, SamplingParams())
        generation = mesh.engine(chunk=4).start(request)
        events = aiter(generation)
        first = await anext(events)
        sent = len(mesh.transport.frames)
        await generation.aclose()
        assert mesh.held_sessions == 0
        await asyncio.sleep(0.05)
        assert len(mesh.transport.frames) <= sent + 2 * 2  # what was in flight, at most two chunks over two hops
        assert first.done == 4  # type: ignore[union-attr]


async def test_a_prompt_too_long_is_refused_with_both_numbers(llama: Path) -> None:
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:
        with pytest.raises(RequestRefusedError, match=r"600.*512"):
            await mesh.answer(random_prompt(600), 1)


async def test_zeroed_state_would_be_noticed(llama: Path, expected: list[int]) -> None:
    """The comparison above can fail: an answer from state that was wiped differs."""
    async with tiny_mesh(llama, ["0-1", "2-3"]) as mesh:

        def wipe(*_: object) -> None:
            for held in mesh.services[mesh.urls[1]].store:
                assert held.state is not None
                with torch.inference_mode():
                    for tensor in held.state.tensors():
                        tensor.zero_()

        tokens, _ = await mesh.answer(PROMPT, COUNT, during=wipe)
        assert [token.id for token in tokens] != expected
