"""Routes of loaded shards in one process, without any wire: what the shard tests drive frames with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from meshnet_core.layer_range import LayerRange
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.session_state import SessionState
from meshnet_node.shard_loader import load_shard
from meshnet_node.shard_work import ShardWork
from tiny_models import save_tiny

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Answer:
    """Greedy continuation: ``tokens``, and the logits ``[prompt + len(tokens) - 1, vocab]`` of every position run."""

    tokens: list[int]
    logits: torch.Tensor

    def assert_same(self, other: Answer) -> None:
        """Equal tokens, and logits within :data:`TOLERANCE`."""
        assert self.tokens == other.tokens
        assert_close(self.logits, other.logits)


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    """Logits within :data:`TOLERANCE` of each other, everywhere."""
    torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


def assert_far(one: torch.Tensor, other: torch.Tensor, margin: float = 100) -> None:
    """Logits that :func:`assert_close` refuses, and by ``margin`` tolerances at some place."""
    with pytest.raises(AssertionError):
        assert_close(one, other)
    assert float((one - other).abs().max()) > margin * TOLERANCE


class Models:
    """Tiny checkpoints with their loaded shards and unsharded references, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._shards: dict[tuple[str, LayerRange], TorchModelShard] = {}
        self._references: dict[str, PreTrainedModel] = {}

    def folder(self, family: str) -> Path:
        folder = self._root / family
        return folder if folder.exists() else save_tiny(family, folder)

    def shard(self, family: str, start: int, stop: int) -> TorchModelShard:
        key = (family, LayerRange(start, stop))
        if key not in self._shards:
            self._shards[key] = load_shard(self.folder(family), key[1], dtype="float32", device="cpu")
        return self._shards[key]

    def reference(self, family: str) -> PreTrainedModel:
        if family not in self._references:
            model = AutoModelForCausalLM.from_pretrained(self.folder(family), dtype=torch.float32)
            self._references[family] = model.eval()
        return self._references[family]

    def route(self, family: str, hops: Sequence[tuple[int, int, int]]) -> Route:
        """A route of hops ``(shard start, shard stop, effective start)``."""
        return Route([(self.shard(family, start, stop), effective) for start, stop, effective in hops])


class Route:
    """Shards with effective starts, run one after the other."""

    def __init__(self, hops: Sequence[tuple[TorchModelShard, int]]) -> None:
        self.hops = hops

    def open(self) -> list[SessionState]:
        """A session's state on every hop."""
        return [shard.new_state(start) for shard, start in self.hops]

    def frame(self, ids: Sequence[int], position: int, states: Sequence[SessionState] | None) -> torch.Tensor:
        """Run one frame through all hops; logits ``[len(ids), vocab]``."""
        payload: bytes | memoryview = torch.tensor(ids, dtype=torch.int32).numpy().tobytes()
        for index, (shard, start) in enumerate(self.hops):
            work = ShardWork(
                start=start,
                state=states[index] if states is not None else None,
                position=position,
                seq_len=len(ids),
                payload=payload,
                wire_dtype="float32",
                sample=len(ids),
            )
            (result,) = shard.forward([work])
            if isinstance(result, Exception):
                raise result
            if result.logits is not None:
                return result.logits
            assert result.hidden is not None
            payload = result.hidden
        raise AssertionError("the route has no last shard")

    def prefill(self, ids: Sequence[int], states: Sequence[SessionState], chunk: int = 5) -> torch.Tensor:
        """Run a prompt in chunks; logits of all its positions."""
        return torch.cat([self.frame(ids[at : at + chunk], at, states) for at in range(0, len(ids), chunk)])

    def decode(self, ids: Sequence[int], position: int, states: Sequence[SessionState]) -> torch.Tensor:
        """Run given tokens one position at a time; logits of each."""
        return torch.cat([self.frame([token], position + at, states) for at, token in enumerate(ids)])

    def cached(self, prompt: Sequence[int], count: int) -> Answer:
        """Greedy, with state: the prompt in chunks, then single positions."""
        states = self.open()
        logits = self.prefill(prompt, states)
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < count:
            row = self.frame([tokens[-1]], len(prompt) + len(tokens) - 1, states)
            logits = torch.cat([logits, row])
            tokens.append(int(row[-1].argmax()))
        return Answer(tokens, logits)

    def stateless(self, prompt: Sequence[int], count: int) -> Answer:
        """Greedy, the whole sequence at every step."""
        logits = self.frame(prompt, 0, None)
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < count:
            row = self.frame([*prompt, *tokens], 0, None)[-1:]
            logits = torch.cat([logits, row])
            tokens.append(int(row[-1].argmax()))
        return Answer(tokens, logits)


@torch.inference_mode()
def unsharded(model: PreTrainedModel, prompt: Sequence[int], count: int) -> Answer:
    """Greedy by the whole model with its own cache, whole prompt at once: what ``generate()`` computes."""
    output = model(torch.tensor([prompt]), use_cache=True)
    cache, logits = output.cache, output.logits[0]
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < count:
        at = torch.tensor([[len(prompt) + len(tokens) - 1]])  # as generate() does: bamba begins at 0 again without
        row = model(torch.tensor([[tokens[-1]]]), position_ids=at, cache=cache, use_cache=True).logits[0]
        logits = torch.cat([logits, row])
        tokens.append(int(row[-1].argmax()))
    return Answer(tokens, logits)
