"""`make bench`: two nodes beside transformers' `generate()`, in one run, in turns.

    python -m benchmarks.bench [--models smollm2,qwen2-0.5b,qwen3.5-moe] [--repeats 3] [--new-tokens 512] ...

`docs/benchmarks.md` says what the figures mean.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.figures import WINDOW
from benchmarks.measurement import Plan, measure
from benchmarks.mesh_processes import default_threads
from benchmarks.models import MODELS, prepare
from benchmarks.peers import PeerOptions, options_of
from benchmarks.results import publish
from benchmarks.summary import document
from benchmarks.table import print_tables


def parse(arguments: Sequence[str] | None = None) -> tuple[list[str], Plan, PeerOptions | None]:
    """Keys of the models, the plan, and where wanted peers are; ends the program on an option that makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="keys, with commas (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=512, help="of each answer (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu", help="of every system (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=default_threads(), help="of generate() and of each node (default: %(default)s)"
    )
    parser.add_argument(
        "--stateless-lengths",
        default="0,100,200,400",
        help='of the answer; "" leaves that path out (default: %(default)s)',
    )
    either = argparse.BooleanOptionalAction
    parser.add_argument("--one-node", action=either, default=True, help="measure one node with the whole model too")
    parser.add_argument("--packed", action=either, default=True, help="measure a GGUF's blocks as they are too")
    parser.add_argument("--peers", action="store_true", help="measure llama.cpp RPC and language-pipes too, if found")
    parser.add_argument("--llama-bin", metavar="DIR", help="with llama-server and ggml-rpc-server (default: the path)")
    parser.add_argument("--language-pipes", metavar="URL", help="of a running one's OpenAI API, up to /v1")
    parser.add_argument("--language-pipes-model", metavar="NAME", help="what it calls the model (default: as meshnet)")
    parser.add_argument("--no-gateway", action="store_true", help="leave the idle gateway process out")
    parser.add_argument(
        "--wait-policy",
        default="meshnet",
        help="of the nodes' OpenMP threads: meshnet (as `meshnet up` sets it), library, passive, active or spin:N",
    )
    given = parser.parse_args(arguments)
    keys = given.models.split(",")
    if unknown := [key for key in keys if key not in MODELS]:
        parser.error(f"unknown models {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if given.new_tokens <= WINDOW:
        parser.error(f"--new-tokens {given.new_tokens} holds no window of {WINDOW} steps; give {WINDOW + 1} or more")
    if given.repeats < 1 or given.threads < 1:
        parser.error("--repeats and --threads are at least 1")
    plan = Plan(
        dtype=given.dtype,
        device=given.device,
        threads=given.threads,
        new_tokens=given.new_tokens,
        repeats=given.repeats,
        stateless_lengths=tuple(int(length) for length in given.stateless_lengths.split(",") if length),
        one_node=given.one_node,
        packed=given.packed,
        gateway=not given.no_gateway,
        wait_policy=given.wait_policy,
    )
    if not given.peers and (given.llama_bin or given.language_pipes or given.language_pipes_model):
        parser.error("--llama-bin and --language-pipes mean something with --peers alone; give that too")
    return keys, plan, options_of(vars(given)) if given.peers else None


def main() -> None:
    """Measure, and write tables to standard error and a JSON line for each model to standard output."""
    keys, plan, peers = parse()
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 140)
    for key in keys:
        model = MODELS[key]
        if model.random:
            console.print(f"{model.title}: what it writes means nothing; it takes the time that a real one would")
        prepared = prepare(model, plan.dtype)
        found = asyncio.run(measure(model, prepared, plan, lambda what: console.print(what, style="dim"), peers))
        print_tables(found, console)
        path = publish(key, document(found))
        # In a process of its own: matplotlib's memory must not be counted as the driver's.
        subprocess.run([sys.executable, "-m", "benchmarks.plot", path], check=True)
        console.print(f"kept in benchmarks/results: {path.name} and {path.stem}.png")


if __name__ == "__main__":
    main()
