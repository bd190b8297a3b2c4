"""Decode steps native and plain, in turns in one process: a model in two shards, in bfloat16 and packed.

    python -m benchmarks.native_step [--weights bfloat16,packed] [--threads 1,2] [--sessions 1,4,8] [--repeats 6] ...

The two shards hold what two nodes would, and get the bytes that nodes would; a step is one position of each session
through both, output projection included, with neither sampling nor a wire. In each repeat some native steps and some
plain ones of the same sessions run, which begins changes with every repeat; a repeat's figure is the median of its
steps. Exit code 1 where this machine has no kernels, which is said with the reason.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks import environment
from benchmarks.busy import QUIET_CORES, BusyWatch
from benchmarks.figures import Interval, paired
from benchmarks.models import MODELS, PreparedModel, prepare
from benchmarks.results import add_options, publish

if TYPE_CHECKING:
    from meshnet_node.kernel_library import StepKernels
    from meshnet_node.model_backend import TorchModelShard
    from meshnet_node.session_state import SessionState

WEIGHTS = ("bfloat16", "packed")
WAYS = ("plain", "native")
CHUNK = 256  # positions of a frame while sessions are filled
WARM_UP_STEPS = 3
DTYPE = "bfloat16"
TOKEN = 7


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: how weights are held, CPU threads, and sessions whose steps share a forward."""

    weights: str
    threads: int
    sessions: int

    def __str__(self) -> str:
        together = "one session" if self.sessions == 1 else f"{self.sessions} sessions together"
        return f"{self.weights}, {self.threads} thread{'s' if self.threads > 1 else ''}, {together}"


@dataclass(slots=True)
class Compared:
    """Milliseconds of a step in each repeat, by way; those of one repeat belong together."""

    case: Case
    ms: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def ratio(self) -> Interval:
        """Native by plain, within each repeat."""
        return Interval.of(paired(self.ms["native"], self.ms["plain"]))

    def to_json(self) -> dict[str, Any]:
        times = {f"{way}_ms": Interval.of(self.ms[way]).to_json() for way in WAYS}
        case = self.case
        about = {"weights": case.weights, "threads": case.threads, "sessions": case.sessions}
        return {**about, **times, "native_by_plain": self.ratio.to_json()}


def order_of(repeat: int) -> tuple[str, ...]:
    """Which way goes first in a repeat, so that neither always has the shorter sessions or the warmer machine."""
    return WAYS if repeat % 2 == 0 else WAYS[::-1]


class Shards:
    """The shards of a whole model in a row, and the sessions on them. Steps are plain at first.

    Args:
        shards: in order, without kernels of their own.
        kernels: for what is native.
        dtype: that they compute in.
    """

    def __init__(self, shards: Sequence[TorchModelShard], kernels: StepKernels, dtype: str = DTYPE) -> None:
        self._shards, self._kernels, self._dtype = shards, kernels, dtype
        self._states: list[list[SessionState]] = []
        self._position = 0

    @property
    def are_native(self) -> bool:
        """Whether all take native steps now."""
        return all(shard.runs_native for shard in self._shards)

    def take(self, way: str) -> None:
        """Have steps be of this way from now on."""
        for view in (shard.whole_view() for shard in self._shards):
            if way == "plain":
                view.drop_kernels()
            else:
                view.use_kernels(self._kernels)

    def open(self, sessions: int, positions: int) -> None:
        """Let go of all sessions, and fill so many new ones."""
        self._states = [[shard.new_state(shard.layers.start) for shard in self._shards] for _ in range(sessions)]
        self._position = 0
        while self._position < positions:
            count = min(CHUNK, positions - self._position)
            for states in self._states:
                self._run([states], count, sample=0)
            self._position += count

    def step(self) -> None:
        """One position of each session, in one forward of each shard."""
        self._run(self._states, 1, sample=1)
        self._position += 1

    def chunk(self, count: int) -> None:
        """So many positions of the first session."""
        self._run(self._states[:1], count, sample=0)
        self._position += count

    def _run(self, sessions: Sequence[list[SessionState]], count: int, sample: int) -> None:
        from meshnet_node.shard_work import ShardWork  # noqa: PLC0415 - brings torch

        bodies: list[bytes | memoryview] = [struct.pack(f"<{count}i", *[TOKEN] * count)] * len(sessions)
        for number, shard in enumerate(self._shards):
            works = [
                ShardWork(shard.layers.start, states[number], self._position, count, body, self._dtype, sample)
                for states, body in zip(sessions, bodies, strict=True)
            ]
            results = shard.forward(works)
            for result in results:
                if isinstance(result, Exception):
                    raise result
            bodies = [result.hidden or b"" for result in results if not isinstance(result, Exception)]

    def close(self) -> None:
        self._states = []
        for shard in self._shards:
            shard.close()


def compare(
    shards: Shards, case: Case, arguments: argparse.Namespace, now: Callable[[], float] = time.perf_counter
) -> Compared:
    """Both ways in turns, on the same sessions."""
    shards.open(case.sessions, arguments.positions)
    found = Compared(case)
    for repeat in range(arguments.repeats):
        for way in order_of(repeat):
            shards.take(way)
            for _ in range(WARM_UP_STEPS):
                shards.step()
            times = []
            for _ in range(arguments.steps):
                began = now()
                shards.step()
                times.append(1000 * (now() - began))
            found.ms[way].append(statistics.median(times))
    return found


def load(
    prepared: PreparedModel, splits: Sequence[str], weights: str, kernels: StepKernels, dtype: str = DTYPE
) -> Shards:
    """The shards of these layers."""
    from meshnet_core.layer_range import LayerRange  # noqa: PLC0415 - as above
    from meshnet_node.model_files import open_model  # noqa: PLC0415
    from meshnet_node.shard_loader import load_shard  # noqa: PLC0415

    shards = []
    for layers in map(LayerRange.parse, splits):
        folder, quantize = Path(prepared.folder), "none"
        if weights == "packed":
            folder, quantize = open_model(prepared.model).prepare(layers, dtype=dtype, packed=True), "auto"
        shards.append(load_shard(folder, layers, dtype=dtype, device="cpu", quantize=quantize))
    return Shards(shards, kernels, dtype)


def measure(kernels: StepKernels, arguments: argparse.Namespace, console: Console) -> list[Compared]:
    """Every case, one after the other.

    Raises:
        SystemExit: layers of the model cannot be run by kernels.
    """
    import torch  # noqa: PLC0415 - as above

    model = MODELS[arguments.model]
    prepared = prepare(model, DTYPE)
    if prepared.gguf is None and "packed" in arguments.weights:
        raise SystemExit(f"{model.key} is no GGUF file, so it has no packed weights; add --weights bfloat16")
    found = []
    for weights in arguments.weights:
        shards = load(prepared, model.splits, weights, kernels)
        shards.take("native")
        if not shards.are_native:
            raise SystemExit(f"layers of {model.key} cannot be run by kernels, its steps are plain; choose another one")
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            for sessions in arguments.sessions:
                found.append(compare(shards, Case(weights, threads, sessions), arguments))
                console.print(f"{found[-1].case}: native by plain {found[-1].ratio.shown()}", style="dim")
        shards.close()
    return found


def document(found: Sequence[Compared], busy_elsewhere: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON form."""
    return {
        "benchmark": "native-step",
        "model": arguments.model,
        "title": f"native and plain steps: {MODELS[arguments.model].title}",
        "positions": arguments.positions,
        "steps": arguments.steps,
        "repeats": arguments.repeats,
        "environment": environment.facts(),
        "cases": [each.to_json() for each in found],
        "busy_elsewhere": round(busy_elsewhere, 2),
    }


def print_table(
    found: Sequence[Compared], busy_elsewhere: float, arguments: argparse.Namespace, console: Console
) -> None:
    """The figures for people."""
    of = f"(interval of confidence {found[0].ratio.confidence:.2f}) of {arguments.repeats} repeats"
    table = Table(
        title=f"a decode step native and plain, ms: {MODELS[arguments.model].title}, two shards in one process",
        caption=f"after {arguments.positions} positions; median {of}",
    )
    for title in ("weights", "threads", "sessions", "plain", "native", "native by plain"):
        table.add_column(title, justify="left" if title == "weights" else "right")
    for each in found:
        case, times = each.case, [Interval.of(each.ms[way]).brief(1) for way in WAYS]
        table.add_row(case.weights, str(case.threads), str(case.sessions), *times, each.ratio.brief())
    console.print(table)
    if busy_elsewhere > QUIET_CORES:
        console.print(f"DOUBTFUL: {busy_elsewhere:.2f} cores did other work meanwhile; measure on a quiet machine")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What is on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.native_step", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="default: %(default)s")
    parser.add_argument(
        "--weights", type=_weights, default=",".join(WEIGHTS), help="how they are held (default: %(default)s)"
    )
    parser.add_argument("--threads", type=_numbers, default="1,2", help="CPU threads, in turn (default: %(default)s)")
    parser.add_argument(
        "--sessions", type=_numbers, default="1,4,8", help="whose steps share a forward (default: %(default)s)"
    )
    parser.add_argument("--positions", type=int, default=100, help="of each session before (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of each way in a repeat (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=6, help="default: %(default)s")
    add_options(parser, "native-step")
    given = parser.parse_args(arguments)
    if given.positions < 1 or given.steps < 1 or given.repeats < 1:
        parser.error("--positions, --steps and --repeats are at least 1")
    return given


def _weights(text: str) -> list[str]:
    given = list(dict.fromkeys(text.split(",")))
    if unknown := [each for each in given if each not in WEIGHTS]:
        raise argparse.ArgumentTypeError(f"weights are held as {' or '.join(WEIGHTS)}, not {', '.join(unknown)}")
    return given


def _numbers(text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"numbers from 1 on with commas between them, not {text!r}") from error
    if numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"{numbers[0]} is less than 1")
    return numbers


def main() -> int:
    """Measure, write a table to standard error, and keep the result; returns the exit code."""
    arguments = parse()
    console = environment.begin()
    from meshnet_node.step_kernels import kernels_here  # noqa: PLC0415 - once the environment is cleared

    here = kernels_here()
    if here.kernels is None:
        console.print(f"there are no native steps on this machine: {here.reason}", style="red")
        return 1
    with BusyWatch() as busy:
        found = measure(here.kernels, arguments, console)
    print_table(found, busy.elsewhere, arguments, console)
    path = publish(arguments.name, document(found, busy.elsewhere, arguments), line=arguments.json)
    console.print(f"kept in benchmarks/results: {path.name}", style="dim")
    return 0


if __name__ == "__main__":
    sys.exit(main())
