"""What a finding of `meshnet doctor` is, and what a check is that makes them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from meshnet_cli.doctor_facts import Facts


class Level(enum.StrEnum):
    """How bad a finding is; only ``wrong`` makes the exit code 1."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``remedy`` is what to do, empty where there is nothing to do."""

    check: str
    level: Level
    what: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Objections = Iterator[tuple[Level, str, str]]
"""(level, what is the matter, what to do) of each."""


@dataclass(frozen=True)
class Check:
    """One look at the facts: what there is to object to, and what is said where there is nothing."""

    name: str
    objections: Callable[[Facts], Objections]
    fine: Callable[[Facts], str]

    def findings(self, facts: Facts) -> list[Finding]:
        """One for each objection, or the one that all is well."""
        found = [Finding(self.name, level, what, remedy) for level, what, remedy in self.objections(facts)]
        return found or [Finding(self.name, Level.OK, self.fine(facts))]
