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
from collections.abc import Callable
from dataclasses import dataclass

from meshnet_core.errors import MeshnetError
from meshnet_node.cpu_threads import take_cpu_threads
from meshnet_node.layer_sketches import sketch_layers
from meshnet_node.step_comparison import StepComparison, compare_steps
from meshnet_node.step_compiler import Compile, compile_in_child, folder
from meshnet_node.step_frames import CompilableShard, StoppedError

logger = logging.getLogger(__name__)


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


def is_quicker(found: StepComparison) -> bool:
    """Whether the compiled step took less time."""
    return found.compiled_s < found.plain_s


class StepWarmUp:
    """One shard's. Not started by being made.

    Args:
        shard: referred to weakly while it compiles: it may be unloaded.
        compile_layers: see :data:`~meshnet_node.step_compiler.Compile`.
        is_worth: whether a compiled step that is the same is to be used.
        sleep: between frames of the comparison.
    """

    def __init__(
        self,
        shard: CompilableShard,
        compile_layers: Compile = compile_in_child,
        *,
        is_worth: Callable[[StepComparison], bool] = is_quicker,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._shard = weakref.ref(shard)
        self._name = f"layers {shard.layers}"
        self._model_type = shard.model_type
        self._compile = compile_layers
        self._is_worth = is_worth
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
        take_cpu_threads(1)  # the forward lane's team of threads is to be the only one
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
        sketches = sketch_layers(self._held(), self._stopped.is_set)
        kinds = {sketch.kind: sketch for sketch in sketches}
        compiled = self._compile(list(kinds.values()), self._stopped.is_set)
        by_kind = dict(zip(kinds, compiled, strict=True))
        self._tell(StepState.COMPARING)
        layers = [by_kind[sketch.kind] for sketch in sketches]
        shard = self._held()
        found = compare_steps(shard, layers, stopped=self._stopped.is_set, sleep=self._sleep)
        if found.objection is not None:
            self._refuse(f"it differs from the plain one: {found.objection}")
            return
        took = f"{1000 * found.compiled_s:.1f} ms a step, {1000 * found.plain_s:.1f} plain"
        if not self._is_worth(found):
            self._refuse(f"it is no quicker than the plain one: {took}")
            return
        with shard.its_turn():
            self._check_held()
            shard.use_compiled(layers)
        self._tell(StepState.READY, took)
        logger.info("decode steps of %s are compiled now, after %.0f s: %s", self._name, self._status.seconds, took)

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
