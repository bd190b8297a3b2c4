"""Whether nodes on given devices answer as the whole model does, in float32: tokens, and logprobs of the likeliest.

The reference reads the mesh's own answer in one pass without a cache ("teacher forcing"), so every position is judged,
also after a token that differs. A differing token is excused only where the reference's best two logits lie within
`CLOSE` of each other: there rounding decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.in_process import in_process_mesh
from meshnet_core.layer_range import LayerRange
from meshnet_core.sampling import SampledToken

CLOSE = 1e-3  # of logits
CHUNK = 5  # positions: the prompt takes several frames
TOP = 5


@dataclass(frozen=True, slots=True)
class Parity:
    """How one answer compares.

    Attributes:
        tokens: how many were compared.
        excused: how many differ where the best two logits are within `CLOSE`.
        wrong: how many differ elsewhere.
        stateless_differs_at: the first token in which the stateless path differs from the cached; None if none does.
        worst: the greatest difference of a logprob.
    """

    tokens: int
    excused: int
    wrong: int
    stateless_differs_at: int | None
    worst: float

    @property
    def holds(self) -> bool:
        """Whether nothing but rounding shows."""
        same = self.stateless_differs_at is None or self.excused > 0
        return self.wrong == 0 and self.worst <= CLOSE and same

    def __str__(self) -> str:
        """In words."""
        text = f"{self.tokens} tokens, logprobs within {self.worst:.1e}"
        text += f", {self.excused} excused" if self.excused else ""
        text += f", {self.wrong} WRONG" if self.wrong else ""
        at = self.stateless_differs_at
        return text if at is None else f"{text}, stateless differs from token {at} on"


async def compare(
    folder: Path, splits: Sequence[LayerRange], devices: Sequence[str], prompt: Sequence[int], count: int
) -> Parity:
    """Let a mesh answer, cached and stateless, and judge it by the whole model on the first node's device."""
    async with in_process_mesh(folder, splits, devices) as mesh:
        cached = await mesh.answer(prompt, count, chunk=CHUNK, top=TOP)
        stateless = await mesh.answer(prompt, count, cache=False)
    reference = _logits(folder, devices[0], prompt, [token.id for token in cached])
    return judge(cached, [token.id for token in stateless], reference)


def judge(cached: Sequence[SampledToken], stateless: Sequence[int], reference: torch.Tensor) -> Parity:
    """Compare an answer with the reference's logits, float32 ``[len(cached), vocab]``, at its positions."""
    excused = wrong = 0
    worst = 0.0
    logprobs = reference.log_softmax(dim=-1)
    for index, token in enumerate(cached):
        gap = float(reference[index].max() - reference[index, token.id])
        excused += 0 < gap <= CLOSE
        wrong += gap > CLOSE
        worst = max([worst, *(abs(float(logprobs[index, other]) - value) for other, value in token.top)])
    differs = next((index for index, token in enumerate(cached) if token.id != stateless[index]), None)
    return Parity(len(cached), excused, wrong, differs, worst)


@torch.inference_mode()
def _logits(folder: Path, device: str, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=device)
    logits: torch.Tensor = model.to(device).eval()(ids, use_cache=False, logits_to_keep=len(answer)).logits[0]
    return logits.float().cpu()
