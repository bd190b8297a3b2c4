"""Whatever fails, in whatever order: what follows ends, waits within bounds, and blames only who may be to blame.

The loop here does with the decisions what the generation loop does with them, without any mesh.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from meshnet_core.errors import (
    BadFrameError,
    CacheFullError,
    CacheMissError,
    DeadlineError,
    DrainingError,
    HopFailedError,
    HopUnreachableError,
    LayersUnavailableError,
    MeshnetError,
    MissReason,
    ModelNotFoundError,
    ProtocolMismatchError,
    RequestRefusedError,
    TooLargeError,
    TrackerUnreachableError,
    UnauthorizedError,
)
from meshnet_gateway.recovery import (
    BUSY_RETRIES,
    MAX_ATTEMPTS,
    MAX_BACKOFF_S,
    MAX_RETRIES,
    Action,
    Fail,
    History,
    Probe,
    Probed,
    RePrefill,
    Reroute,
    Retry,
    Stateless,
    next_action,
)
from meshnet_gateway.waiting_room import NoRoomError

FINAL = (TooLargeError, UnauthorizedError, RequestRefusedError)
PATIENCE_S = 60.0
# While layers lack, what follows is bounded by time; every other attempt or so waits for the longest backoff.
MAX_TRIES = (MAX_ATTEMPTS + 1 + 8 * round(PATIENCE_S / MAX_BACKOFF_S)) * (1 + MAX_RETRIES + BUSY_RETRIES)

transient = st.one_of(
    st.sampled_from(list(MissReason)).map(lambda reason: CacheMissError("m", reason=reason)),
    st.booleans().map(lambda never: CacheFullError("m", never=never)),
    st.sampled_from(
        [
            BadFrameError,
            HopUnreachableError,
            DeadlineError,
            DrainingError,
            ProtocolMismatchError,
            HopFailedError,
            LayersUnavailableError,
            TrackerUnreachableError,
        ]
    ).map(lambda kind: kind("m")),
)
any_failure = transient | st.sampled_from([*FINAL, ModelNotFoundError, NoRoomError]).map(lambda kind: kind("m"))
nodes = st.none() | st.sampled_from("abc")
Event = tuple[MeshnetError, str | None, Probed, str | None]
scripts = st.lists(
    st.tuples(transient, nodes, st.sampled_from(Probed), st.none() | st.sampled_from("xyz")), min_size=1, max_size=8
)


@dataclass
class Loop:
    """The generation loop's side: carries out decisions, and checks each."""

    history: History
    tries: int = 0
    waited_s: float = 0.0
    lacking_since: float | None = None
    actions: list[Action] = field(default_factory=list)
    seen: list[MeshnetError] = field(default_factory=list)

    def fail(self, failure: MeshnetError, node_id: str | None, probed: Probed, reporter: str | None = None) -> Action:
        self.tries += 1
        self.seen.append(failure)
        if isinstance(failure, LayersUnavailableError | TrackerUnreachableError) and self.lacking_since is None:
            self.lacking_since = self.waited_s
        lacking_s = None if self.lacking_since is None else self.waited_s - self.lacking_since
        history = replace(self.history, lacking_s=lacking_s)
        action = next_action(failure, node_id, history, reporter)
        if isinstance(action, Probe):
            assert node_id is not None
            action = next_action(failure, node_id, replace(history, probed=probed), reporter)
            assert not isinstance(action, Probe)
        self._check(action, failure, node_id, probed, reporter)
        self.actions.append(action)
        if isinstance(action, Retry):
            self.history = replace(self.history, retries=self.history.retries + 1)
            return action
        self.history = replace(self.history, failures=(*self.history.failures, failure), retries=0)
        if isinstance(action, Reroute):
            doubts = self.history.doubts | ({action.doubt} if action.doubt is not None else frozenset())
            self.history = replace(self.history, excluded=action.excluded, doubts=doubts)
        if isinstance(action, Stateless):
            self.history = replace(self.history, stateless=True)
        return action

    def _check(
        self, action: Action, failure: MeshnetError, node_id: str | None, probed: Probed, reporter: str | None
    ) -> None:
        match action:
            case Retry(wait_s):
                assert isinstance(failure, HopUnreachableError | DeadlineError | BadFrameError)
            case RePrefill(wait_s):
                pass
            case Reroute(excluded, wait_s, blamed, _):
                assert excluded <= self.history.excluded | {node_id, reporter}
                if blamed is not None and blamed == reporter != node_id:  # whom it reported is let in again
                    assert any(other == reporter for other, _ in self.history.doubts)
                elif not isinstance(failure, LayersUnavailableError | TrackerUnreachableError):
                    assert self.history.excluded <= excluded
                assert blamed is None or blamed in excluded
                if isinstance(failure, HopUnreachableError | DeadlineError) and probed is not Probed.GONE:
                    assert blamed is None or blamed == reporter
            case Fail(error):
                assert any(error is past for past in self.seen)
                return
            case _:
                return
        assert 0 <= wait_s <= MAX_BACKOFF_S
        self.waited_s += wait_s


@given(scripts, st.booleans())
def test_whatever_fails_without_end_ends(script: list[Event], stateless: bool) -> None:
    loop = Loop(History(stateless=stateless))
    for failure, node_id, probed, reporter in itertools.cycle(script):
        if isinstance(loop.fail(failure, node_id, probed, reporter), Fail):
            break
        assert loop.tries <= MAX_TRIES
    assert loop.waited_s <= MAX_TRIES * MAX_BACKOFF_S


@given(scripts, any_failure)
def test_a_token_in_between_begins_anew(script: list[Event], failure: MeshnetError) -> None:
    """What was excluded and that no cache is in use stay; the failures before the token are over."""
    loop = Loop(History())
    for past, node_id, probed, reporter in script:
        if isinstance(loop.fail(past, node_id, probed, reporter), Fail):
            return
    after = History(excluded=loop.history.excluded, stateless=loop.history.stateless)
    first = History(excluded=loop.history.excluded, stateless=loop.history.stateless)
    assert next_action(failure, "a", after) == next_action(failure, "a", first)
    assert not loop.history.stateless or any(isinstance(action, Stateless) for action in loop.actions)


@given(scripts, st.sampled_from(FINAL))
def test_what_would_happen_again_fails_at_once(script: list[Event], kind: type[MeshnetError]) -> None:
    loop = Loop(History())
    for past, node_id, probed, reporter in script:
        if isinstance(loop.fail(past, node_id, probed, reporter), Fail):
            return
    failure = kind("m")
    assert loop.fail(failure, "a", Probed.BUSY) == Fail(failure)


@given(any_failure, nodes, st.booleans(), st.integers(0, 20), st.integers(0, MAX_ATTEMPTS + 3))
def test_a_decision_is_a_function_of_what_it_is_given(
    failure: MeshnetError, node_id: str | None, stateless: bool, retries: int, past: int
) -> None:
    history = History(failures=(failure,) * past, retries=retries, stateless=stateless)
    action = next_action(failure, node_id, history)
    assert action == next_action(failure, node_id, history)
    if past >= MAX_ATTEMPTS:
        assert isinstance(action, Fail)
    if retries >= MAX_RETRIES + BUSY_RETRIES:
        assert not isinstance(action, Retry)
