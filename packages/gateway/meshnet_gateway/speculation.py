"""How many drafted tokens a step carries: decided from what drafts were worth so far and what positions cost. Pure.

A step takes one round trip through the route however many positions it carries, and each token that is right saves
one. With probability ``a`` for each draft to be right, a step with ``k`` of them gives 1 + a + ... + a^k tokens
(Leviathan et al. 2023, eq. 1) and takes ``single + k * position`` milliseconds. So slow links and a text that repeats
itself call for many, and a fast one, where a position costs nearly a step, for none.

Drafts are compared with what comes also where none was sent: what they are worth is known before they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshnet_core.errors import CacheFullError, CacheMissError, InvalidInputError, MeshnetError, MissReason
from meshnet_core.frames import MAX_DRAFT, FrameReply
from meshnet_gateway.ngram_drafter import LONGEST, NO_DRAFT, Draft, NgramDrafter

PAYS = 1.1  # tokens per second with drafts to those without, from which on it is worth it
FADES = 0.9  # weight that what drafts were worth keeps with each further one
PRIOR = 0.5  # chance that a draft is right, of which nothing is known yet; counts as one draft
SURE = 0.97  # no chance is higher
NEWEST = 0.3  # weight of a newest time
POSITION_SHARE = 0.25  # of the hops' own time that a further position takes, before it was measured
TRIAL = 4  # drafts at most, before it was measured, or where that was long ago
LONG_AGO = 8  # steps without drafts
FORGETS = 0.02  # of what was measured of positions, with each step without drafts: a hiccup is not for ever


@dataclass(frozen=True, slots=True)
class Speculate:
    """Whether to speculate.

    Attributes:
        most: drafted tokens in one step; 0 speculates never.
        always: with as many wherever there is a draft; else with as many as pay.
    """

    most: int = MAX_DRAFT
    always: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.most <= MAX_DRAFT:
            raise InvalidInputError(f"at most {MAX_DRAFT} tokens are drafted in one step, not {self.most}")

    @classmethod
    def parse(cls, text: str | int) -> Speculate:
        """``auto``, ``off``, or how many tokens to draft wherever there is a draft.

        Raises:
            InvalidInputError: it is none of them.
        """
        if text == "auto":
            return AUTO
        if text == "off":
            return OFF
        if str(text).isdecimal() and 1 <= int(text) <= MAX_DRAFT:
            return cls(int(text), always=True)
        raise InvalidInputError(f"speculate is auto, off, or a number of tokens from 1 to {MAX_DRAFT}, not {text!r}")

    def __str__(self) -> str:
        return "off" if self.most == 0 else str(self.most) if self.always else "auto"


AUTO = Speculate()
OFF = Speculate(0)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds that a step takes with one position, and that each further one adds."""

    single_ms: float
    position_ms: float


def tokens_expected(chance: float, count: int) -> float:
    """Tokens of a step with ``count`` drafts, each right with this chance if those before it are."""
    return sum(chance**right for right in range(count + 1))


def drafts_that_pay(chance: float, most: int, cost: StepCost) -> int:
    """How many drafts make the most tokens in a time; 0 where that is not `PAYS` times as many as without."""

    def speed(count: int) -> float:
        return tokens_expected(chance, count) / (cost.single_ms + count * cost.position_ms)

    if cost.single_ms <= 0:
        return 0
    best = max(range(most + 1), key=speed)
    return best if speed(best) >= PAYS * speed(0) else 0


@dataclass(slots=True)
class _Worth:
    """How often drafts were right, the newest counting most."""

    right: float = PRIOR
    drafts: float = 1.0

    @property
    def chance(self) -> float:
        return min(SURE, self.right / self.drafts)

    def add(self, right: int, wrong: bool) -> None:
        for hit in (*(1.0,) * right, *((0.0,) if wrong else ())):
            self.right = FADES * self.right + hit
            self.drafts = FADES * self.drafts + 1.0


@dataclass(slots=True)
class _Costs:
    """What steps took, as `StepCost` needs it."""

    single_ms: float | None = None
    position_ms: float | None = None
    forward_ms: float = 0.0
    singles: int = 0  # steps with one position since there was one with several

    def single(self, took_ms: float, forward_ms: float) -> None:
        self.single_ms = _mean(self.single_ms, took_ms)
        self.forward_ms = _mean(self.forward_ms or None, forward_ms)
        self.singles += 1
        if self.position_ms is not None:
            self.position_ms += FORGETS * (POSITION_SHARE * self.forward_ms - self.position_ms)

    @property
    def uncertain(self) -> bool:
        """Whether what a further position takes is little more than a guess."""
        return self.position_ms is None or self.singles > LONG_AGO

    def several(self, took_ms: float, further: int) -> None:
        self.singles = 0
        if self.single_ms is not None:
            # One long pause must not count for more than a step of its own for each position.
            each = min(max(0.0, took_ms - self.single_ms) / further, self.single_ms)
            self.position_ms = _mean(self.position_ms, each)

    def told(self) -> StepCost | None:
        if self.single_ms is None:
            return None
        position_ms = POSITION_SHARE * self.forward_ms if self.position_ms is None else self.position_ms
        return StepCost(self.single_ms, position_ms)


class Drafter(Protocol):
    """Makes drafts for one text; `meshnet_gateway.ngram_drafter.NgramDrafter` is one."""

    def __len__(self) -> int: ...

    def extend(self, tokens: Iterable[int]) -> None: ...

    def catch_up(self) -> None: ...

    def draft(self, most: int, stop_ids: frozenset[int]) -> Draft: ...


@dataclass(slots=True)
class Speculation:
    """One generation's. It is told every step's outcome, and asked for the next one's drafts.

    Attributes:
        choice: whether, and how many at most.
        stop_ids: tokens that end the answer.
        drafter: makes the drafts; it has seen nothing yet.
        drafted, accepted: tokens sent as drafts so far, and those of them that were right.
    """

    choice: Speculate
    stop_ids: frozenset[int] = frozenset()
    drafter: Drafter = field(default_factory=NgramDrafter)
    drafted: int = 0
    accepted: int = 0
    _draft: Draft = NO_DRAFT
    _costs: _Costs = field(default_factory=_Costs)
    _worth: dict[int, _Worth] = field(default_factory=lambda: {length: _Worth() for length in range(LONGEST + 1)})

    def sees(self, tokens: Sequence[int]) -> None:
        """Look at some of the text so far: for the time before the first step, when there is nothing to wait for."""
        if self.choice.most:
            self.drafter.extend(tokens[len(self.drafter) :])
            self.drafter.catch_up()

    def drafts(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """What the next step is to carry behind ``tokens``, prompt and answer so far, which only grow from call to
        call; at most ``most`` tokens."""
        if not self.choice.most:
            return ()
        self.drafter.extend(tokens[len(self.drafter) :])
        self._draft = self.drafter.draft(self.choice.most, self.stop_ids)
        most = min(most, self.choice.most, len(self._draft.tokens))
        if self.choice.always or most < 1:
            return self._draft.tokens[: max(0, most)]
        if (cost := self._costs.told()) is None:
            return ()
        if self._costs.uncertain:
            most = min(most, TRIAL)
        return self._draft.tokens[: drafts_that_pay(self._worth[self._draft.matched].chance, most, cost)]

    def came(self, reply: FrameReply, took_ms: float, *, positions: int, drafted: int) -> None:
        """A step with so many positions, ``drafted`` of them drafts, took so long and was answered by ``reply``."""
        ids = [token.id for token in reply.tokens]
        right = _in_common(self._draft.tokens, ids)
        if self._draft.tokens:
            self._worth[self._draft.matched].add(right, wrong=right < min(len(ids), len(self._draft.tokens)))
        self._draft = NO_DRAFT
        self.drafted += drafted
        self.accepted += min(drafted, len(ids) - 1)
        if positions == 1:
            self._costs.single(took_ms, sum(timing.forward_ms for timing in reply.timings))
        else:
            self._costs.several(took_ms, positions - 1)

    def failed(self, failure: MeshnetError) -> None:
        """A step failed. Where room ran out, what hops keep to fall back may be what there was no room for."""
        if isinstance(failure, CacheFullError) or (
            isinstance(failure, CacheMissError) and failure.reason is MissReason.EVICTED
        ):
            self.choice = OFF


def _in_common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + NEWEST * (newest - before)
