"""The main job, with real processes and the real model: cached == stateless == `generate()`, token for token.

Nodes run in processes of their own and speak over loopback; the reference is the unsharded model in this process,
read by transformers itself. Greedy, float32.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from free_ports import free_port
from meshnet_core.sampling import SamplingParams
from process_mesh import Answer, MeshClient, ProcessMesh, fetch_json, mesh_client, process_mesh
from smollm2 import HIDDEN_SIZE, gguf_path, reference_model, reference_tokenizer
from wire_tap import wire_tap

pytestmark = pytest.mark.real_model

QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a map.",
    "List three uses of copper and explain each in one sentence.",
)
TIE = 1e-3  # two tokens whose logits lie this close are both right: see design, "What the same answer means"


@cache
def prompt_of(question: str) -> tuple[int, ...]:
    """The chat prompt's token ids."""
    text = reference_tokenizer().apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return tuple(reference_tokenizer()(text, add_special_tokens=False)["input_ids"])


@cache
def generated(question: str, count: int) -> tuple[int, ...]:
    """What `generate()` of the unsharded model answers: exactly ``count`` tokens, greedy."""
    prompt = torch.tensor([prompt_of(question)])
    torch.set_num_threads(2)
    output = reference_model().generate(
        prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return tuple(output[0, prompt.shape[1] :].tolist())


def assert_same(question: str, got: list[int], expected: tuple[int, ...]) -> None:
    """Equal; a first difference is excused only where the reference's two best logits nearly tie."""
    if tuple(got) == expected:
        return
    at = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
    tokens = torch.tensor([[*prompt_of(question), *expected[:at]]])
    with torch.inference_mode():
        best = reference_model()(tokens, logits_to_keep=1).logits[0, -1].topk(2)
    gap = float(best.values[0] - best.values[1])
    assert {got[at], expected[at]} == set(best.indices.tolist()), f"token {at} is neither of the two best"
    assert gap < TIE, f"token {at} differs, and the two best logits lie {gap:.2g} apart"


async def answers(mesh: ProcessMesh, question: str, count: int) -> tuple[Answer, Answer]:
    """The cached and the stateless answer of a mesh."""
    async with mesh_client(mesh.tracker_url) as client:
        cached = await client.answer(prompt_of(question), count)
        stateless = await client.answer(prompt_of(question), count, cache=False)
    return cached, stateless


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessMesh]:
    """Two nodes, 15 layers each."""
    gguf_path()
    with process_mesh("smollm2", {"head": "0-14", "tail": "15-29"}, tmp_path_factory.mktemp("halves")) as mesh:
        yield mesh


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [40, pytest.param(256, marks=pytest.mark.long)])
async def test_two_nodes_equal_generate_cached_and_stateless(halves: ProcessMesh, count: int) -> None:
    question = QUESTIONS[0]
    cached, stateless = await answers(halves, question, count)
    assert len(cached.ids) == count
    assert cached.report["mode"] == "cached"
    assert stateless.report["mode"] == "stateless"
    assert [hop["layers"] for hop in cached.report["route"]] == ["0-14", "15-29"]
    assert_same(question, cached.ids, generated(question, count))
    assert cached.ids == stateless.ids


@pytest.mark.long
async def test_seeded_sampling_is_the_same_cached_and_stateless(halves: ProcessMesh) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, repetition_penalty=1.05, seed=7)
    async with mesh_client(halves.tracker_url) as client:
        prompt = prompt_of(QUESTIONS[1])
        cached = await client.answer(prompt, 48, params)
        stateless = await client.answer(prompt, 48, params, cache=False)
        again = await client.answer(prompt, 48, params)
    assert cached.ids == stateless.ids == again.ids
    assert cached.ids != list(generated(QUESTIONS[1], 48))


async def test_both_nodes_see_one_session_and_hold_only_their_own_layers(halves: ProcessMesh) -> None:
    async with mesh_client(halves.tracker_url) as client:
        answer = await client.answer(prompt_of(QUESTIONS[2]), 8)
        status = await client.node_status()
        assert status["head"]["sessions"] == status["tail"]["sessions"] == 0
        assert status["head"]["state_bytes"] == status["tail"]["state_bytes"] == 0
        recent = {name: node["recent"][-1] for name, node in status.items()}
        assert {entry["session"] for entry in recent.values()} == {answer.report["session"]}
        assert {name: entry["layers"] for name, entry in recent.items()} == {"head": "0-14", "tail": "15-29"}
        # keys and values of 3 heads of 64, in float32, for 15 layers and every position taken in
        positions = len(prompt_of(QUESTIONS[2])) + 7
        per_node = 15 * 2 * 3 * 64 * 4 * positions
        held = [entry["state_bytes"] for entry in recent.values()]
        assert held[0] == held[1]
        assert per_node <= held[0] <= per_node * 17 / 16  # with room for the next positions
        shards = {name: (await fetch_json(f"{node['url']}/healthz"))["shards"] for name, node in status.items()}
    # 3.54 M parameters a layer, 28.3 M in the embedding, which a tied head needs too
    layers, embedding = 15 * 3_540_096 * 4, 49152 * HIDDEN_SIZE * 4
    for (shard,) in shards.values():
        assert layers + embedding <= shard["weight_bytes"] <= (layers + embedding) * 1.001


@pytest.mark.parametrize("form", ["stream", pytest.param("http", marks=pytest.mark.long)])
async def test_the_wire_carries_the_newest_position_and_nothing_else(
    halves: ProcessMesh, tmp_path: Path, form: str
) -> None:
    """Reads the bytes that reach the tail, with a parser of its own, between real processes."""
    prompt, count = prompt_of(QUESTIONS[0]) * 8, 12  # over 256 positions, so two chunks
    async with wire_tap(target_port=free_port()) as tap:
        with process_mesh(
            "smollm2",
            {"head": "0-14", "tail": "15-29"},
            tmp_path,
            more={"tail": ["--port", str(tap.target_port), "--advertise", tap.url, "--wire", form]},
        ) as mesh:
            async with mesh_client(mesh.tracker_url) as client:
                answer = await client.answer(prompt, count)
    assert {frame.form for frame in tap.frames} == {form}
    assert {frame.session for frame in tap.frames} == {answer.report["session"]}
    assert {frame.start_layer for frame in tap.frames} == {15}
    prefill = sorted((frame for frame in tap.frames if frame.phase == "prefill"), key=lambda frame: frame.position)
    decode = [frame for frame in tap.frames if frame.phase == "decode"]
    assert [frame.seq_len for frame in prefill] == [256, len(prompt) - 256]
    assert [len(frame.body) for frame in prefill] == [256 * HIDDEN_SIZE * 4, (len(prompt) - 256) * HIDDEN_SIZE * 4]
    assert [frame.position for frame in decode] == [len(prompt) + i for i in range(count - 1)]
    assert {len(frame.body) for frame in decode} == {HIDDEN_SIZE * 4}
    assert {frame.seq_len for frame in decode} == {1}
    if form == "stream":
        assert max(frame.beside for frame in decode) <= 100
    assert len(tap.to("/hop/release")) == 1


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "nodes",
    [
        {"one": "0-0", "rest": "1-29"},
        {"most": "0-28", "last": "29-29"},
        {"first": "0-9", "second": "10-19", "third": "20-29"},
        {"wide": "0-19", "over": "10-29"},
    ],
    ids=["1+29", "29+1", "10+10+10", "0-19 / 10-29"],
)
async def test_64_tokens_over_other_splits(nodes: dict[str, str], tmp_path: Path) -> None:
    with process_mesh("smollm2", nodes, tmp_path) as mesh:
        for question in QUESTIONS[1:]:
            cached, stateless = await answers(mesh, question, 64)
            assert len(cached.report["route"]) == len(nodes)
            assert_same(question, cached.ids, generated(question, 64))
            assert cached.ids == stateless.ids
    if "over" in nodes:
        assert [hop["layers"] for hop in cached.report["route"]] == ["0-19", "20-29"]


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_64_tokens_over_halves(halves: ProcessMesh) -> None:
    for question in QUESTIONS[1:]:
        cached, stateless = await answers(halves, question, 64)
        assert_same(question, cached.ids, generated(question, 64))
        assert cached.ids == stateless.ids


async def _alone_then_together(client: MeshClient, prompts: list[tuple[int, ...]], count: int) -> None:
    alone = [(await client.answer(prompt, count)).ids for prompt in prompts]
    together = await asyncio.gather(*(client.answer(prompt, count) for prompt in prompts))
    assert [answer.ids for answer in together] == alone


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_eight_clients_at_once_get_the_answers_they_get_alone(halves: ProcessMesh) -> None:
    system = prompt_of("Remember these rules. " * 20)
    prompts = [
        prompt_of(f"Tell me one fact about {thing}.") for thing in ("bees", "iron", "rivers", "Mars", "tea", "owls")
    ]
    prompts += [(*system, *prompt_of("And who are you?")), (*system, *prompt_of("What is a rule?"))]
    async with mesh_client(halves.tracker_url) as client:
        await _alone_then_together(client, prompts, 24)
        status = await client.node_status()
    assert all(node["sessions"] == 0 and node["state_bytes"] == 0 for node in status.values())
