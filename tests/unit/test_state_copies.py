"""Copies of session state: as good as the state itself, apart from it, and cut back where the state says it can be."""

from __future__ import annotations

import pytest
import torch

from in_process_mesh import random_prompt
from meshnet_node.session_state import SessionState
from shard_routes import Models, Route, assert_close
from tiny_models import CORE, FAMILIES, num_layers

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = random_prompt(30, seed=3)
AT, CUT = 20, 13
WINDOW = 11  # of the tiny models that have one

CUT_BACK = {"llama", "qwen2", "qwen3", "qwen3_moe"}


def whole(models: Models, family: str) -> Route:
    layers = num_layers(family)
    return models.route(family, [(0, layers, 0)])


def check(route: Route) -> bool:
    """Run on with a state and with a copy of it, and with a shorter one where there can be one. Whether there can."""
    (state,) = route.open()
    route.frame(IDS[:AT], 0, [state])
    copy, nbytes = state.copied(), state.nbytes
    assert (copy.position, copy.layers) == (AT, state.layers)
    assert copy.nbytes <= nbytes
    mine = {tensor.untyped_storage().data_ptr() for tensor in state.tensors()}
    assert mine.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in copy.tensors())
    right = route.decode(IDS[AT:], AT, [state])  # writes into its own tensors, where it writes into any
    assert torch.equal(route.decode(IDS[AT:], AT, [copy]), right)
    able = state.cuts_back()
    assert able == route.open()[0].cuts_back(len(IDS))  # known before anything was run
    if able:
        shorter = state.copied(CUT)
        assert (shorter.position, shorter.nbytes < state.nbytes) == (CUT, True)
        assert_close(route.decode(IDS[CUT:], CUT, [shorter])[AT - CUT :], right)
        assert torch.equal(route.decode(IDS[-1:], len(IDS) - 1, [state.copied(len(IDS) - 1)]), right[-1:])
    else:
        with pytest.raises(ValueError, match="cannot be made one of 13"):
            state.copied(CUT)
    return able


@pytest.mark.parametrize("family", CORE)
def test_a_copy_goes_on_as_the_state_and_can_be_shorter_where_the_state_says_so(models: Models, family: str) -> None:
    assert check(whole(models, family)) == (family in CUT_BACK)


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(CORE)))
def test_the_same_of_every_other_family(models: Models, family: str) -> None:
    check(whole(models, family))


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_window_can_be_cut_back_until_it_slides(models: Models, family: str) -> None:
    route = whole(models, family)
    (state,) = route.open()
    right = route.frame(IDS[: WINDOW - 1], 0, [state])
    assert state.cuts_back()
    assert_close(route.decode(IDS[5 : WINDOW - 1], 5, [state.copied(5)]), right[5:])
    route.decode(IDS[WINDOW - 1 : WINDOW], WINDOW - 1, [state])
    assert not state.cuts_back()


def test_only_an_empty_state_of_the_same_layers_begins_from_another(models: Models) -> None:
    route = whole(models, "llama")
    (state,) = route.open()
    route.frame(IDS[:AT], 0, [state])
    (begun,) = route.open()
    begun.begin_from(state, CUT)
    assert begun.position == CUT
    with pytest.raises(ValueError, match="cannot begin from"):
        begun.begin_from(state, CUT)
    with pytest.raises(ValueError, match="cannot begin from"):
        SessionState(state.layers.starting_at(1), begun.cache).begin_from(state, CUT)
