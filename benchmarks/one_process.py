"""This project's own code over the whole model in one process, as a system to compare with: what a cut can lose.

Started by itself it is that process: a prompt a line in, times and tokens a line out, as `generate_worker`. The
generation loop, the hop service, the forward lane and the layers are those that serve chats; the transport is the one
within a process, so no byte passes a socket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from benchmarks.line_worker import LineWorker, line_worker
from benchmarks.memory import own_peak_rss

ONE_PROCESS = "one process"
MAX_POSITIONS = 8192  # of a session


def one_process_system(
    folder: str, layers: str, *, dtype: str, device: str, threads: int
) -> AbstractAsyncContextManager[LineWorker]:
    """Start it with ``layers``, all of the model's as people write them, and end it with the block."""
    arguments = [folder, layers, "--dtype", dtype, "--device", device]
    return line_worker(ONE_PROCESS, "benchmarks.one_process", arguments, threads)


async def serve(arguments: argparse.Namespace, replies: Any) -> None:
    """Answer prompts until there are no more."""
    from benchmarks.in_process import MODEL, in_process_mesh  # noqa: PLC0415  brings torch: only that process needs it
    from benchmarks.timed_answer import timed_answer  # noqa: PLC0415
    from meshnet_core.clock import SystemClock  # noqa: PLC0415
    from meshnet_core.layer_range import LayerRange  # noqa: PLC0415
    from meshnet_core.sampling import SamplingParams  # noqa: PLC0415
    from meshnet_gateway.generation import GenerationEngine, GenerationRequest  # noqa: PLC0415

    mesh = in_process_mesh(
        Path(arguments.folder),
        [LayerRange.parse(arguments.layers)],
        [arguments.device],
        dtype=arguments.dtype,
        threads=arguments.threads,
        max_positions=MAX_POSITIONS,
    )
    async with mesh as whole:
        engine = GenerationEngine(whole, whole.transport, SystemClock())
        print(json.dumps({"ready": True}), file=replies, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            request = GenerationRequest(MODEL, tuple(asked["prompt"]), asked["new_tokens"], SamplingParams())
            times, tokens, _ = await timed_answer(engine, request)
            reply = {"times": times, "tokens": tokens, "peak_rss": own_peak_rss()}
            print(json.dumps(reply), file=replies, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Answers prompts given on standard input; started by the benchmarks.")
    parser.add_argument("folder")
    parser.add_argument("layers")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    replies, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed must not be taken for an answer
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)  # of this thread, as a node has it: the forward lane's team is the only one
    asyncio.run(serve(arguments, replies))


if __name__ == "__main__":
    main()
