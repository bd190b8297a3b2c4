"""transformers' `generate()` as a system to compare with: one process, the whole model, a dynamic cache."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from benchmarks.line_worker import LineWorker, line_worker

GENERATE = "generate()"


def generate_system(folder: str, *, dtype: str, device: str, threads: int) -> AbstractAsyncContextManager[LineWorker]:
    """Start `generate_worker` on a model folder and end it with the block."""
    arguments = [folder, "--dtype", dtype, "--device", device]
    return line_worker(GENERATE, "benchmarks.generate_worker", arguments, threads)
