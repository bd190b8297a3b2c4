"""How fast a machine is presumably, before anything was measured on it: by its device and the weights it reads. Pure.

A decoded position reads every weight of a layer once, so its time is bytes over memory bandwidth, and something for
each layer besides. A chunk of a prompt is bound by arithmetic. The figures are of ordinary machines of each kind; what
was measured, or is given by a person, comes before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshnet_core.model_facts import ModelFacts

HOP_MS = 0.5  # a post there and back on a LAN by wire, with what both ends do for it


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """``bytes_per_ms`` of memory, ``layer_ms`` besides for each layer, ``operations_per_ms`` of matrix products."""

    bytes_per_ms: float
    layer_ms: float
    operations_per_ms: float


SPEEDS = {
    "cpu": DeviceSpeed(20e6, 0.05, 0.3e9),  # two channels of DDR4 or 5, eight cores
    "mps": DeviceSpeed(150e6, 0.05, 5e9),  # M-series, between the plain and the Max kinds
    "cuda": DeviceSpeed(600e6, 0.03, 40e9),  # a consumer's card in 16 bits
}


def layer_ms(device: str, width: float, facts: ModelFacts) -> float:
    """Milliseconds of one average layer for one decoded position; ``width`` is bytes of a weight."""
    speed = SPEEDS.get(device, SPEEDS["cpu"])
    return speed.layer_ms + width * sum(facts.layers) / facts.num_layers / speed.bytes_per_ms


def prefill_ms(device: str, facts: ModelFacts, positions: int) -> float:
    """Milliseconds of one average layer for ``positions`` of a prompt at once, arithmetic alone."""
    speed = SPEEDS.get(device, SPEEDS["cpu"])
    return 2 * positions * sum(facts.layers) / facts.num_layers / speed.operations_per_ms
