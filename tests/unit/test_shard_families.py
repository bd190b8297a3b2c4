"""Every family: cached, stateless and unsharded runs agree at every split, whatever the chunks and whatever is lost.

Beside ``test_shard_parity.py`` (mutations, effective starts, greedy runs from one prompt): prompts longer than the
kernels' chunks, prefill in chunks of 1, 7 and 64, state lost in mid-answer, the experts chosen, and the bytes counted.
The quick suite takes the families that meshnet is made for at one split each; the long one all families at every split.
"""

from __future__ import annotations

import functools
import io
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from meshnet_core.errors import UnsupportedModelError
from meshnet_core.layer_range import LayerRange
from meshnet_node import family_support
from meshnet_node.session_state import SessionState, tensors_of_each_layer
from meshnet_node.shard_loader import load_shard, read_config
from shard_routes import Answer, Models, Route, assert_close, assert_far, unsharded
from tiny_models import ALL, CORE, VOCAB, WHOLE, num_layers, save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT_LENGTH = 70  # more than one chunk of 64, of ours and of the delta rule's kernels
COUNT = 48
CHUNKS = (1, 7, 64)
MISSES = (1, 7, 40)  # tokens of the answer already made when every hop has lost its state

MIXTURES = [family for family, settings in ALL.items() if any("experts" in name for name in settings)]


@pytest.fixture(scope="module")
def reference(models: Models) -> Callable[[str], Answer]:
    @functools.cache
    def answer(family: str) -> Answer:
        return unsharded(models.reference(family), prompt(), COUNT)

    return answer


def prompt(seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (PROMPT_LENGTH,), generator=generator).tolist()


def middle_route(family: str, models: Models) -> Route:
    """Two hops, or one where the family cannot be cut."""
    layers, cut = num_layers(family), num_layers(family) // 2
    return models.route(family, [(0, layers, 0)] if family in WHOLE else [(0, cut, 0), (cut, layers, cut)])


def long_unless_core(families: Sequence[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "family", [family if family in CORE else pytest.param(family, marks=pytest.mark.long) for family in families]
    )


def assert_agrees(route: Route, known: Answer) -> None:
    """The whole sequence without state; the prompt in chunks; an answer that loses its state three times."""
    ids = [*prompt(), *known.tokens]
    assert_same(route.frame(ids[:-1], 0, None), known, 0)
    for chunk in CHUNKS:
        states = route.open()
        assert_same(route.prefill(prompt(), states, chunk), known, 0)
        assert_same(route.decode(known.tokens[:2], PROMPT_LENGTH, states), known, PROMPT_LENGTH)
    states = route.open()
    route.prefill(prompt(), states, 64)
    for made in range(1, COUNT):
        position = PROMPT_LENGTH + made - 1
        if made in MISSES:
            states = route.open()  # as after an eviction on every hop: prompt and answer so far once more
            assert_same(route.prefill(ids[:position], states, 64), known, 0)
        assert_same(route.frame([ids[position]], position, states), known, position)


def assert_same(rows: torch.Tensor, known: Answer, position: int) -> None:
    """Logits of positions from ``position`` on, and of those in the answer the token that they choose."""
    expected = known.logits[position : position + len(rows)]
    assert_close(rows, expected)
    start = max(PROMPT_LENGTH - 1 - position, 0)
    at = position + start - (PROMPT_LENGTH - 1)
    chosen = rows[start:].argmax(dim=-1).tolist()
    assert chosen == known.tokens[at : at + len(chosen)]


@pytest.mark.parametrize("family", CORE)
def test_any_chunks_and_any_loss_give_the_same_answer(
    family: str, models: Models, reference: Callable[[str], Answer]
) -> None:
    assert_agrees(middle_route(family, models), reference(family))


@pytest.mark.parametrize("family", CORE)
def test_an_effective_start_loses_and_recovers_alike(
    family: str, models: Models, reference: Callable[[str], Answer]
) -> None:
    layers, cut = num_layers(family), num_layers(family) // 2
    assert_agrees(models.route(family, [(0, cut + 1, 0), (cut, layers, cut + 1)]), reference(family))


@pytest.mark.long
@pytest.mark.parametrize("family", ALL)
def test_every_split_of_every_family(family: str, models: Models, reference: Callable[[str], Answer]) -> None:
    layers = num_layers(family)
    cuts = family_support.cuts_of(read_config(models.folder(family)))
    assert cuts == (() if family in WHOLE else tuple(range(1, layers)))
    assert_agrees(models.route(family, [(0, layers, 0)]), reference(family))
    for cut in cuts:
        # The second shard of each split also holds the layer before it, so every split has an effective start inside.
        assert_agrees(models.route(family, [(0, cut, 0), (cut - 1, layers, cut)]), reference(family))


@pytest.mark.parametrize("family", WHOLE)
def test_a_family_that_cannot_be_cut_is_refused_in_pieces_and_answers_whole(
    family: str, models: Models, reference: Callable[[str], Answer]
) -> None:
    layers = num_layers(family)
    for held in (LayerRange(0, 1), LayerRange(1, layers), LayerRange(1, 2)):
        with pytest.raises(UnsupportedModelError, match=rf"{family} cannot be cut .*one node must hold all of it"):
            load_shard(models.folder(family), held, dtype="float32", device="cpu")
    whole = models.shard(family, 0, layers)
    with pytest.raises(UnsupportedModelError, match="cannot be cut"):
        whole.new_state(1)
    assert_agrees(Route([(whole, 0)]), reference(family))


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gemma4 whose layers 4 and 5 use the keys and values of layers 2 and 3."""
    kinds = ["sliding_attention", "full_attention"] * 3
    folder = tmp_path_factory.mktemp("sharing") / "gemma4"
    return save_tiny("gemma4_text", folder, layer_types=kinds, num_hidden_layers=6, num_kv_shared_layers=2)


@pytest.mark.parametrize(
    ("start", "stop", "between", "sharer", "source", "nearest"),
    [
        (0, 3, "2 and 3", 4, 2, "0-1,2-5"),
        (4, 6, "3 and 4", 4, 2, "0-1,2-5"),
        (5, 6, "4 and 5", 5, 3, "0-1,2-5"),
        (1, 4, "3 and 4", 4, 2, "0-1,2-5"),
    ],
)
def test_a_split_between_a_layer_and_the_one_whose_keys_it_uses_is_refused_by_name(
    start: int, stop: int, between: str, sharer: int, source: int, nearest: str, sharing: Path
) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        load_shard(sharing, LayerRange(start, stop), dtype="float32", device="cpu")
    message = refusal.value.message
    assert f"cannot be cut between layers {between}" in message
    assert f"layer {sharer} uses the keys and values of layer {source}" in message
    assert f"the nearest split that works is {nearest}" in message


def test_layers_that_share_keys_and_values_work_where_they_stay_together(sharing: Path) -> None:
    whole: Any = AutoModelForCausalLM.from_pretrained(sharing, dtype=torch.float32).eval()
    whole.base_model.first_kv_shared_layer_idx = -1  # what cuts positions off there needs per-layer embeddings
    known = unsharded(whole, prompt(), COUNT)
    assert family_support.cuts_of(read_config(sharing)) == (1, 2)
    tail = load_shard(sharing, LayerRange(0, 6), dtype="float32", device="cpu")
    for cut in (0, 1, 2):
        head = [(load_shard(sharing, LayerRange(0, cut), dtype="float32", device="cpu"), 0)] if cut else []
        assert_agrees(Route([*head, (tail, cut)]), known)
    with pytest.raises(UnsupportedModelError, match="layer 4 uses the keys and values of layer 2"):
        tail.new_state(3)


def test_layers_that_see_the_token_ids_cannot_be_cut(tmp_path: Path) -> None:
    streams: dict[str, Any] = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
    folder = save_tiny("gemma4_text", tmp_path, num_kv_shared_layers=2, **streams)
    with pytest.raises(UnsupportedModelError, match=r"embedding of the token ids .*one node must hold all of it"):
        load_shard(folder, LayerRange(0, 2), dtype="float32", device="cpu")
    whole: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    route = Route([(load_shard(folder, LayerRange(0, 5), dtype="float32", device="cpu"), 0)])
    assert_agrees(route, unsharded(whole, prompt(), COUNT))


@pytest.mark.parametrize("family", ["llama", "zamba2"])
def test_a_config_alone_tells_what_would_be_refused(family: str, models: Models) -> None:
    document = json.loads((models.folder(family) / "config.json").read_text())
    family_support.check_config(document, LayerRange(0, num_layers(family)))
    if family in WHOLE:
        with pytest.raises(UnsupportedModelError, match="one node must hold all of it"):
            family_support.check_config(document, LayerRange(0, 1))
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(UnsupportedModelError, match="quantized"):
        family_support.check_config({**document, **quantized}, LayerRange(0, num_layers(family)))
    with pytest.raises(UnsupportedModelError, match="transformers cannot use"):
        family_support.check_config({**document, "model_type": "no_such"}, LayerRange(0, 1))


def test_a_minimax_with_a_window_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("minimax", tmp_path, sliding_window=11)
    with pytest.raises(UnsupportedModelError, match="sliding window"):
        load_shard(folder, LayerRange(0, 2), dtype="float32", device="cpu")


@long_unless_core(MIXTURES)
def test_the_same_experts_are_chosen_with_and_without_state(family: str, models: Models) -> None:
    """Per layer and position: stateless over the whole sequence, cached in chunks and steps, and unsharded."""
    ids = prompt()
    route = middle_route(family, models)
    views = [shard._view(start).model for shard, start in route.hops]
    with torch.inference_mode(), experts_chosen([models.reference(family)]) as expected:
        models.reference(family)(torch.tensor([ids]), use_cache=False)
    with experts_chosen(views) as stateless:
        route.frame(ids, 0, None)
    with experts_chosen(views) as cached:
        states = route.open()
        route.prefill(ids[:50], states, 7)
        route.decode(ids[50:], 50, states)
    assert expected
    assert len({len(layer) for layer in expected}) == 1
    assert stateless == expected
    assert cached == expected


@contextmanager
def experts_chosen(models: Sequence[nn.Module]) -> Iterator[list[list[frozenset[int]]]]:
    """Collects, for each router in order, the experts chosen at each position."""
    chosen: list[list[frozenset[int]]] = []
    with ExitStack() as hooks:
        for model in models:
            for module in model.modules():
                if "router" in type(module).__name__.lower():
                    of_layer: list[frozenset[int]] = []
                    chosen.append(of_layer)
                    hook = module.register_forward_hook(functools.partial(_note, of_layer))
                    hooks.callback(hook.remove)
        yield chosen


def _note(into: list[frozenset[int]], _module: nn.Module, _inputs: object, output: Sequence[torch.Tensor]) -> None:
    if output[-1].is_floating_point():  # llama4's: scores of all experts, zero where not chosen
        into += [frozenset(row.nonzero().flatten().tolist()) for row in output[0]]
    else:
        into += [frozenset(row.tolist()) for row in output[-1]]


@long_unless_core(list(ALL))
def test_every_tensor_of_a_state_counts(family: str, models: Models) -> None:
    """``nbytes`` against what pickling the cache object comes upon, and per layer as the announced sizes count it."""
    route = middle_route(family, models)
    states = route.open()
    route.prefill(prompt()[:20], states)
    route.decode(prompt()[20:34], 20, states)  # past any window, which then is a tensor of its own
    for (shard, start), state in zip(route.hops, states, strict=True):
        assert state.nbytes == sum(storages_by_pickling(state).values())
        of_layers = [tensor for tensors in tensors_of_each_layer(state.cache) for tensor in tensors]
        assert {id(tensor) for tensor in of_layers} == {id(tensor) for tensor in state.tensors()}
        assert 0 < state.nbytes <= shard.state_bytes(start, state.position)


def storages_by_pickling(state: SessionState) -> dict[int, int]:
    """Address -> bytes of each storage, found by the pickle module's own walk."""
    found: dict[int, int] = {}

    class Walk(pickle.Pickler):
        def persistent_id(self, thing: object) -> str | None:
            if not isinstance(thing, torch.Tensor):
                return None
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            return "tensor"

    Walk(io.BytesIO()).dump(state.cache)
    return found


def test_losing_a_frame_of_several_positions_is_seen(models: Models, reference: Callable[[str], Answer]) -> None:
    """Jamba's scan would begin at zero with each such frame: what runs them position by position is needed."""
    route = middle_route("jamba", models)
    known = reference("jamba")
    assert_same(route.prefill(prompt(), route.open(), 7), known, 0)
    views = [shard._view(start) for shard, start in route.hops]
    for view in views:
        view._steps_only = False
    try:
        assert_far(route.prefill(prompt(), route.open(), 7), known.logits[:PROMPT_LENGTH])
    finally:
        for view in views:
            view._steps_only = True
