"""Shards in a row answer as the whole model does, for every family, cut anywhere.

The reference is transformers' own model, unsharded. Cached (prompt in chunks of five, then single positions), stateless
and unsharded runs must give the same greedy tokens and logits within 1e-4; the mutation tests at the end show that a
wrong state would be seen.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch

from shard_routes import Answer, Models, assert_close, assert_far, unsharded
from tiny_models import CORE, MORE, VOCAB, num_layers

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT_LENGTH = 17
NEW_TOKENS = 64
FEW_TOKENS = 24  # for the families beyond the core, of which there are many


@pytest.fixture(scope="module")
def reference(models: Models) -> Callable[[str], Answer]:
    @functools.cache
    def answer(family: str) -> Answer:
        return unsharded(models.reference(family), prompt(), NEW_TOKENS)

    return answer


def prompt(seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (PROMPT_LENGTH,), generator=generator).tolist()


def middle(family: str) -> int:
    return num_layers(family) // 2


families = pytest.mark.parametrize(
    "family", [*CORE, *(pytest.param(family, marks=pytest.mark.long) for family in MORE)]
)


@families
def test_two_shards_answer_as_the_whole_model(family: str, models: Models, reference: Callable[[str], Answer]) -> None:
    cut = middle(family)
    route = models.route(family, [(0, cut, 0), (cut, num_layers(family), cut)])
    route.cached(prompt(), NEW_TOKENS).assert_same(reference(family))


@families
def test_an_effective_start_inside_a_shard_uses_only_the_layers_after_it(
    family: str, models: Models, reference: Callable[[str], Answer]
) -> None:
    layers = num_layers(family)
    cut = middle(family)
    route = models.route(family, [(0, cut + 1, 0), (1, layers, cut + 1)])
    route.cached(prompt(), NEW_TOKENS // 2).assert_same(_head(reference(family), NEW_TOKENS // 2))


@families
def test_one_layer_to_each_shard_so_that_every_kind_of_layer_stands_alone(
    family: str, models: Models, reference: Callable[[str], Answer]
) -> None:
    route = models.route(family, [(layer, layer + 1, layer) for layer in range(num_layers(family))])
    route.cached(prompt(), NEW_TOKENS // 2).assert_same(_head(reference(family), NEW_TOKENS // 2))


@families
def test_the_stateless_path_answers_as_the_whole_model(
    family: str, models: Models, reference: Callable[[str], Answer]
) -> None:
    cut = middle(family)
    route = models.route(family, [(0, cut, 0), (0, num_layers(family), cut)])
    known = reference(family)
    for length in (1, PROMPT_LENGTH, PROMPT_LENGTH + NEW_TOKENS - 1):
        ids = [*prompt(), *known.tokens][:length]
        assert_close(route.frame(ids, 0, None), known.logits[:length])


@families
def test_a_whole_model_on_one_node_needs_no_second(
    family: str, models: Models, reference: Callable[[str], Answer]
) -> None:
    route = models.route(family, [(0, num_layers(family), 0)])
    route.cached(prompt(), 16).assert_same(_head(reference(family), 16))


@families
def test_the_reference_is_what_generate_answers(
    family: str, models: Models, reference: Callable[[str], Answer]
) -> None:
    ids = torch.tensor([prompt()])
    output = models.reference(family).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert output[0, PROMPT_LENGTH:].tolist() == reference(family).tokens[:24]


@families
@pytest.mark.parametrize("hop", [0, 1])
def test_zeroing_one_hops_state_is_seen(
    family: str, hop: int, models: Models, reference: Callable[[str], Answer]
) -> None:
    cut = middle(family)
    route = models.route(family, [(0, cut, 0), (cut, num_layers(family), cut)])
    known = reference(family)
    states = route.open()
    assert_close(route.prefill(prompt(), states), known.logits[:PROMPT_LENGTH])
    with torch.inference_mode():
        for tensor in states[hop].tensors():
            if tensor.is_floating_point():
                tensor.zero_()
    after = route.decode(known.tokens[:8], PROMPT_LENGTH, states)
    assert_far(after, known.logits[PROMPT_LENGTH : PROMPT_LENGTH + 8])


@families
def test_every_tensor_of_the_state_matters(family: str, models: Models, reference: Callable[[str], Answer]) -> None:
    cut = middle(family)
    route = models.route(family, [(0, cut, 0), (cut, num_layers(family), cut)])
    known = reference(family)
    states = route.open()
    route.prefill(prompt(), states)
    for hop, state in enumerate(states):
        kept = [index for index, tensor in enumerate(state.tensors()) if tensor.is_floating_point()]
        assert kept
        for index in kept:
            mutant = copy.deepcopy(states)
            with torch.inference_mode():
                list(mutant[hop].tensors())[index].zero_()
            after = route.decode(known.tokens[:4], PROMPT_LENGTH, mutant)
            assert_far(after, known.logits[PROMPT_LENGTH : PROMPT_LENGTH + 4], margin=10)


@families
@pytest.mark.parametrize("hop", [0, 1])
def test_swapping_one_hops_state_between_two_sessions_is_seen(
    family: str, hop: int, models: Models, reference: Callable[[str], Answer]
) -> None:
    cut = middle(family)
    route = models.route(family, [(0, cut, 0), (cut, num_layers(family), cut)])
    known = reference(family)
    mine, others = route.open(), route.open()
    route.prefill(prompt(), mine)
    route.prefill(prompt(seed=2), others)
    mine[hop], others[hop] = others[hop], mine[hop]
    after = route.decode(known.tokens[:8], PROMPT_LENGTH, mine)
    assert_far(after, known.logits[PROMPT_LENGTH : PROMPT_LENGTH + 8])


@families
def test_sessions_that_take_turns_do_not_touch_each_other(
    family: str, models: Models, reference: Callable[[str], Answer]
) -> None:
    cut = middle(family)
    layers = num_layers(family)
    route = models.route(family, [(0, cut, 0), (cut, layers, cut)])
    other_route = models.route(family, [(0, cut + 1, 0), (cut, layers, cut + 1)])  # another start in the same shard
    known = reference(family)
    mine, others = route.open(), other_route.open()
    rows = []
    ids = [*prompt(), *known.tokens[:8]]
    for at in range(0, len(ids), 5):
        rows.append(route.frame(ids[at : at + 5], at, mine))
        other_route.frame(prompt(seed=3)[:3], others[0].position, others)
    assert_close(torch.cat(rows), known.logits[: len(ids)])


@pytest.mark.long
@families
def test_every_split_and_every_effective_start(family: str, models: Models, reference: Callable[[str], Answer]) -> None:
    layers, count = num_layers(family), NEW_TOKENS if family in CORE else FEW_TOKENS
    for cut in range(1, layers):
        for held in range(cut + 1):  # the second shard holds from here, and starts at the cut
            route = models.route(family, [(0, cut, 0), (held, layers, cut)])
            route.cached(prompt(), count).assert_same(_head(reference(family), count))


@pytest.mark.long
@families
def test_every_split_in_three(family: str, models: Models, reference: Callable[[str], Answer]) -> None:
    layers, count = num_layers(family), NEW_TOKENS if family in CORE else FEW_TOKENS
    for first in range(1, layers - 1):
        for second in range(first + 1, layers):
            route = models.route(family, [(0, first, 0), (first - 1, second, first), (second, layers, second)])
            route.cached(prompt(), count).assert_same(_head(reference(family), count))


@pytest.mark.long
@families
def test_every_split_stateless_step_by_step(family: str, models: Models, reference: Callable[[str], Answer]) -> None:
    layers, count = num_layers(family), NEW_TOKENS if family in CORE else FEW_TOKENS
    for cut in range(1, layers):
        route = models.route(family, [(0, cut, 0), (max(cut - 1, 0), layers, cut)])
        route.stateless(prompt(), count).assert_same(_head(reference(family), count))


def _head(answer: Answer, count: int) -> Answer:
    return Answer(answer.tokens[:count], answer.logits[: PROMPT_LENGTH + count - 1])
