"""The machines that a dashboard has seen: those that are gone are shown for a while, with the hole they leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEPT_S = 600.0  # a machine that is gone is remembered so long
MOST = 64  # of the gone


class KnownMachines:
    """Takes one status after the other. The time is the caller's: seconds of a clock that only goes forward.

    Attributes:
        nodes: of the newest status, and after them those that are gone, each with ``"gone": True``.
        models: of the newest status, and those that left with the machines that are gone.
    """

    def __init__(self) -> None:
        self.nodes: list[Mapping[str, Any]] = []
        self.models: list[Mapping[str, Any]] = []
        self._seen: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self._models: dict[str, Mapping[str, Any]] = {}

    def saw(self, status: Mapping[str, Any], now: float) -> None:
        """Take in a status, as of ``now``."""
        present = {node["node"]: node for node in status["nodes"]}
        for name, node in present.items():
            self._seen[name] = (now, node)
        gone = [(at, node) for name, (at, node) in self._seen.items() if name not in present and now - at < KEPT_S]
        gone = sorted(gone, key=lambda seen: seen[0])[-MOST:]
        kept = set(present) | {node["node"] for _, node in gone}
        self._seen = {name: seen for name, seen in self._seen.items() if name in kept}
        self.nodes = [*present.values(), *({**node, "gone": True} for _, node in gone)]
        held = {shard["model"] for node in self.nodes for shard in node["layers"]}
        listed = {model["name"] for model in status["models"]}
        lost = [model for name, model in self._models.items() if name in held and name not in listed]
        self.models = [*status["models"], *({**model, "expected_ms_per_token": None} for model in lost)]
        self._models = {model["name"]: model for model in self.models}
