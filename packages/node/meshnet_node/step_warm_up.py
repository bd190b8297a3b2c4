"""Making a shard's compiled decode step in the background, while frames take the plain one.

Looks at how the model calls its layers, has each kind compiled (elsewhere), compares the step with the plain one on the
shard's own weights and hands it over if they are the same. Whatever goes wrong, the shard stays as it is, and says why
once. The shard's turn is taken for one short frame at a time, and rested between, so that sessions hardly notice.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from meshnet_core.errors import MeshnetError, UnsupportedModelError
from meshnet_core.layer_range import LayerRange
from meshnet_node.comparison import compare, tolerance_for
from meshnet_node.compiled_step import CompiledLayer, CompiledStep
from meshnet_node.layer_call import LayerCall
from meshnet_node.layer_sketch import LayerSketch
from meshnet_node.layer_slicing import LayerView
from meshnet_node.step_compiler import Compile, StoppedError, compile_in_child, folder

logger = logging.getLogger(__name__)

PROMPTS = (1, 11, 70)  # positions before the steps that are compared: the last fills windows and turns rooms over
STEPS = 6  # of each
CHUNK = 8  # positions of the frames that prefill: a session waits for one of them at most
REST = 1.0  # times what a frame of the comparison took


class StepState(enum.StrEnum):
    """How far a shard's compiled step is."""

    COMPILING = "compiling"
    COMPARING = "comparing"
    READY = "ready"
    REFUSED = "refused"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class StepStatus:
    """A state, since the start of the warm-up in seconds, and what is to be said of it."""

    state: StepState
    seconds: float
    detail: str = ""


class CompilableShard(Protocol):
    """What this needs of a shard."""

    layers: LayerRange
    model_type: str

    def whole_view(self) -> LayerView:
        """The view of all its layers."""
        ...

    def its_turn(self) -> AbstractContextManager[object]:
        """Keeps frames out within the block."""
        ...

    def use_compiled(self, layers: Sequence[CompiledLayer]) -> None:
        """Take decode steps through ``layers`` from now on."""
        ...


class StepWarmUp:
    """One shard's. Not started by being made.

    Args:
        shard: referred to weakly while it compiles: it may be unloaded.
        compile_layers: see :data:`~meshnet_node.step_compiler.Compile`.
        sleep: between frames of the comparison.
    """

    def __init__(
        self,
        shard: CompilableShard,
        compile_layers: Compile = compile_in_child,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._shard = weakref.ref(shard)
        self._name = f"layers {shard.layers}"
        self._model_type = shard.model_type
        self._compile = compile_layers
        self._now, self._sleep = now, sleep
        self._began = now()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run_alone, name=f"compile {self._name}", daemon=True)
        self._status = StepStatus(StepState.COMPILING, 0.0)

    @property
    def status(self) -> StepStatus:
        return self._status

    @property
    def elapsed_s(self) -> float:
        """Seconds that it took, or has taken so far."""
        under_way = self._status.state in (StepState.COMPILING, StepState.COMPARING)
        return self._now() - self._began if under_way else self._status.seconds

    def start(self) -> None:
        """Run it in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Have it end soon; from any thread, idempotent."""
        self._stopped.set()

    def wait(self) -> StepStatus:
        """Block until it has ended."""
        self._thread.join()
        return self._status

    def _run_alone(self) -> None:
        torch.set_num_threads(1)  # of this thread: the forward lane's team of threads is to be the only one
        self.run()

    def run(self) -> None:
        """Warm up, in the calling thread; raises nothing."""
        try:
            self._run()
        except StoppedError:
            self._tell(StepState.STOPPED)
        except MeshnetError as error:
            self._refuse(error.message)
        except Exception as error:  # noqa: BLE001 - nothing here may reach the frames
            self._refuse(f"{type(error).__name__}: {error}".splitlines()[0])

    def _run(self) -> None:
        logger.info("compiling the decode step of %s beside the plain one, kept in %s", self._name, folder())
        sketches = self._sketch(self._held())
        kinds = {sketch.kind: sketch for sketch in sketches}
        compiled = self._compile(list(kinds.values()), self._stopped.is_set)
        by_kind = dict(zip(kinds, compiled, strict=True))
        self._tell(StepState.COMPARING)
        layers = [by_kind[sketch.kind] for sketch in sketches]
        shard = self._held()
        if (objection := self._compare(shard, layers)) is not None:
            self._refuse(f"it differs from the plain one: {objection}")
            return
        with shard.its_turn():
            self._check_held()
            shard.use_compiled(layers)
        self._tell(StepState.READY, f"{len(kinds)} kinds of layers")
        logger.info(
            "decode steps of %s are compiled now, %d kinds of layers, after %.0f s",
            self._name, len(kinds), self._status.seconds,
        )  # fmt: skip

    def _held(self) -> CompilableShard:
        self._check_held()
        shard = self._shard()
        if shard is None:
            raise StoppedError
        return shard

    def _check_held(self) -> None:
        if self._stopped.is_set():
            raise StoppedError

    def _tell(self, state: StepState, detail: str = "") -> None:
        self._status = StepStatus(state, self._now() - self._began, detail)

    def _refuse(self, reason: str) -> None:
        if self._stopped.is_set():
            self._tell(StepState.STOPPED)
            return
        self._tell(StepState.REFUSED, reason)
        logger.warning("decode steps of %s stay plain; the compiled one is not used: %s", self._name, reason)

    # -- looking at the plain step -------------------------------------------------------------------------------------

    def _sketch(self, shard: CompilableShard) -> list[LayerSketch]:
        """Of each layer, by looking at two steps."""
        view = shard.whole_view()
        modules = list(view.plain_layers)
        if type(view.new_cache()) is not DynamicCache:
            raise UnsupportedModelError(f"{self._model_type} has a cache of a kind of its own")
        if "chunked_attention" in (getattr(view.config, "layer_types", None) or ()):
            raise UnsupportedModelError(f"{self._model_type} attends to chunks, which a step needs masks for")
        calls: list[list[LayerCall]] = [[] for _ in modules]
        inputs = _inputs(view, 3)
        with shard.its_turn(), torch.inference_mode():
            self._check_held()
            cache = view.new_cache()
            hooks = [
                module.register_forward_pre_hook(_noting(noted), with_kwargs=True)
                for module, noted in zip(modules, calls, strict=True)
            ]
            try:
                for position in range(3):
                    _frame(view, inputs, position, 1, cache)
            finally:
                for hook in hooks:
                    hook.remove()
            empty = view.new_cache().layers
        for _, second, third in calls:
            if not second.like(third):
                raise UnsupportedModelError(
                    f"a step of {self._model_type} has shapes that grow with the positions before it"
                )
        return [
            LayerSketch.of(module, noted[-1], slot, filled)
            for module, noted, slot, filled in zip(modules, calls, empty, cache.layers, strict=True)
        ]

    # -- comparing -----------------------------------------------------------------------------------------------------

    def _compare(self, shard: CompilableShard, layers: Sequence[CompiledLayer]) -> str | None:
        """What is wrong with the compiled step, in words; None if it is the same but for rounding."""
        view = shard.whole_view()
        step = CompiledStep(view, layers, view.look_at_cancel)
        plain, compiled, together = [], [], []
        for prompt in PROMPTS:
            inputs = _inputs(view, prompt + STEPS)
            plain.append(self._steps(shard, view, inputs, prompt, None))
            compiled.append(self._steps(shard, view, inputs, prompt, step))
            cache = self._prefilled(shard, view, inputs, prompt)
            frame = partial(_frame, view, inputs, prompt, STEPS, cache)
            together.append(self._one(shard, frame)[0].float().cpu())
        compiled, together = (_scaled(view, rows, plain) for rows in (compiled, together))
        plain = _scaled(view, plain, plain)
        tolerance = tolerance_for(view.model.dtype, torch.cat(plain), [compare(together, plain)])
        return tolerance.objection(compare(compiled, plain))

    def _steps(
        self, shard: CompilableShard, view: LayerView, inputs: torch.Tensor, prompt: int, through: CompiledStep | None
    ) -> torch.Tensor:
        cache = self._prefilled(shard, view, inputs, prompt)
        steps = [self._one(shard, partial(_frame, view, inputs, prompt + at, 1, cache, through)) for at in range(STEPS)]
        return torch.cat(steps, dim=1)[0].float().cpu()

    def _prefilled(self, shard: CompilableShard, view: LayerView, inputs: torch.Tensor, prompt: int) -> DynamicCache:
        cache = view.new_cache()
        for at in range(0, prompt, CHUNK):
            count = min(CHUNK, prompt - at)
            self._one(shard, partial(_frame, view, inputs, at, count, cache))
        return cache

    def _one(self, shard: CompilableShard, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run one frame in the shard's turn, then rest."""
        with shard.its_turn(), torch.inference_mode():
            self._check_held()
            began = self._now()
            result = run()
            took = self._now() - began
        self._sleep(REST * took)
        return result


def _noting(noted: list[LayerCall]) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
    def note(_module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        noted.append(LayerCall.of(arguments, keywords))

    return note


def _inputs(view: LayerView, count: int) -> torch.Tensor:
    """Token ids ``[1, count]``, or hidden states ``[1, count, hidden]``, drawn with a fixed seed."""
    draw = torch.Generator().manual_seed(0)
    config, like = view.config, next(iter(view.plain_layers.parameters()))
    if view.layers.start == 0:
        return torch.randint(config.vocab_size, (1, count), generator=draw).to(like.device)
    return torch.randn(1, count, config.hidden_size, generator=draw).to(like.device, view.model.dtype)


def _frame(
    view: LayerView,
    inputs: torch.Tensor,
    position: int,
    count: int,
    cache: DynamicCache,
    through: CompiledStep | None = None,
) -> torch.Tensor:
    """Logits ``[1, count, vocab]`` of the last shard, hidden states ``[1, count, hidden]`` of another."""
    before, view.step = view.step, through
    try:
        return view.forward(
            inputs[:, position : position + count],
            position=position,
            cache=cache,
            sample=count if view.is_last else 0,
            cancelled=lambda: False,
        )
    finally:
        view.step = before


def _scaled(view: LayerView, rows: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Runs of a shard, ``[positions, width]``, as :mod:`meshnet_node.comparison` takes them.

    Logits as they are; hidden states, whose size differs a thousandfold between models, by that of the plain one's.
    """
    if view.is_last:
        return list(rows)
    sizes = [each.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-12) for each in plain]
    return [each / size for each, size in zip(rows, sizes, strict=True)]
