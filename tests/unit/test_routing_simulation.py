"""The simulation of routing is itself tried, in small."""

from __future__ import annotations

import pytest
from benchmarks.routing_figures import figure
from benchmarks.routing_simulation import Simulation


@pytest.mark.parametrize("seed", [1, 2])
def test_a_small_mesh_with_churn_answers_and_gives_the_same_figures_again(seed: int) -> None:
    first, second = (Simulation(40, seed).run(60.0) for _ in range(2))
    for counted in ("answers", "done", "failed", "hit", "deaths", "leaves", "by_optimum", "exploring"):
        assert getattr(first, counted) == getattr(second, counted)
    told = figure(40, first)
    assert told.answers >= 15
    assert told.success > 0.9
    assert min(first.by_optimum) >= 1.0
