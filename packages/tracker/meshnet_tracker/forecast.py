"""What speed to expect of a placement: of one answer, of many at once, and until the first token. Pure.

One answer visits the parts one after the other, so its step takes their sum; many answers keep all parts busy, so the
slowest one bounds them. A prompt goes in chunks that overlap over the parts: the first chunk takes the sum, each later
one the time of the slowest part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from meshnet_core.frames import MAX_CHUNK
from meshnet_tracker.cover import Part
from meshnet_tracker.speed import prefill_ms

if TYPE_CHECKING:
    from meshnet_core.model_facts import ModelFacts
    from meshnet_tracker.cover import Cover
    from meshnet_tracker.machine import Machine


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one cover.

    Attributes:
        step_ms: of one decoded token of one answer.
        slowest_ms: of the slowest part.
        first_token_ms: from a prompt's arrival to its first token.
    """

    step_ms: float
    slowest_ms: float
    first_token_ms: float

    @property
    def tokens_per_s(self) -> float:
        return 1000 / self.step_ms

    @property
    def tokens_per_s_together(self) -> float:
        return 1000 / self.slowest_ms


def forecast(cover: Cover, facts: ModelFacts, devices: Mapping[str, str], prompt: int) -> Forecast:
    """Of ``cover`` for prompts of so many tokens; ``devices`` by the names of its machines."""
    steps = [part.machine.time(facts, part.start, part.stop) for part in cover]
    chunks = ceil(prompt / MAX_CHUNK)
    per_part = [_chunk_ms(part, facts, devices[part.machine.name], min(prompt, MAX_CHUNK)) for part in cover]
    first = sum(per_part) + (chunks - 1) * max(per_part)
    return Forecast(sum(steps), max(steps), first)


def alone(machines: Sequence[Machine], facts: ModelFacts) -> Cover | None:
    """The whole model on the one machine that is fastest with it, spared every hop; None where none holds it."""
    able = [m for m in machines if not m.fixed and m.fits(facts, 0, facts.num_layers)]
    best = min(able, key=lambda m: (m.time(facts, 0, facts.num_layers), m.name), default=None)
    return None if best is None else [Part(best, 0, facts.num_layers)]


def _chunk_ms(part: Part, facts: ModelFacts, device: str, positions: int) -> float:
    machine, layers = part.machine, part.stop - part.start
    weights = machine.layer_ms * layers  # read once for the chunk, which hides under the arithmetic or hides it
    arithmetic = prefill_ms(device, facts, positions) * layers
    last = machine.time(facts, part.start, part.stop) - machine.hop_ms - weights  # the head, for one position
    return machine.hop_ms + max(weights, arithmetic) + max(0.0, last)
