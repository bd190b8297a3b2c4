"""`make bench`: two nodes beside transformers' `generate()`, in one run, in turns.

    python -m benchmarks.bench [--models smollm2,qwen2-0.5b,qwen3.5-moe] [--repeats 3] [--new-tokens 512] ...

`docs/benchmarks.md` says what the figures mean.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from benchmarks.environment import begin
from benchmarks.figures import WINDOW
from benchmarks.measurement import Plan, measure
from benchmarks.mesh_processes import default_threads
from benchmarks.models import MODELS, prepare
from benchmarks.peers import PeerOptions, options_of
from benchmarks.results import add_options, publish_drawn
from benchmarks.summary import document
from benchmarks.table import print_tables


def parse(
    arguments: Sequence[str] | None = None,
) -> tuple[list[str], Plan, PeerOptions | None, argparse.Namespace]:
    """Keys of the models, the plan, where wanted peers are, and how results are kept; ends the program on an option
    that makes no sense."""
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
    parser.add_argument("--one-process", action=either, default=True, help="measure the same code in one process too")
    parser.add_argument("--one-node", action=either, default=True, help="measure one node with the whole model too")
    parser.add_argument("--packed", action=either, default=True, help="measure a GGUF's blocks as they are too")
    parser.add_argument("--peers", action="store_true", help="measure llama.cpp RPC and language-pipes too, if found")
    parser.add_argument("--llama-bin", metavar="DIR", help="with llama-server and ggml-rpc-server (default: the path)")
    parser.add_argument("--language-pipes-python", metavar="PATH", help="Python that has language-pipes, to start it")
    parser.add_argument("--language-pipes", metavar="URL", help="of a running one's OpenAI API, up to /v1")
    parser.add_argument("--language-pipes-model", metavar="NAME", help="what it calls the model (default: as meshnet)")
    parser.add_argument("--gateway", action="store_true", help="an idle gateway beside each mesh, to tell its memory")
    parser.add_argument(
        "--wait-policy",
        default="meshnet",
        help="of the nodes' OpenMP threads: meshnet (as `meshnet up` sets it), library, passive, active or spin:N",
    )
    add_options(parser, "MODEL")
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
        one_process=given.one_process,
        one_node=given.one_node,
        packed=given.packed,
        gateway=given.gateway,
        wait_policy=given.wait_policy,
    )
    of_peers = (given.llama_bin, given.language_pipes_python, given.language_pipes, given.language_pipes_model)
    if not given.peers and any(of_peers):
        parser.error("--llama-bin and --language-pipes... mean something with --peers alone; give that too")
    if given.language_pipes_python and given.language_pipes:
        parser.error("give --language-pipes-python or --language-pipes, not both")
    return keys, plan, options_of(vars(given)) if given.peers else None, given


def main() -> None:
    """Measure, write tables to standard error, and keep a result for each model."""
    keys, plan, peers, given = parse()
    console = begin(width=170)
    for key in keys:
        model = MODELS[key]
        if model.random:
            console.print(f"{model.title}: what it writes means nothing; it takes the time that a real one would")
        prepared = prepare(model, plan.dtype)
        found = asyncio.run(measure(model, prepared, plan, lambda what: console.print(what, style="dim"), peers))
        print_tables(found, console)
        publish_drawn(given.name.replace("MODEL", key), document(found), console, line=given.json)


if __name__ == "__main__":
    main()
