"""What makes a step quick on a CPU in bfloat16 leaves every family's logits as transformers' own modules give them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from in_process_mesh import random_prompt
from meshnet_core.layer_range import LayerRange
from meshnet_node import cpu_attention, layer_view, packed_linear
from meshnet_node.cpu_attention import attend
from meshnet_node.packed_linear import PackedLinear, can_pack
from meshnet_node.session_state import SessionState
from meshnet_node.shard_loader import load_shard
from meshnet_node.shard_work import ShardResult, ShardWork
from shard_routes import Models, Route
from tiny_models import CORE, FAMILIES, num_layers

pytestmark = pytest.mark.usefixtures("one_thread")


def logits_of(models: Models, family: str) -> tuple[torch.Tensor, int]:
    """Of a prompt in chunks and some steps, in bfloat16; and how many matrices were packed."""
    layers = num_layers(family)
    shard = load_shard(models.folder(family), LayerRange(0, layers), dtype="bfloat16", device="cpu")
    route, ids = Route([(shard, 0)]), random_prompt(16)
    states = route.open()
    logits = torch.cat([route.prefill(ids[:12], states), route.decode(ids[12:], 12, states)])
    assert shard.weight_bytes > 0
    return logits, sum(isinstance(module, PackedLinear) for module in shard._model.modules())


def check_family(models: Models, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_LEAST_ELEMENTS", 1)
    quick, packed = logits_of(models, family)
    assert packed >= num_layers(family) or not can_pack()
    monkeypatch.setattr(packed_linear, "can_pack", lambda _dtype: False)
    monkeypatch.setattr(layer_view, "use_cpu_attention", lambda *_: None)
    plain, packed = logits_of(models, family)
    assert packed == 0
    torch.testing.assert_close(quick, plain, rtol=0.1, atol=0.1)  # rounding; most have the same bits


@pytest.mark.parametrize("family", CORE)
def test_a_family_computes_the_same(models: Models, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_family(models, family, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(CORE)))
def test_so_does_every_other_family(models: Models, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_family(models, family, monkeypatch)


@pytest.mark.parametrize("family", CORE)
def test_sessions_run_together_in_bfloat16_too(models: Models, family: str) -> None:
    shard = load_shard(models.folder(family), LayerRange(0, num_layers(family)), dtype="bfloat16", device="cpu")
    route = Route([(shard, 0)])
    prompts = [random_prompt(length, seed=length) for length in (5, 19)]
    alone: list[list[SessionState]] = []
    together: list[list[SessionState]] = []
    for states_of in (alone, together):
        for prompt in prompts:
            states = route.open()
            route.prefill(prompt, states)
            states_of.append(states)
    expected = [route.frame([7], len(prompt), states)[-1] for prompt, states in zip(prompts, alone, strict=True)]
    payload = torch.tensor([7], dtype=torch.int32).numpy().tobytes()
    works = [
        ShardWork(0, states[0], len(prompt), 1, payload, "float32", sample=1)
        for prompt, states in zip(prompts, together, strict=True)
    ]
    assert len({shard.batch_key(work) for work in works} - {None}) == 1
    for result, row in zip(shard.forward(works), expected, strict=True):
        assert isinstance(result, ShardResult)
        assert result.logits is not None
        torch.testing.assert_close(result.logits[-1], row, rtol=0.1, atol=0.1)


class Attention(torch.nn.Module):
    def __init__(self, sharing: int) -> None:
        super().__init__()
        self.num_key_value_groups = sharing
        self.is_causal = True


@pytest.mark.parametrize("sharing", [1, 2, 3, 7])
@pytest.mark.parametrize("positions", [1, 40, 700])
@torch.inference_mode()
def test_heads_that_ask_together_find_what_each_finds_alone(sharing: int, positions: int) -> None:
    query = torch.randn(1, 4 * sharing, 1, 64, dtype=torch.bfloat16)
    room = torch.randn(2, 1, 4, positions + 9, 64, dtype=torch.bfloat16)
    key, value = room[:, :, :, :positions]  # views with room behind them, as caches hold
    module = Attention(sharing)
    mine, _ = attend(module, query, key, value, None, scaling=0.2)
    theirs, _ = sdpa_attention_forward(module, query, key, value, None, scaling=0.2)
    torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)
    exact = functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), scale=0.2, enable_gqa=True
    )
    torch.testing.assert_close(mine.double(), exact.transpose(1, 2), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("sharing", [2, 3, 7])
@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_so_do_several_positions_behind_others(sharing: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(rows, 4 * sharing, 17, 64, dtype=torch.bfloat16)
    key, value = torch.randn(2, rows, 4, 80, 64, dtype=torch.bfloat16)
    mask = torch.ones(rows, 1, 17, 80, dtype=torch.bool).tril(63)
    module = Attention(sharing)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.2)
    monkeypatch.setattr(cpu_attention, "sdpa_attention_forward", None)
    mine, _ = attend(module, query, key, value, mask, scaling=0.2)
    torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)
    added = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, float("-inf"))
    mine, _ = attend(module, query, key, value, added, scaling=0.2)
    torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


@torch.inference_mode()
def test_all_else_goes_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "_LARGEST_MASK", 2 * 2 * 9 - 1)
    module = Attention(2)
    key, value = torch.randn(2, 1, 2, 9, 16)
    for count, mask in ((9, None), (2, torch.ones(1, 1, 2, 9).tril(7) > 0), (1, torch.arange(9).view(1, 1, 1, 9) > 3)):
        query = torch.randn(1, 4, count, 16)
        mine, _ = attend(module, query, key, value, mask)
        theirs, _ = sdpa_attention_forward(module, query, key, value, mask)
        assert torch.equal(mine, theirs)
