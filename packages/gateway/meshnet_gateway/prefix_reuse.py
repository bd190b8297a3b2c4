"""What one generation takes from prefixes that hops hold, and what it leaves to others. Pure but for its own memory.

    tokens   [ system prompt | question 1 | answer 1 | question 2 ]
    marks        |    |      ^     |      ^     |    ^  |         ^     at every block, and where other states may end

Where earlier turns ended is read off the tokens: every answer ends in a stop token, so states were left just before
one, or one position earlier where an answer was cut off by its length. Knows no hops and sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshnet_core.open_document import OpenReply
from meshnet_core.prefix import EVERYONE, Mark, PrefixTerms, marks_of
from meshnet_core.route import Route
from meshnet_gateway.prefix_memory import PrefixMemory, Whose

BLOCK = 32  # positions: what a partial match loses at most, against the length of an open document
MAX_ENDS = 512  # stop tokens that are looked at, the last ones


@dataclass(frozen=True, slots=True)
class PrefixWish:
    """That a request may use prefixes, and leave its own.

    Attributes:
        scope: whose they are; different scopes share nothing.
        keep_at: positions of the prompt that others may begin with: the end of the system prompt, of the question.
        look_at: positions at which earlier requests may have kept something, as these do.
    """

    scope: str = EVERYONE
    keep_at: tuple[int, ...] = ()
    look_at: tuple[int, ...] = ()


def longest_shared(held: Iterable[Sequence[int]], length: int) -> int:
    """The farthest position at which every hop could begin a prefill of ``length`` positions; 0 where there is none.

    At least the last position is left to run, since somebody has to sample after it.
    """
    shared = set.intersection(*(set(positions) for positions in held))
    return max((position for position in shared if 0 < position < length), default=0)


class PrefixReuse:
    """One generation's.

    Args:
        wish: what the request allows; None for neither.
        prompt: its token ids.
        stop_ids: tokens that end answers.
        exact: state is to be the same bits as without prefixes, so none is used; see ADR-0017.
        memory: of the nodes that hold some; it learns from this one.

    Attributes:
        begin: position at which the newest epoch begins.
        cuts: positions at which its prefill must end a frame.
        cached_tokens: of the prompt, how many were not computed for this answer; 0 before its first token.
    """

    def __init__(
        self,
        wish: PrefixWish | None,
        prompt: Sequence[int],
        stop_ids: frozenset[int],
        *,
        exact: bool,
        memory: PrefixMemory,
    ) -> None:
        self.begin = 0
        self.cuts: tuple[int, ...] = ()
        self.cached_tokens = 0
        self._wish = wish
        self._prompt_length = len(prompt)
        self._stop_ids = stop_ids
        self._exact = exact
        self._memory = memory
        self._terms: PrefixTerms | None = None  # of the newest epoch
        self._route: Route | None = None  # that the newest epoch is open on
        self._snapshots = False  # some hop of it cannot cut its state back
        self._filled = 0  # positions that the newest epoch prefills
        self._untried = True  # no token came yet
        self._in_doubt = False  # an epoch began on a prefix, and gave no token yet

    def terms(self, tokens: Sequence[int], *, cached: bool) -> PrefixTerms | None:
        """What hops are told at open of an epoch that prefills ``tokens``, prompt and answer so far.

        None for an epoch without state, ``cached`` false, and where the request wants no prefixes.
        """
        self.begin, self.cuts, self._filled, self._terms, self._route = 0, (), len(tokens), None, None
        if self._wish is None or not cached:
            return None
        marks = self._marks(self._wish, tokens)
        marked = {mark.position for mark in marks}
        keep_at = tuple(sorted(marked.intersection(self._wish.keep_at)))
        self._terms = PrefixTerms(self._wish.scope, marks, keep_at)
        return self._terms

    def held(self, fingerprint: str, tokens: Sequence[int]) -> dict[str, int]:
        """How many positions of ``tokens`` nodes are thought to hold, by node id; nothing where none may be used."""
        if self._wish is None or self._exact or self._in_doubt:
            return {}
        return self._memory.held(Whose(self._wish.scope, fingerprint), self._marks(self._wish, tokens))

    def agree(self, route: Route, replies: Sequence[OpenReply]) -> None:
        """Settle where the epoch begins, and how it is cut, by what all hops of ``route`` told at open."""
        if self._wish is None or self._terms is None:
            return
        whose = Whose(self._wish.scope, route.fingerprint)
        for hop, reply in zip(route.hops, replies, strict=True):
            self._memory.correct(whose, self._terms.marks, hop.node_id, reply.held)
        self._route = route
        self._snapshots = any(reply.snapshots for reply in replies)
        if self._exact:
            return
        if not self._in_doubt:  # what went wrong once may go wrong again: then from the start
            self.begin = longest_shared((reply.held for reply in replies), self._filled)
            self._in_doubt = self.begin > 0
        if self._snapshots:
            self.cuts = self._wish.keep_at

    def become(self, other: PrefixReuse) -> None:
        """Be as ``other``, a copy made before: the epoch that terms were for did not come to be."""
        vars(self).update(vars(other))

    def proven(self) -> None:
        """A token came: what the epoch began on was right."""
        if self._untried:
            self.cached_tokens = min(self.begin, self._prompt_length)
        self._untried = self._in_doubt = False

    def left(self, tokens: Sequence[int]) -> tuple[Mark, ...]:
        """Marks under which the hops of the newest epoch may hold on the state of ``tokens``; () where they may not."""
        if self._wish is None or self._terms is None or (route := self._route) is None:
            return ()
        ends = {len(tokens) - 1, len(tokens)}  # the last token may not have been run
        left = marks_of(tokens, {*_blocks(self._filled, len(tokens)), *ends})
        there = (*self._terms.marks, *left)
        if self._snapshots:
            there = tuple(mark for mark in there if mark.position in {*self._terms.keep_at, *ends})
        nodes = list(dict.fromkeys(hop.node_id for hop in route.hops))
        self._memory.learn(Whose(self._wish.scope, route.fingerprint), there, nodes)
        return left

    def _marks(self, wish: PrefixWish, tokens: Sequence[int]) -> tuple[Mark, ...]:
        at = {*_blocks(0, len(tokens)), *_ends(tokens, self._stop_ids), *wish.keep_at, *wish.look_at, len(tokens)}
        return marks_of(tokens, at)


def _blocks(start: int, stop: int) -> range:
    return range(start - start % BLOCK + BLOCK, stop + 1, BLOCK)


def _ends(tokens: Sequence[int], stop_ids: frozenset[int]) -> set[int]:
    ends = [at for at, token in enumerate(tokens) if token in stop_ids][-MAX_ENDS:]
    return {position for at in ends for position in (at - 1, at)}
