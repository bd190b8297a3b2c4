"""An engine that says what a test wrote down, and notes what was done to it; no mesh, no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshnet_core.coverage import ModelSummary
from meshnet_core.errors import MeshnetError, ModelNotFoundError
from meshnet_core.layer_range import LayerRange
from meshnet_core.sampling import SampledToken
from meshnet_gateway.generation import GenerationRequest, PrefillProgress
from meshnet_gateway.text_model import TextModel

Step = PrefillProgress | SampledToken | MeshnetError | Exception | asyncio.Event


@dataclass
class ScriptedEngine:
    """Every generation goes through ``script``: events are given out, errors raised, an `asyncio.Event` waited for.

    ``script`` may be a function of the request. Attributes tell what happened.
    """

    script: Sequence[Step] | Callable[[GenerationRequest], Sequence[Step]] = ()
    finish: str = "stop"
    recoveries: Sequence[dict[str, Any]] = ()  # of every generation's report
    requests: list[GenerationRequest] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)  # sessions, in the order in which they were closed
    cached_tokens: int = 0  # of every generation's report
    drafted_tokens: int = 0  # likewise
    accepted_tokens: int = 0
    given: int = 0  # events given out
    waiting: asyncio.Event = field(default_factory=asyncio.Event)  # set when a generation waits within its script

    def start(self, request: GenerationRequest) -> ScriptedGeneration:
        self.requests.append(request)
        steps = self.script(request) if callable(self.script) else self.script
        return ScriptedGeneration(self, f"s-{len(self.requests)}", request, list(steps))


class ScriptedGeneration:
    def __init__(self, engine: ScriptedEngine, session: str, request: GenerationRequest, steps: list[Step]) -> None:
        self.session = session
        self.finish_reason: str | None = None
        self._engine = engine
        self._request = request
        self.steps = steps
        self._events = self._run()

    def __aiter__(self) -> AsyncGenerator[PrefillProgress | SampledToken]:
        return self._events

    async def _run(self) -> AsyncGenerator[PrefillProgress | SampledToken]:
        made = 0
        for step in self.steps:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                self._engine.waiting.set()
                await step.wait()
                continue
            await asyncio.sleep(0)
            if isinstance(step, SampledToken):
                if step.id in self._request.stop_ids:
                    self.finish_reason = "stop"
                    return
                made += 1
            self._engine.given += 1
            yield step
            if made >= self._request.max_tokens:
                self.finish_reason = "length"
                return
        self.finish_reason = self._engine.finish

    def report(self) -> dict[str, Any]:
        mode = "cached" if self._request.cache else "stateless"
        told = {"session": self.session, "mode": mode, "recoveries": list(self._engine.recoveries)}
        made = ("cached_tokens", "drafted_tokens", "accepted_tokens")
        return told | {name: getattr(self._engine, name) for name in made}

    async def aclose(self) -> None:
        await self._events.aclose()
        if self.session not in self._engine.closed:
            self._engine.closed.append(self.session)


def tokens(ids: Iterable[int]) -> list[SampledToken]:
    return [SampledToken(token) for token in ids]


@dataclass
class FixedTexts:
    """Text models by name, in the place of a store that fetches them."""

    models: dict[str, TextModel]

    async def get(self, name: str) -> TextModel:
        if name not in self.models:
            raise ModelNotFoundError(f"no node serves a model {name!r}")
        return self.models[name]


@dataclass
class FixedMesh:
    """A mesh that is asked for its models and its status only."""

    served: list[ModelSummary] = field(default_factory=list)
    failure: MeshnetError | None = None

    async def models(self) -> list[ModelSummary]:
        if self.failure is not None:
            raise self.failure
        return self.served

    async def status(self) -> dict[str, Any]:
        return {"nodes": [], "models": [model.name for model in await self.models()]}


def summary(name: str, *, missing: Sequence[LayerRange] = (), max_positions: int = 64) -> ModelSummary:
    return ModelSummary(
        name=name,
        fingerprint="f" * 64,
        num_layers=4,
        hidden_size=8,
        max_positions=max_positions,
        complete=not missing,
        missing=tuple(missing),
        dtypes=("float32",),
    )
