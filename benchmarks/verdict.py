"""What is asked of a figure, and whether its interval reaches it. Pure; knows no benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.figures import Interval


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that is asked, of one run.

    Attributes:
        what: that was measured, for people.
        found: of the repeats.
        target: that the interval has to reach.
        at_most: whether less is better.
    """

    what: str
    found: Interval
    target: float
    at_most: bool = False

    @property
    def reached(self) -> bool:
        return self.found.at_most(self.target) if self.at_most else self.found.at_least(self.target)

    @property
    def asked(self) -> str:
        return f"at {'most' if self.at_most else 'least'} {self.target:g}"

    def by_target(self, value: float) -> float:
        """Above 1 where ``value`` is better than what is asked."""
        return self.target / value if self.at_most else value / self.target

    def shown(self, digits: int = 3) -> str:
        """``two nodes by one: 0.58 (0.55 to 0.61 at 0.97); asked: at most 0.6: reached``."""
        word = "reached" if self.reached else "MISSED"
        return f"{self.what}: {self.found.shown(digits)}; asked: {self.asked}: {word}"

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "found": self.found.to_json(),
            "target": self.target,
            "at_most": self.at_most,
            "reached": self.reached,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Verdict:
        """The same again, from `to_json`."""
        found = document["found"]
        interval = Interval(**{**found, "repeats": int(found["repeats"])})
        return cls(document["what"], interval, document["target"], document["at_most"])
