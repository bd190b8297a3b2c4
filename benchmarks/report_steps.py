"""The steps of the report: which benchmark is run with which arguments, and which of its figures are asked where. Pure.

Lines are numbered as in `docs/benchmarks.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

HYBRID = "qwen3.5-moe"
PATHS = {"--llama-bin", "--language-pipes-python"}  # options whose values are paths


@dataclass(frozen=True, slots=True)
class Step:
    """One benchmark.

    Attributes:
        name: of the step, and of its files.
        module: after ``python -m``.
        asked: line by the beginning of a figure's key; the longest that fits counts.
        hybrid: whether it is of the hybrid model, beside one of the others.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    asked: dict[str, str] = field(default_factory=dict)
    hybrid: bool = False

    @property
    def numbers(self) -> list[str]:
        """Lines that it belongs to."""
        return sorted(set(self.asked.values()))

    @property
    def told(self) -> list[str]:
        """The command after ``python -m``, without paths of this machine."""
        hidden = [before in PATHS for before in ("", *self.arguments)]
        return [self.module, *("PATH" if hide else word for hide, word in zip(hidden, self.arguments, strict=False))]

    def number_of(self, key: str) -> str | None:
        """The line of a figure; None where it is of none."""
        fits = [start for start in self.asked if key.startswith(start)]
        return self.asked[max(fits, key=len)] if fits else None


DECODE = {"decode_speed": "1", "two_nodes_by_one": "1", "packed_by_": "2"}


def steps_of(repeats: int, peers: Sequence[str]) -> list[Step]:
    """All steps, the short ones first and those of the hybrid model last.

    Args:
        peers: options of the decode benchmark for them.
    """
    often = ("--repeats", str(repeats))
    plain = ("--stateless-lengths", "")
    alone = ("--no-one-process", "--no-one-node", "--no-packed")
    many = ("--clients", "1,8", *often)
    return [
        Step(
            "decode",
            "benchmarks.bench",
            ("--models", "smollm2", "--new-tokens", "128", *often, *plain, *peers),
            DECODE,
        ),
        Step(
            "decode-qwen2-0.5b",
            "benchmarks.bench",
            ("--models", "qwen2-0.5b", "--new-tokens", "80", *often, *plain),
            DECODE,
        ),
        Step("hop", "benchmarks.hop_overhead", ("--rounds", str(2 * repeats + 1)), {"": "4"}),
        Step("first-token", "benchmarks.first_token", ("--repeats", str(repeats + 2)), {"": "5"}),
        Step("memory", "benchmarks.packed_memory", often, {"": "8"}),
        Step("slow-links-float32", "benchmarks.slow_links", ("--dtype", "float32", *often), {"": "7"}),
        Step("slow-links-bfloat16", "benchmarks.slow_links", ("--dtype", "bfloat16", *often), {"": "7"}),
        Step("sessions-float32", "benchmarks.concurrency", ("--dtype", "float32", *many), {"": "6"}),
        Step("sessions-bfloat16", "benchmarks.concurrency", ("--dtype", "bfloat16", *many), {"": "6"}),
        Step(
            "kept",
            "benchmarks.bench",
            ("--models", "smollm2", "--new-tokens", "2000", *often, *plain, *alone),
            {"retention": "3"},
        ),
        Step(
            "decode-hybrid",
            "benchmarks.bench",
            ("--models", HYBRID, "--new-tokens", "80", *often, *plain),
            DECODE,
            hybrid=True,
        ),
        Step(
            "first-token-hybrid",
            "benchmarks.first_token",
            ("--model", HYBRID, "--dtypes", "bfloat16", *often),
            {"": "5"},
            hybrid=True,
        ),
        Step(
            "slow-links-hybrid",
            "benchmarks.slow_links",
            ("--model", HYBRID, "--tokens", "60", *often),
            {"": "7"},
            hybrid=True,
        ),
        Step(
            "sessions-hybrid",
            "benchmarks.concurrency",
            ("--model", HYBRID, "--dtype", "bfloat16", "--prefill", "500", *many),
            {"": "6"},
            hybrid=True,
        ),
        Step(
            "kept-hybrid",
            "benchmarks.bench",
            ("--models", HYBRID, "--new-tokens", "320", *often, *plain, *alone),
            {"retention": "3"},
            hybrid=True,
        ),
    ]
