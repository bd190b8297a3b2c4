"""The ways to feed one sequence to a model: whole or in steps, with state or without, after a loss.

All of them must give the same logits but for rounding. They run on anything that takes frames, cut or uncut. The tokens
are given, not chosen, so that one that differs does not hide what comes after it. Knows nothing of comparing.

    ids       p p p p p p t t t t       prompt, then the answer's tokens
    row 0               ^               chooses the first token of the answer
    row 1                 ^
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

AFTER = 8  # steps run after the prompt came in chunks, or after a loss: what state holds shows in each of them


class FrameModel(Protocol):
    """What runs frames: a route of shards, or a whole model."""

    def open(self) -> Any:
        """Empty state of one session."""
        ...

    def frame(self, ids: Sequence[int], position: int, state: Any, sample: int) -> torch.Tensor:
        """Run ``ids`` after ``position`` others; float32 logits ``[sample, vocab]``, on the CPU, of the last ones.

        ``state`` is what :meth:`open` gave and advances; None runs without, from position 0.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sequences:
    """One prompt and the tokens that answer it.

    Attributes:
        prompt: at least one token id.
        answer: at least two.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def before(self, row: int) -> list[int]:
        """The token ids that row ``row`` follows: the prompt, and ``row`` tokens of the answer."""
        return [*self.prompt, *self.answer[:row]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Logits ``[len(indices), vocab]``, and which rows of the answer they are."""

    indices: tuple[int, ...]
    logits: torch.Tensor


def greedy_answer(model: FrameModel, prompt: Sequence[int], count: int) -> tuple[Sequences, torch.Tensor]:
    """The whole prompt in one frame, then ``count - 1`` steps; the answer, and its logits ``[count, vocab]``."""
    state = model.open()
    rows = [model.frame(prompt, 0, state, 1)]
    answer = [int(rows[0].argmax())]
    while len(answer) < count:
        rows.append(model.frame(answer[-1:], len(prompt) + len(answer) - 1, state, 1))
        answer.append(int(rows[-1].argmax()))
    return Sequences(tuple(prompt), tuple(answer)), torch.cat(rows)


def in_steps(model: FrameModel, given: Sequences) -> Rows:
    """The whole prompt in one frame, then single positions."""
    return _refilled(model, given, 0, len(given.answer))


def without_state(model: FrameModel, given: Sequences) -> Rows:
    """All positions in one frame that keeps nothing, and the frames of the first and a middle step of that path."""
    count = len(given.answer)
    steps = (0, count // 2)
    whole = model.frame(given.before(count - 1), 0, None, count)
    singly = [model.frame(given.before(row), 0, None, 1) for row in steps]
    return Rows((*range(count), *steps), torch.cat([whole, *singly]))


def in_chunks(model: FrameModel, given: Sequences, size: int) -> Rows:
    """The prompt in frames of ``size`` positions, then some single positions."""
    state, prompt = model.open(), given.prompt
    for start in range(0, len(prompt), size):
        chunk = prompt[start : start + size]
        logits = model.frame(chunk, start, state, int(start + size >= len(prompt)))
    return _with_steps(model, given, state, 0, logits, AFTER)


def after_loss(model: FrameModel, given: Sequences, lost_at: int) -> Rows:
    """Prompt and ``lost_at`` tokens of the answer in one frame on fresh state, then some single positions."""
    return _refilled(model, given, lost_at, AFTER)


def run_until(model: FrameModel, given: Sequences, row: int) -> Any:
    """The state of an answer under way: it has taken in all that row ``row - 1`` follows."""
    state = model.open()
    model.frame(given.prompt, 0, state, 1)
    for at in range(1, row):
        _step(model, given, state, at)
    return state


def _refilled(model: FrameModel, given: Sequences, row: int, count: int) -> Rows:
    state = model.open()
    logits = model.frame(given.before(row), 0, state, 1)
    return _with_steps(model, given, state, row, logits, count)


def _with_steps(model: FrameModel, given: Sequences, state: Any, first: int, logits: torch.Tensor, count: int) -> Rows:
    indices = tuple(range(first, min(first + count, len(given.answer))))
    steps = [_step(model, given, state, row) for row in indices[1:]]
    return Rows(indices, torch.cat([logits, *steps]))


def _step(model: FrameModel, given: Sequences, state: Any, row: int) -> torch.Tensor:
    return model.frame(given.answer[row - 1 : row], len(given.prompt) + row - 1, state, 1)
