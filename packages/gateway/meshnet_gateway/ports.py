"""What the API needs of the rest of the gateway, and no more; tests give it scripted ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from meshnet_core.coverage import ModelSummary
from meshnet_core.sampling import SampledToken
from meshnet_gateway.generation import GenerationRequest, PrefillProgress
from meshnet_gateway.text_model import TextModel


class GenerationLike(Protocol):
    """One generation, which begins when it is iterated; `meshnet_gateway.generation.Generation` is one."""

    @property
    def finish_reason(self) -> str | None:
        """``"stop"`` or ``"length"`` once it has ended by itself."""
        ...

    def __aiter__(self) -> AsyncIterator[PrefillProgress | SampledToken]:
        """Progress, then tokens; raises a `MeshnetError` where the mesh cannot go on."""
        ...

    def report(self) -> dict[str, Any]:
        """The JSON-ready `meshnet` object of an answer; may be asked for at any time."""
        ...

    async def aclose(self) -> None:
        """End it wherever it is and free its session on every hop; idempotent, not while it is being iterated."""
        ...


class Engine(Protocol):
    def start(self, request: GenerationRequest) -> GenerationLike: ...


class TextModels(Protocol):
    async def get(self, name: str) -> TextModel:
        """The text model served as ``name``; see `meshnet_gateway.text_store.TextStore.get` for its errors."""
        ...


class Mesh(Protocol):
    async def models(self) -> list[ModelSummary]:
        """What the mesh serves, incomplete models included."""
        ...

    async def status(self) -> dict[str, Any]:
        """JSON-ready: nodes, layers, sessions, state bytes."""
        ...


class WaitingFigures(Protocol):
    """How it stands with waiting for room; `meshnet_gateway.waiting_room.WaitingRoom` tells it."""

    @property
    def waiting(self) -> int:
        """Generations that wait now."""
        ...

    @property
    def waits(self) -> int:
        """How often one had to wait so far."""
        ...

    @property
    def waited_s(self) -> float:
        """For how many seconds, all together."""
        ...

    @property
    def turned_away(self) -> int:
        """How often one waited in vain, or could not even wait."""
        ...
