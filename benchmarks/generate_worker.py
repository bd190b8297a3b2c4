"""transformers' `generate()` in a process of its own: a prompt a line in, times and tokens a line out.

Started by `generate`. Everything is transformers' default but what the comparison fixes: greedy, dtype, threads, the
dynamic cache, and no end before the length asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from benchmarks.memory import own_peak_rss


class Stopwatch(BaseStreamer):
    """Notes when each token came; `generate()` hands the prompt over first, which is no token."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt_seen = False
        self._began = time.perf_counter()

    def put(self, value: Any) -> None:
        if self._prompt_seen:
            self.times.append(time.perf_counter() - self._began)
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""


def answer(model: Any, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """One greedy answer of exactly ``new_tokens`` tokens."""
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=new_tokens,
        use_cache=True,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=None,
    )
    ids = torch.tensor([prompt], device=model.device)
    watch = Stopwatch()
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=watch)
    return {"times": watch.times, "tokens": output[0, len(prompt) :].tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Answers prompts given on standard input; started by the benchmarks.")
    parser.add_argument("folder")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    replies, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed must not be taken for an answer
    logging: Any = transformers.utils.logging  # untyped
    logging.set_verbosity_error()  # a benchmark's tables are no place for advice on optional kernels
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=dtype, local_files_only=True)
    model = model.to(arguments.device).eval()
    # A model's own generation settings (sampling, an end) are laid over what is not set above.
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        reply = answer(model, request["prompt"], request["new_tokens"])
        print(json.dumps({**reply, "peak_rss": own_peak_rss()}), file=replies, flush=True)


if __name__ == "__main__":
    main()
