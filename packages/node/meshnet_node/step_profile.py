"""What a shard's decode step is made of: products with weights, attention, and the rest. Measured on demand.

torch's profiler tells of every operation how long it took without those that it called; each goes to the innermost of
its callers that says what it is for:

    step ── layer ── self_attn ─┬─ linear ── addmm          products, though within attention
                                └─ scaled_dot_product       attention
                     └─ mul, rsqrt, add, calls of modules   the rest: what is left of the whole

A node that serves is not profiled, and pays nothing for it that this exists.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from meshnet_core.dtypes import computed_in, dtype_bytes
from meshnet_core.frames import MAX_CHUNK
from meshnet_node.layer_view import LayerView
from meshnet_node.model_backend import TorchModelShard
from meshnet_node.shard_work import ShardWork

STEP, ATTENTION, PRODUCTS = "meshnet step", "meshnet attention", "meshnet products"
# Products that read weights, by torch's names; bmm and matmul are attention's own unless they lie outside of it.
_PRODUCTS = re.compile(r"\w+::(mm|addmm|_int_mm|\w*linear\w*|\w*pack_mm\w*|\w*grouped_mm\w*)")
_PRODUCTS_ELSEWHERE = re.compile(r"aten::(bmm|baddbmm|matmul)")
_ATTENTION_CORE = re.compile(r"aten::\w*(scaled_dot_product|flash_attention)\w*|meshnet::step_attention")
# A layer's own part that mixes positions, whatever its kind.
_MIXER = re.compile(r"(.*\.)?layers\.\d+\.(?!\w*norm)(\w*attn|\w*attention|mixer|mamba|conv|temporal_block)")
WARM_UP_STEPS = 3
_PROMPT_TOKEN = 1


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Means over decode steps, in milliseconds: the parts add up to ``step_ms``.

    Attributes:
        step_ms: of a step while it is profiled, which takes longer.
        unprofiled_ms: of one that is not.
        products: with weights; native experts whole.
        attention: all else within the layers' attention, linear attention's recurrences included.
        rest: norms, activations, additions, reading the frame, and calling all of it from Python.
        steps: so many.
    """

    step_ms: float
    unprofiled_ms: float
    products: float
    attention: float
    rest: float
    steps: int

    def to_json(self) -> dict[str, float]:
        return {name: round(getattr(self, name), 4) for name in self.__slots__}


def profile_steps(shard: TorchModelShard, position: int, steps: int) -> StepSplit:
    """Split ``steps`` decode steps of one session that follow ``position`` others.

    Raises:
        MeshnetError: the shard refuses a frame.
    """
    session = _Session(shard)
    session.fill(position)
    for _ in range(WARM_UP_STEPS):
        session.step()
    began = time.perf_counter()
    for _ in range(steps):
        session.step()
    unprofiled_ms = 1000 * (time.perf_counter() - began) / steps
    with _marked(shard), profile(activities=[ProfilerActivity.CPU]) as profiler:
        session.step()  # the profiler's own first one
        for _ in range(steps):
            with record_function(STEP):
                session.step()
    return split_of(profiler.events(), unprofiled_ms)


def split_of(events: Any, unprofiled_ms: float) -> StepSplit:
    """The split of what a profiler recorded; steps are what is marked as `STEP`."""
    whole = products = attention = 0.0
    steps = 0
    for event in events:
        if event.name == STEP:
            steps += 1
            whole += event.cpu_time_total
        kind = _kind_of(event)
        if kind == "products":
            products += event.self_cpu_time_total
        elif kind == "attention":
            attention += event.self_cpu_time_total
    to_ms = 1 / 1000 / max(1, steps)
    whole, products, attention = whole * to_ms, products * to_ms, attention * to_ms
    return StepSplit(whole, unprofiled_ms, products, attention, whole - products - attention, steps)


def _kind_of(event: Any) -> str | None:
    """What an operation is for; None for what lies outside of a step, and for what is neither."""
    kind: str | None = None
    elsewhere = False
    while event is not None:
        name = event.name
        if name == STEP:
            return "products" if kind is None and elsewhere else kind
        if kind is None:
            if name == PRODUCTS or _PRODUCTS.fullmatch(name):
                kind = "products"
            elif name == ATTENTION or _ATTENTION_CORE.fullmatch(name):
                kind = "attention"
            elsewhere = elsewhere or _PRODUCTS_ELSEWHERE.fullmatch(name) is not None
        event = event.cpu_parent
    return None


class _Session:
    """One session on a shard, fed with frames that mean nothing."""

    def __init__(self, shard: TorchModelShard) -> None:
        self._shard = shard
        self._state = shard.new_state(shard.layers.start)
        self._position = 0

    def fill(self, positions: int) -> None:
        while self._position < positions:
            self._run(min(MAX_CHUNK, positions - self._position), sample=0)

    def step(self) -> None:
        self._run(1, sample=1)

    def _run(self, length: int, sample: int) -> None:
        shard = self._shard
        if shard.is_first:
            body = struct.pack(f"<{length}i", *[_PROMPT_TOKEN] * length)
        else:
            body = bytes(length * shard.hidden_size * dtype_bytes(shard.dtype))
        work = ShardWork(
            shard.layers.start, self._state, self._position, length, body, computed_in(shard.dtype), sample
        )
        (result,) = shard.forward([work])
        if isinstance(result, Exception):
            raise result
        self._position += length


@contextmanager
def _marked(shard: TorchModelShard) -> Iterator[None]:
    """Within the block the profiler is told where attention begins and ends, and native products and experts."""
    handles = []
    marks: list[Any] = []

    def enter(_module: nn.Module, _arguments: Any) -> None:
        mark: Any = record_function(ATTENTION)
        mark.__enter__()
        marks.append(mark)

    def leave(_module: nn.Module, _arguments: Any, _result: Any) -> None:
        marks.pop().__exit__(None, None, None)

    for name, module in shard.named_modules():
        if _MIXER.fullmatch(name):
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    natives = _natives(shard.whole_view())
    kept = [(owner, name, vars(owner).get(name)) for owner, name, _ in natives]
    for owner, name, mark in natives:
        setattr(owner, name, record_function(mark)(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, own in kept:
            if own is None:
                delattr(owner, name)  # what the class has is found again
            else:
                setattr(owner, name, own)
        for handle in handles:
            handle.remove()


def _natives(view: LayerView) -> list[tuple[Any, str, str]]:
    """What torch's profiler knows nothing of: where it is called from, and what it is to be counted as."""
    found: list[tuple[Any, str, str]] = []
    if view.native is not None:
        found += [(attention, "run", ATTENTION) for attention in view.native.attentions]
    if view.parts is not None:
        found += [(experts, "run", PRODUCTS) for experts in view.parts.experts]
    if view.kernels is not None:
        found.append((view.kernels, "few", PRODUCTS))
    return found
