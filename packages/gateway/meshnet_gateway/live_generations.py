"""Which generations run now, on which routes, and how many tokens they made: for whoever looks on. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshnet_gateway.ports import GenerationLike


class LiveGenerations:
    """Those of one gateway."""

    def __init__(self) -> None:
        self._running: dict[GenerationLike, str] = {}
        self._tokens_of_ended = 0
        self._latest: dict[str, dict[str, Any]] = {}

    @property
    def tokens(self) -> int:
        """Tokens of answers made so far, by those that ended and those that run."""
        return self._tokens_of_ended + sum(map(_made, self._running))

    @contextmanager
    def watched(self, generation: GenerationLike, model: str) -> Iterator[None]:
        """Count a generation of this model among the running ones while the block runs."""
        self._running[generation] = model
        try:
            yield
        finally:
            del self._running[generation]
            self._tokens_of_ended += _made(generation)
            report = generation.report()
            if (speed := report.get("tokens_per_s")) is not None:
                self._latest[model] = {"completion_tokens": report["completion_tokens"], "tokens_per_s": speed}

    def to_json(self) -> list[dict[str, Any]]:
        """Each running one: session, model, route, tokens of prompt and answer, tokens per second of the newest 50."""
        return [_entry(generation.report(), model) for generation, model in self._running.items()]

    def latest(self) -> dict[str, dict[str, Any]]:
        """By model, the newest one that ended after several tokens: how many, and tokens per second."""
        return dict(self._latest)


def _made(generation: GenerationLike) -> int:
    return int(generation.report().get("completion_tokens", 0))


def _entry(report: dict[str, Any], model: str) -> dict[str, Any]:
    return {
        "session": report.get("session"),
        "model": model,
        "mode": report.get("mode"),
        "route": [{"node": hop["node"], "layers": hop["layers"]} for hop in report.get("route", ())],
        "prompt_tokens": report.get("prompt_tokens", 0),
        "completion_tokens": report.get("completion_tokens", 0),
        "tokens_per_s": report.get("tokens_per_s_last_50"),
        "recoveries": len(report.get("recoveries", ())),
    }
