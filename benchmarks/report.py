"""`make bench`: every figure that is asked of speed and memory, one benchmark after the other, and what they come to.

    python -m benchmarks.report [--only 1,2] [--repeats 3] [--resume] [--no-hybrid] [--peers ...]

Each step is a benchmark of its own with tables, a JSON file and a plot. All are told again in one table, a line for
each figure that is asked, reached or MISSED, and kept in ``benchmarks/results/DATE-report.{json,md,png}`` after each
step: what a later run of the day adds is laid over what was there, and with ``--resume`` it leaves out the steps that
are there with the same arguments.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import environment
from benchmarks.busy import QUIET_CORES
from benchmarks.report_steps import Step, steps_of
from benchmarks.results import publish_drawn, result_path
from benchmarks.verdict import Verdict

NAME = "report"


@dataclass(frozen=True, slots=True)
class Line:
    """One figure that is asked: the line of the report that it belongs to, of which step it is, and what came out."""

    number: str
    step: str
    verdict: Verdict


def lines_of(done: Mapping[str, dict[str, Any]], steps: Sequence[Step]) -> list[Line]:
    """All figures of the steps that are done, by number and then in the order of the steps."""
    lines = [
        Line(number, step.name, Verdict.from_json(verdict))
        for step in steps
        if step.name in done
        for key, verdict in done[step.name]["verdicts"].items()
        if (number := step.number_of(key)) is not None
    ]
    return sorted(lines, key=lambda line: line.number)


def table_of(lines: Sequence[Line], done: Mapping[str, dict[str, Any]]) -> Table:
    """For people."""
    table = Table(
        title="what is asked", caption="median (interval at its confidence); reached: the interval reaches it"
    )
    for title in ("line", "of", "figure", "measured", "asked", ""):
        table.add_column(title, justify="right" if title in {"measured", "asked"} else "left")
    for line in lines:
        word = "reached" if line.verdict.reached else "[bold]MISSED[/bold]"
        doubtful = " (busy)" if done[line.step]["doubtful"] else ""
        table.add_row(
            line.number,
            line.step,
            line.verdict.what,
            line.verdict.found.shown(3),
            line.verdict.asked,
            word + doubtful,
        )
    return table


def markdown_of(lines: Sequence[Line], done: Mapping[str, dict[str, Any]], facts: Mapping[str, Any]) -> str:
    """The same as a page."""
    rows = [
        f"| {line.number} | {line.step} | {line.verdict.what} | {line.verdict.found.shown(3)} | {line.verdict.asked} | "
        f"{'reached' if line.verdict.reached else '**MISSED**'}{', busy' if done[line.step]['doubtful'] else ''} |"
        for line in lines
    ]
    machine = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "load_before")
    steps = [
        f"| {name} | {one['seconds']:.0f} | {one['began']} | `{' '.join(one['command'])}` |"
        for name, one in done.items()
    ]
    return "\n".join(
        [
            "# What is asked of speed and memory",
            "",
            f"{machine}. Median (interval at its confidence); a figure is reached when the interval reaches it.",
            "",
            "| line | of | figure | measured | asked | |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
            "| step | seconds | began (UTC) | `python -m` |",
            "| --- | --- | --- | --- |",
            *steps,
            "",
        ]
    )


def take(step: Step, console: Console) -> dict[str, Any] | None:
    """Run one step; what the report keeps of it, None where it failed."""
    name = f"{NAME}-{step.name}"
    command = [step.module, *step.arguments, "--name", name]
    console.rule(f"{step.name}: python -m {' '.join(command)}")
    began, clock = time.strftime("%H:%M", time.gmtime()), time.monotonic()
    done = subprocess.run([sys.executable, "-m", *command], check=False)
    seconds = time.monotonic() - clock
    if done.returncode != 0:
        console.print(f"{step.name} failed with exit code {done.returncode}; the others go on", style="bold red")
        return None
    document = json.loads(result_path(name, ".json").read_text("utf-8"))
    return {
        "command": step.told,
        "seconds": round(seconds, 1),
        "began": began,
        "doubtful": document.get("busy_elsewhere", 0.0) > QUIET_CORES,
        "verdicts": document["verdicts"],
        "result": result_path(name, ".json").name,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options; ends the program on one that makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="N,N", help="lines or steps, with commas (default: all)")
    parser.add_argument("--list", action="store_true", help="tell the steps, and measure nothing")
    parser.add_argument("--repeats", type=int, default=3, help="of every step (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="leave out what the day's report has already")
    either = argparse.BooleanOptionalAction
    parser.add_argument("--hybrid", action=either, default=True, help="the same of a hybrid model of random weights")
    parser.add_argument("--peers", action="store_true", help="llama.cpp RPC and language-pipes too, if found")
    parser.add_argument("--llama-bin", metavar="DIR", help="with llama-server and ggml-rpc-server (default: the path)")
    parser.add_argument("--language-pipes-python", metavar="PATH", help="Python that has language-pipes, to start it")
    given = parser.parse_args(arguments)
    if given.repeats < 1:
        parser.error("--repeats is at least 1")
    if not given.peers and (given.llama_bin or given.language_pipes_python):
        parser.error("--llama-bin and --language-pipes-python mean something with --peers alone; give that too")
    steps = chosen(given, steps_of(given.repeats, peer_options(given)))
    if not steps:
        known = steps_of(1, ())
        names = ", ".join(
            [*dict.fromkeys(number for step in known for number in step.numbers), *(s.name for s in known)]
        )
        parser.error(f"--only {given.only} names no step; there are {names}")
    given.steps = steps
    return given


def peer_options(given: argparse.Namespace) -> tuple[str, ...]:
    """As the decode benchmark takes them."""
    named = {"--llama-bin": given.llama_bin, "--language-pipes-python": given.language_pipes_python}
    return (*(["--peers"] if given.peers else ()), *(x for key, value in named.items() if value for x in (key, value)))


def chosen(given: argparse.Namespace, steps: Sequence[Step]) -> list[Step]:
    """Those that are asked for, in their order."""
    wanted = None if given.only is None else set(given.only.split(","))
    return [
        step
        for step in steps
        if (given.hybrid or not step.hybrid) and (wanted is None or wanted & {step.name, *step.numbers})
    ]


def main() -> int:
    """Measure, tell and keep; the exit code is 1 where a step failed."""
    given = parse()
    console = environment.begin()
    if given.list:
        for step in given.steps:
            console.print(
                f"{', '.join(step.numbers) or '-':6} {step.name:24} python -m {step.module} {' '.join(step.arguments)}"
            )
        return 0
    path = result_path(NAME, ".json")
    done: dict[str, Any] = json.loads(path.read_text("utf-8"))["steps"] if path.is_file() else {}
    facts, failed, every = environment.facts(), [], steps_of(given.repeats, peer_options(given))
    for index, step in enumerate(given.steps):
        if given.resume and done.get(step.name, {}).get("command") == step.told:
            console.print(f"{step.name}: is there already", style="dim")
            continue
        console.print(f"step {index + 1} of {len(given.steps)}", style="bold")
        one = take(step, console)
        if one is None:
            failed.append(step.name)
            continue
        done[step.name] = one
        lines = lines_of(done, every)
        document = {
            "benchmark": NAME,
            "title": "what is asked of speed and memory",
            "environment": facts,
            "steps": done,
            "verdicts": {f"{line.number}, {line.step}, {line.verdict.what}": line.verdict.to_json() for line in lines},
        }
        publish_drawn(NAME, document, console)
        path.with_suffix(".md").write_text(markdown_of(lines, done, facts), "utf-8")
    console.print(table_of(lines_of(done, every), done))
    if failed:
        console.print(f"failed: {', '.join(failed)}", style="bold red")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
