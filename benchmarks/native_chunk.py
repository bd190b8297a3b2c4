"""Chunks of a prefill native and plain, in turns in one process: a model in two shards.

    python -m benchmarks.native_chunk [--dtypes bfloat16,float32] [--threads 1] [--lengths 64,128,256] [--before 0,768]

The two shards hold what two nodes would, and get the bytes that nodes would. In each repeat a new session is filled for
each way, and then one chunk timed; which way begins changes with every repeat. Exit code 1 where this machine has no
kernels for chunks, which is said with the reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks import environment
from benchmarks.busy import QUIET_CORES, BusyWatch
from benchmarks.figures import Interval, paired
from benchmarks.models import MODELS, prepare
from benchmarks.native_step import WAYS, Shards, load, order_of
from benchmarks.results import add_options, publish

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshnet_node.kernel_library import StepKernels

DTYPES = ("bfloat16", "float32")
MOST = 256  # positions of a chunk on the wire


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: dtype, CPU threads, positions of the chunk, and positions before it."""

    dtype: str
    threads: int
    length: int
    before: int


@dataclass(slots=True)
class Compared:
    """Milliseconds of the chunk in each repeat, by way; those of one repeat belong together."""

    case: Case
    ms: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def ratio(self) -> Interval:
        """Native by plain, within each repeat."""
        return Interval.of(paired(self.ms["native"], self.ms["plain"]))

    def to_json(self) -> dict[str, Any]:
        case = self.case
        about = {"dtype": case.dtype, "threads": case.threads, "length": case.length, "before": case.before}
        times = {f"{way}_ms": Interval.of(self.ms[way]).to_json() for way in WAYS}
        return {**about, **times, "native_by_plain": self.ratio.to_json()}


def compare(shards: Shards, case: Case, repeats: int) -> Compared:
    """Both ways in turns; the first repeat warms up and does not count."""
    found = Compared(case)
    for repeat in range(repeats + 1):
        for way in order_of(repeat):
            shards.take(way)
            shards.open(1, case.before)
            began = time.perf_counter()
            shards.chunk(case.length)
            if repeat:
                found.ms[way].append(1000 * (time.perf_counter() - began))
    return found


def measure(kernels: StepKernels, arguments: argparse.Namespace, console: Console) -> list[Compared]:
    """Every case, one after the other."""
    import torch  # noqa: PLC0415 - once the environment is cleared

    model = MODELS[arguments.model]
    found = []
    for dtype in arguments.dtypes:
        shards = load(prepare(model, dtype), model.splits, dtype, kernels, dtype)
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            for case in (
                Case(dtype, threads, each, before) for before in arguments.before for each in arguments.lengths
            ):
                found.append(compare(shards, case, arguments.repeats))
                console.print(f"{case}: native by plain {found[-1].ratio.shown()}", style="dim")
        shards.close()
    return found


def print_table(found: Sequence[Compared], busy_elsewhere: float, title: str, console: Console) -> None:
    """The figures for people."""
    table = Table(title=f"a chunk native and plain, ms: {title}, two shards in one process")
    for name in ("dtype", "threads", "positions", "behind", "plain", "native", "native by plain"):
        table.add_column(name, justify="left" if name == "dtype" else "right")
    for each in found:
        case, times = each.case, [Interval.of(each.ms[way]).brief(1) for way in WAYS]
        table.add_row(case.dtype, *map(str, (case.threads, case.length, case.before)), *times, each.ratio.brief())
    console.print(table)
    if busy_elsewhere > QUIET_CORES:
        console.print(f"DOUBTFUL: {busy_elsewhere:.2f} cores did other work meanwhile; measure on a quiet machine")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What is on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.native_chunk", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="default: %(default)s")
    parser.add_argument("--dtypes", type=_dtypes, default=",".join(DTYPES), help="default: %(default)s")
    parser.add_argument("--threads", type=_numbers(1), default="1", help="CPU threads, in turn (default: %(default)s)")
    parser.add_argument(
        "--lengths", type=_numbers(1, MOST), default="64,128,256", help="positions of a chunk (default: %(default)s)"
    )
    parser.add_argument(
        "--before", type=_numbers(0), default="0,768", help="positions before it (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=6, help="default: %(default)s")
    add_options(parser, "native-chunk")
    given = parser.parse_args(arguments)
    if given.repeats < 1:
        parser.error("--repeats is at least 1")
    return given


def _dtypes(text: str) -> list[str]:
    given = list(dict.fromkeys(text.split(",")))
    if unknown := [each for each in given if each not in DTYPES]:
        raise argparse.ArgumentTypeError(f"a dtype is {' or '.join(DTYPES)}, not {', '.join(unknown)}")
    return given


def _numbers(least: int, most: int = 1 << 20) -> Any:
    def numbers(text: str) -> list[int]:
        try:
            given = sorted({int(part) for part in text.split(",")})
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"numbers with commas between them, not {text!r}") from error
        if given[0] < least or given[-1] > most:
            raise argparse.ArgumentTypeError(f"numbers from {least} to {most}, not {text!r}")
        return given

    return numbers


def main() -> int:
    """Measure, write a table to standard error, and keep the result; returns the exit code."""
    arguments = parse()
    console, model = environment.begin(), MODELS[arguments.model]
    from meshnet_node.step_kernels import kernels_here  # noqa: PLC0415 - once the environment is cleared

    here = kernels_here()
    if here.kernels is None or not here.kernels.product_ways:
        console.print(f"no kernels for chunks here: {here.reason or 'the CPU has no AVX-512'}", style="red")
        return 1
    with BusyWatch() as busy:
        found = measure(here.kernels, arguments, console)
    print_table(found, busy.elsewhere, model.title, console)
    document = {
        "benchmark": "native-chunk",
        "model": model.key,
        "title": f"native and plain chunks: {model.title}",
        "repeats": arguments.repeats,
        "environment": environment.facts(),
        "cases": [each.to_json() for each in found],
        "busy_elsewhere": round(busy.elsewhere, 2),
    }
    path = publish(arguments.name, document, line=arguments.json)
    console.print(f"kept in benchmarks/results: {path.name}", style="dim")
    return 0


if __name__ == "__main__":
    sys.exit(main())
