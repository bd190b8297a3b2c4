"""Whether a model answers alike on this machine however it is cut and whatever befalls its caches.

The whole model, as transformers runs it, gives the reference and is dropped again; then each split is loaded and runs
the checks. So memory is needed for the model once, and a little more where ranges overlap. Every check is compared with
the one reference, so the one that fails is the one that is wrong. What "the same" means is
:mod:`~meshnet_node.comparison`'s affair, how frames are laid :mod:`~meshnet_node.frame_schedule`'s.
"""

from __future__ import annotations

import enum
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from meshnet_core.errors import CacheMissError, InvalidInputError, MeshnetError, UnsupportedModelError
from meshnet_node.checkpoint_reader import CheckpointReader
from meshnet_node.comparison import Comparison, Tolerance, compare, tolerance_for, widest_tolerance
from meshnet_node.device_choice import choose_device, choose_dtype, dtype_name
from meshnet_node.frame_schedule import (
    FrameModel,
    Rows,
    Sequences,
    after_loss,
    greedy_answer,
    in_chunks,
    in_steps,
    run_until,
    without_state,
)
from meshnet_node.shard_route import ShardRoute
from meshnet_node.split import Split
from meshnet_node.step_compiler import Compile
from meshnet_node.unsplit_model import UnsplitModel

Progress = Callable[[str, float, float], None]
"""Called with what is being done, and how many checks of how many are."""

CHUNKS = (1, 7, 64)  # positions; each prompt takes one of them
LOSSES = (1, 7, 40)  # tokens into the answer
MIN_TOKENS = 2  # a loss needs a token before it and one after it


class Check(enum.StrEnum):
    """What is checked; the names that reports and `docs/verify.md` use."""

    WHOLE = "whole"
    COMPILE = "compile"
    SPLIT = "split"
    STATELESS = "stateless"
    CHUNKS = "chunks"
    RECOVERY = "recovery"
    REPLAY = "replay"


SPLIT_CHECKS = (Check.SPLIT, Check.STATELESS, Check.CHUNKS, Check.RECOVERY, Check.REPLAY)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How one check went.

    Attributes:
        check: which.
        split: of which split; None for the check of the whole model.
        found: how its logits compare; None where it did not come to that.
        objection: what is wrong, in words; None if nothing is.
    """

    check: Check
    split: Split | None
    found: Comparison | None
    objection: str | None

    @property
    def name(self) -> str:
        """``recovery of 0-14,15-29``."""
        return f"{self.check} of {'the model' if self.split is None else self.split}"


@dataclass(frozen=True, slots=True)
class Verification:
    """All results.

    Attributes:
        dtype, device: what was computed in and on, by name.
        tolerance: what passed for rounding.
        results: in the order they were run.
        refused: splits that this model does not take, with the reason; no check was run on them.
        steps: what decode steps of the splits were in the end: ``plain``, ``native``, ``compiled``; or ``native and
            plain``, say, where they differed.
    """

    dtype: str
    device: str
    tolerance: Tolerance
    results: tuple[CheckResult, ...]
    refused: tuple[tuple[Split, str], ...]
    steps: str = "plain"

    @property
    def differing(self) -> tuple[CheckResult, ...]:
        """What is not the same."""
        return tuple(result for result in self.results if result.objection is not None)

    @property
    def verdict(self) -> str:
        """``verified 26/26``."""
        return f"verified {len(self.results) - len(self.differing)}/{len(self.results)}"


@dataclass(frozen=True, slots=True)
class _Reference:
    """The whole model's answers, their logits ``[tokens, vocab]``, and what passes for rounding."""

    answers: tuple[Sequences, ...]
    logits: tuple[torch.Tensor, ...]
    tolerance: Tolerance

    def compare(self, runs: Sequence[Rows]) -> Comparison:
        expected = [known[list(rows.indices)] for known, rows in zip(self.logits, runs, strict=True)]
        return compare([rows.logits for rows in runs], expected)


def verify(
    folder: Path,
    splits: Sequence[Split],
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    dtype: str = "auto",
    device: str = "auto",
    quantize: str = "auto",
    compile_layers: Compile | None = None,
    kernels: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Verification:
    """Run all checks.

    Args:
        folder: a prepared model folder that holds all layers.
        splits: at least one.
        prompts: token ids; at least one prompt of at least one token.
        tokens: how many to answer each prompt with, at least :data:`MIN_TOKENS`.
        dtype, device: see :mod:`~meshnet_node.device_choice`.
        quantize: see :mod:`~meshnet_node.weight_choice`; packed weights are compared with packed ones.
        compile_layers: compiles decode steps, which all checks of a split then take; plain ones if not given. A split
            whose steps are refused fails :attr:`Check.COMPILE`, and its other checks run plain.
        kernels: take steps through this machine's kernels, where it has some and layers can be run so.

    Raises:
        UnsupportedModelError: the model is not supported, or none of the splits.
        MeshnetError: the model cannot be loaded.
    """
    if tokens < MIN_TOKENS or not splits or not prompts or not all(prompts):
        raise InvalidInputError(f"a verification needs a split, a prompt, and at least {MIN_TOKENS} tokens")
    on = choose_device(device)
    kind = choose_dtype(dtype, on, CheckpointReader(folder).float_dtype())
    checked = SPLIT_CHECKS if compile_layers is None else (Check.COMPILE, *SPLIT_CHECKS)
    total = 1 + len(checked) * len(splits)
    progress("the whole model", 0, total)
    reference, whole = _refer(UnsplitModel(folder, kind, on, quantize), prompts, tokens, kind)
    results, refused = [whole], []
    computed = dtype_name(kind)
    took: set[str] = set()
    for number, split in enumerate(splits):
        first = 1 + number * len(checked)
        gc.collect()  # the model or the shards before this: they hold themselves in cycles
        progress(f"loading {split}", first, total)
        try:
            route = ShardRoute(
                folder, split, dtype=dtype_name(kind), device=str(on), quantize=quantize, kernels=kernels
            )
            checks = _SplitChecks(route, reference, compile_layers)
        except UnsupportedModelError as error:
            refused.append((split, error.message))
            continue
        for index, check in enumerate(checked):
            progress(f"{check} of {split}", first + index, total)
            results.append(checks.run(check, split))
        computed = route.dtype
        took.add(route.steps)
        del checks, route
    if len(refused) == len(splits):
        raise UnsupportedModelError(refused[0][1])
    progress("done", total, total)
    return Verification(
        computed, str(on), reference.tolerance, tuple(results), tuple(refused), " and ".join(sorted(took))
    )


def _refer(
    model: UnsplitModel, prompts: Sequence[Sequence[int]], tokens: int, dtype: torch.dtype
) -> tuple[_Reference, CheckResult]:
    """The reference, and how the whole model compares with itself between the ways of running."""
    answers, logits = zip(*(greedy_answer(model, prompt, tokens) for prompt in prompts), strict=True)
    every = torch.cat(logits)
    bound = widest_tolerance(dtype, every)
    known = _Reference(answers, logits, bound)
    own = [known.compare([way(model, given, at) for at, given in enumerate(answers)]) for way in _WAYS.values()]
    worst = max(own, key=lambda each: each.largest)
    objection = next((text for each in own if (text := bound.objection(each)) is not None), None)
    reference = _Reference(answers, logits, tolerance_for(dtype, every, own))
    return reference, CheckResult(Check.WHOLE, None, worst, objection)


def _stateless(model: FrameModel, given: Sequences, _number: int) -> Rows:
    return without_state(model, given)


def _chunked(model: FrameModel, given: Sequences, number: int) -> Rows:
    length = len(given.prompt)
    size = CHUNKS[number % len(CHUNKS)]
    return in_chunks(model, given, size if size < length else max(1, length // 2))


def _refilled(model: FrameModel, given: Sequences, number: int) -> Rows:
    return after_loss(model, given, _loss(given, number))


def _loss(given: Sequences, number: int) -> int:
    return min(LOSSES[number % len(LOSSES)], len(given.answer) - 1)


_WAYS: dict[Check, Callable[[FrameModel, Sequences, int], Rows]] = {
    Check.STATELESS: _stateless,
    Check.CHUNKS: _chunked,
    Check.RECOVERY: _refilled,
}
"""How each check feeds the answers other than the reference did; the number is the prompt's."""


class _SplitChecks:
    """The checks of one loaded split, in the order of :data:`SPLIT_CHECKS`; before them that of compiling, if any."""

    def __init__(self, route: ShardRoute, reference: _Reference, compile_layers: Compile | None) -> None:
        self._route = route
        self._compile = compile_layers
        self._reference = reference
        self._runs: list[Rows] = []

    def run(self, check: Check, split: Split) -> CheckResult:
        """Run one; what a hop refuses or fails with is an objection too."""
        if check is Check.COMPILE and self._compile is not None:
            return CheckResult(check, split, None, self._route.compile(self._compile))
        try:
            found, objection = self._judge(check)
        except MeshnetError as error:
            return CheckResult(check, split, None, f"{type(error).__name__}: {error.message}")
        return CheckResult(check, split, found, objection)

    def _judge(self, check: Check) -> tuple[Comparison, str | None]:
        if check is Check.REPLAY:
            found = compare([rows.logits for rows in self._in_steps()], [rows.logits for rows in self._undisturbed()])
            return found, None if found.same_bits else f"not the same bits, logits differ by {found.largest:.2g}"
        if check is Check.RECOVERY and (unnoticed := self._lose_each()):
            return self._reference.compare(self._each(_refilled)), unnoticed
        way = _WAYS.get(check)
        found = self._reference.compare(self._undisturbed() if way is None else self._each(way))
        return found, self._reference.tolerance.objection(found)

    def _undisturbed(self) -> list[Rows]:
        if not self._runs:
            self._runs = self._in_steps()
        return self._runs

    def _in_steps(self) -> list[Rows]:
        return [in_steps(self._route, given) for given in self._reference.answers]

    def _each(self, way: Callable[[FrameModel, Sequences, int], Rows]) -> list[Rows]:
        return [way(self._route, given, number) for number, given in enumerate(self._reference.answers)]

    def _lose_each(self) -> str | None:
        """Lose one hop's state in the middle of each answer; what is wrong if that hop answers all the same."""
        for number, given in enumerate(self._reference.answers):
            row = _loss(given, number)
            state = run_until(self._route, given, row)
            self._route.lose(state, hop=number)
            try:
                self._route.frame(given.answer[row - 1 : row], len(given.prompt) + row - 1, state, 1)
            except CacheMissError:
                continue
            return f"a state lost after {row} tokens was not missed"
        return None
