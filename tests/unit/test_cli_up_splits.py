"""How `meshnet up` cuts a model: where it can be cut, and never where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshnet_cli.up import plan_splits
from meshnet_core.errors import InvalidInputError, UnsupportedModelError
from tiny_models import num_layers, save_tiny


def shown(model: Path, nodes: int | None = None, split: str | None = None) -> list[str]:
    return [str(layers) for layers in plan_splits(str(model), nodes, split)]


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gemma4 whose layers 4 and 5 use the keys and values of layers 2 and 3, so that 2-5 stay together."""
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    kinds += ["full_attention", "sliding_attention"]
    folder = tmp_path_factory.mktemp("sharing") / "gemma4"
    return save_tiny("gemma4_text", folder, layer_types=kinds, num_hidden_layers=6, num_kv_shared_layers=2)


def test_a_model_is_cut_evenly_where_it_can_be_cut(sharing: Path) -> None:
    assert shown(sharing) == ["0-1", "2-5"]
    assert shown(sharing, nodes=3) == ["0-0", "1-1", "2-5"]
    with pytest.raises(InvalidInputError, match="can be cut into 1 to 3 nodes, not 4"):
        shown(sharing, nodes=4)


def test_a_split_that_cannot_work_is_refused_with_one_that_does(sharing: Path) -> None:
    assert shown(sharing, split="0-1,2-5") == ["0-1", "2-5"]
    with pytest.raises(UnsupportedModelError, match=r"nearest split that works is 0-1,2-5"):
        shown(sharing, split="0-2,3-5")


def test_a_model_that_can_be_cut_nowhere_gets_one_node(tmp_path: Path) -> None:
    folder = save_tiny("zamba2", tmp_path / "tiny")
    assert shown(folder) == [f"0-{num_layers('zamba2') - 1}"]
    with pytest.raises(InvalidInputError, match="this model cannot be cut, so one node must hold it, not 2"):
        shown(folder, nodes=2)


def test_most_models_are_cut_in_halves(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "tiny")
    assert shown(folder) == ["0-1", "2-3"]
    assert shown(folder, split="0-2,1-3") == ["0-2", "1-3"]
