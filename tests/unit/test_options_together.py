"""All that makes answers quick at once, over two nodes: packed weights, sessions in one batch, drafts, chunks, prefixes
and states that are lost in mid-answer. Every token is compared with the whole model's of the same packed weights.

What "the same" means below float32: a token may differ where the whole model's two best logits lie within the reach of
rounding, which its own two ways of running show; most must lie well outside, and nearly all be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest
import torch
from tests.tiny_gguf import Q8, SIZES, processed

from eager_steps import trace_layers
from every_kind import COUNT, KINDS, PROMPTS, AllBegin, hold_first_step, two_turns
from in_process_mesh import tiny_mesh
from mesh_on_sockets import on_sockets
from meshnet_core.layer_range import LayerRange
from meshnet_core.stream_transport import StreamTransport
from meshnet_core.wire_form import WireForm
from meshnet_node.frame_schedule import Sequences, greedy_answer, in_steps, without_state
from meshnet_node.model_files import open_model
from meshnet_node.step_warm_up import StepState, StepWarmUp
from meshnet_node.unsplit_model import UnsplitModel
from native_compiler import needs_compiler
from prefix_chat import HOLDING
from tiny_models import num_layers, save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = {
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
"""So that products have groups of 32 and 64 weights."""
MIXTURES = {"qwen3_next"}
"""Of experts: where two of them score nearly alike, rounding may send a position elsewhere, and its logits move far."""


@dataclass(frozen=True)
class Judgement:
    """How answers compare with the whole model's, position for position.

    Attributes:
        tokens: compared.
        same: of them, those that are its best.
        settled: of them, those where its best two are further apart than rounding reaches.
        wrong: how far below the best each token is that is not excused.
    """

    tokens: int
    same: int
    settled: int
    wrong: list[float]


def judge(whole: UnsplitModel, given: Sequence[Sequences]) -> Judgement:
    rows = [in_steps(whole, each).logits for each in given]
    own = [without_state(whole, each).logits[:COUNT] for each in given]
    logits, moved = torch.cat(rows), (torch.cat(rows) - torch.cat(own)).abs().amax(-1)
    spread = float(logits.std(dim=-1).mean())
    reach = min(max(2 * float(moved.quantile(0.95)), 8 * torch.finfo(torch.bfloat16).eps * spread), spread / 4)
    tokens = torch.tensor([token for each in given for token in each.answer])
    best, second = logits.topk(2).values.unbind(-1)
    below = best - logits.gather(1, tokens[:, None])[:, 0]
    return Judgement(
        tokens=len(tokens),
        same=int((below == 0).sum()),
        settled=int((best - second > reach).sum()),
        wrong=below[below > reach].tolist(),
    )


def folder_of(family: str, root: Path) -> Path:
    if family != "Q4_1":
        return save_tiny(family, root / family, **WIDE)
    made = processed("llama", "llama", **SIZES | {"num_hidden_layers": 4})
    for name, (values, held) in made.tensors.items():
        if name.startswith("blk.") and held is Q8:
            made.tensors[name] = (0.1 * values, gguf.GGMLQuantizationType.Q4_1)
    files = open_model(str(made.write(root / "tiny.gguf")), cache_dir=root / "cache")
    return files.prepare(LayerRange(0, files.num_layers), dtype="bfloat16", packed=True)


def whole_of(folder: Path, quantize: str) -> UnsplitModel:
    return UnsplitModel(folder, torch.bfloat16, torch.device("cpu"), quantize)


LONG = pytest.mark.long
NATIVE = needs_compiler


@pytest.mark.parametrize(
    ("family", "quantize", "form", "steps"),
    [
        pytest.param("llama", "int4", WireForm.STREAM, "native", marks=NATIVE),
        ("mistral", "int8", None, "plain"),
        pytest.param("qwen3_5_text", "int4", None, "native", marks=NATIVE),
        ("lfm2", "int8", None, "compiled"),
        pytest.param("llama", "int4", WireForm.STREAM, "plain", marks=LONG),
        pytest.param("llama", "int8", WireForm.HTTP, "compiled", marks=LONG),
        pytest.param("mistral", "int4", WireForm.STREAM, "compiled", marks=LONG),
        pytest.param("mistral", "int8", WireForm.STREAM, "native", marks=[LONG, NATIVE]),
        pytest.param("gemma3_text", "int8", None, "plain", marks=LONG),
        pytest.param("lfm2", "int4", WireForm.HTTP, "plain", marks=LONG),
        pytest.param("qwen3_5_text", "int8", WireForm.STREAM, "compiled", marks=LONG),
        pytest.param("qwen3_5_text", "int4", None, "plain", marks=LONG),
        pytest.param("qwen3_next", "int4", None, "plain", marks=LONG),
        pytest.param("qwen3_next", "int8", WireForm.STREAM, "native", marks=[LONG, NATIVE]),
        pytest.param("qwen3_next", "int8", WireForm.STREAM, "compiled", marks=LONG),
        pytest.param("Q4_1", "auto", WireForm.STREAM, "plain", marks=LONG),
        pytest.param("Q4_1", "auto", WireForm.STREAM, "native", marks=[LONG, NATIVE]),
        pytest.param("Q4_1", "auto", None, "compiled", marks=LONG),
    ],
)
async def test_answers_are_those_of_the_whole_packed_model(
    family: str, quantize: str, form: WireForm | None, steps: str, tmp_path: Path
) -> None:
    folder = folder_of(family, tmp_path)
    whole, transport = whole_of(folder, quantize), AllBegin()
    ranges = ["0-1", f"2-{3 if family == 'Q4_1' else num_layers(family) - 1}"]
    async with AsyncExitStack() as running:
        mesh = await running.enter_async_context(
            tiny_mesh(folder, ranges, limits=HOLDING, dtype="bfloat16", quantize=quantize, transport=transport)
        )
        for backend in mesh.backends:
            assert backend.dtype.startswith("bfloat16+int")
            if steps == "native":
                backend.use_kernels()
            if steps == "compiled":
                warm_up = StepWarmUp(backend, trace_layers, is_worth=lambda _found: True, sleep=lambda _seconds: None)
                warm_up.run()
                assert warm_up.status.state is StepState.READY, warm_up.status.detail
        if form is not None:
            await running.enter_async_context(on_sockets(mesh, transport, form))
        hold_first_step(mesh, transport)
        found = judge(whole, await two_turns(mesh, whole))
        views = [backend.whole_view() for backend in mesh.backends]
        assert [view.step is not None for view in views] == [steps == "compiled"] * 2
        assert [view.runs_native for view in views] == [steps == "native"] * 2
        if form is WireForm.STREAM:
            assert isinstance(transport.wire, StreamTransport)
            assert set(transport.at.values()) == {url for url, _ in transport.wire._streams}  # none took posts
    # Which steps share a forward depends on when they come, and with it how they round: one may fall beyond the reach.
    assert len(found.wrong) <= found.tokens // (50 if family in MIXTURES else 100), found
    assert found.tokens == 2 * len(KINDS) * COUNT
    assert found.same >= 0.9 * found.tokens, found
    assert found.settled >= 0.4 * found.tokens, found


def test_what_is_wrong_is_not_excused(tmp_path: Path) -> None:
    """Answers of other weights, and answers to another prompt."""
    folder = folder_of("llama", tmp_path)
    four, eight = whole_of(folder, "int4"), whole_of(folder, "int8")
    given = [greedy_answer(four, prompt, COUNT)[0] for prompt in PROMPTS[:4]]
    right = judge(four, given)
    assert (right.same, right.wrong) == (right.tokens, [])
    assert judge(eight, given).wrong
    shortened = [Sequences(each.prompt[:-1], each.answer) for each in given]
    assert len(judge(four, shortened).wrong) > COUNT
