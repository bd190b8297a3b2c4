"""Four real nodes of the real model, whole again after every test, whatever that did to them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from node_fleet import NodeFleet, node_fleet
from recovery_client import LAYERS
from smollm2 import gguf_path


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeFleet]:
    """Two nodes for each half, so that any of them may go."""
    gguf_path()
    with node_fleet(tmp_path_factory.mktemp("fleet"), LAYERS) as fleet:
        yield fleet


@pytest.fixture
def fleet(nodes: NodeFleet) -> Iterator[NodeFleet]:
    yield nodes
    nodes.mend()
