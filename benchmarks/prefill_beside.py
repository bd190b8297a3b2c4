"""What a long prefill takes from those who decode meanwhile: their speed during it, by their speed before it.

A part of `benchmarks.concurrency`, on a mesh of its making. The others answer all the time; their tokens are counted
before the prompt is sent, for as long as its prefill then takes or at least some seconds, and until its first token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Interval, paired, speed_between
from benchmarks.mesh_system import MeshSystem
from benchmarks.verdict import Verdict

KEPT_TARGET = 0.5  # of the others' speed
PREFILL_TOKENS = 2000
BEFORE_S = 8.0  # for which the others' speed is taken before the prefill
_ANSWER = 4000  # tokens at most; they are stopped before


@dataclass(slots=True)
class Beside:
    """Tokens per second of all others together, and the prefill's time, of each repeat."""

    others: int
    prefill_tokens: int = PREFILL_TOKENS
    before: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    prefill_alone_s: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)

    def verdict(self) -> Verdict:
        what = f"kept of the speed of {self.others} others while {self.prefill_tokens} tokens are prefilled"
        return Verdict(what, Interval.of(paired(self.during, self.before)), KEPT_TARGET)

    def to_json(self) -> dict[str, Any]:
        return {
            "others": self.others,
            "prefill_tokens": self.prefill_tokens,
            "others_before_tokens_per_s": Interval.of(self.before).to_json(),
            "others_during_tokens_per_s": Interval.of(self.during).to_json(),
            "kept": self.verdict().found.to_json(),
            "prefill_alone_s": Interval.of(self.prefill_alone_s).to_json(),
            "prefill_beside_s": Interval.of(self.prefill_s).to_json(),
            "target": KEPT_TARGET,
        }

    def print(self, console: Console) -> None:
        """For people."""
        table = Table(title=f"a prefill of {self.prefill_tokens} tokens beside {self.others} who decode")
        table.add_column("figure")
        table.add_column("median (interval)", justify="right")
        table.add_row("the others before, tokens/s together", Interval.of(self.before).brief())
        table.add_row("the others during it", Interval.of(self.during).brief())
        table.add_row("first token after it, s, with nobody else", Interval.of(self.prefill_alone_s).brief())
        table.add_row("first token after it, s, beside them", Interval.of(self.prefill_s).brief())
        console.print(table)


class _Others:
    """Who decode: answers to ``prompts``, until they are told to stop."""

    def __init__(self, mesh: MeshSystem, prompts: Sequence[Sequence[int]]) -> None:
        self.times: list[float] = []
        self._begun = asyncio.Semaphore(0)
        self._over = asyncio.Event()
        self._count = len(prompts)
        self._tasks = [asyncio.create_task(self._answer(mesh, prompt)) for prompt in prompts]

    async def all_decode(self) -> None:
        """Until each has its first token."""
        for _ in range(self._count):
            await self._begun.acquire()

    async def stop(self) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)

    async def _answer(self, mesh: MeshSystem, prompt: Sequence[int]) -> None:
        first = True
        async for at in mesh.token_times(prompt, _ANSWER, self._over):
            self.times.append(at)
            if first:
                self._begun.release()
            first = False


async def measure_beside(
    mesh: MeshSystem, prompts: Sequence[Sequence[int]], prefill_tokens: int, repeats: int, console: Console
) -> Beside:
    """Prefill so many tokens beside answers to ``prompts``, ``repeats`` times."""
    found = Beside(len(prompts), prefill_tokens)
    material = [*prompts[0]] * (prefill_tokens // len(prompts[0]) + repeats + 1)
    for repeat in range(repeats):
        console.print(f"repeat {repeat + 1} of {repeats}: a long prefill", style="dim")
        long = material[repeat : repeat + prefill_tokens]
        found.prefill_alone_s.append((await mesh.run(long, 2)).times.ttft_s)
        others = _Others(mesh, prompts)
        await others.all_decode()
        start = time.perf_counter()
        await asyncio.sleep(BEFORE_S)
        sent = time.perf_counter()
        took = (await mesh.run(long, 2)).times.ttft_s
        await others.stop()
        found.before.append(speed_between(others.times, start, sent))
        found.during.append(speed_between(others.times, sent, sent + took))
        found.prefill_s.append(took)
    return found
