"""What is compared: anything that continues a prompt greedily and says when each token came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.figures import TokenTimes


@dataclass(frozen=True, slots=True)
class Run:
    """One answer.

    Attributes:
        times: when its tokens came.
        tokens: their ids.
        facts: JSON-ready; what a system knows besides, such as bytes per step.
    """

    times: TokenTimes
    tokens: tuple[int, ...]
    facts: dict[str, Any] = field(default_factory=dict)


class System(Protocol):
    """One way to run a model, started and warm.

    Attributes:
        name: for tables and plots.
    """

    name: str

    async def run(self, prompt: Sequence[int], new_tokens: int) -> Run:
        """Exactly ``new_tokens`` tokens, greedy, from a fresh state."""
        ...

    def peak_rss(self) -> dict[str, int | None]:
        """The most bytes of memory each of its processes has held, by what it is."""
        ...
