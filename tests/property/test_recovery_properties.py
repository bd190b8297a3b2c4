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
    RePrefill,
    Reroute,
    Retry,
    Stateless,
    next_action,
)
from meshnet_gateway.waiting_room import NoRoomError

FINAL = (TooLargeError, UnauthorizedError, RequestRefusedError)
MAX_TRIES = (MAX_ATTEMPTS + 1) * (1 + MAX_RETRIES + BUSY_RETRIES)

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
scripts = st.lists(st.tuples(transient, nodes, st.booleans()), min_size=1, max_size=8)


@dataclass
class Loop:
    """The generation loop's side: carries out decisions, and checks each."""

    history: History
    tries: int = 0
    waited_s: float = 0.0
    actions: list[Action] = field(default_factory=list)
    seen: list[MeshnetError] = field(default_factory=list)

    def fail(self, failure: MeshnetError, node_id: str | None, busy: bool) -> Action:
        self.tries += 1
        self.seen.append(failure)
        history = replace(self.history, failing_s=self.waited_s)
        action = next_action(failure, node_id, history)
        if isinstance(action, Probe):
            assert node_id is not None
            action = next_action(failure, node_id, replace(history, busy=busy))
            assert not isinstance(action, Probe)
        self._check(action, failure, node_id)
        self.actions.append(action)
        if isinstance(action, Retry):
            self.history = replace(self.history, retries=self.history.retries + 1)
            return action
        self.history = replace(self.history, failures=(*self.history.failures, failure), retries=0)
        if isinstance(action, Reroute):
            self.history = replace(self.history, excluded=action.excluded)
        if isinstance(action, Stateless):
            self.history = replace(self.history, stateless=True)
        return action

    def _check(self, action: Action, failure: MeshnetError, node_id: str | None) -> None:
        match action:
            case Retry(wait_s):
                assert isinstance(failure, HopUnreachableError | DeadlineError | BadFrameError)
            case RePrefill(wait_s):
                pass
            case Reroute(excluded, wait_s):
                assert excluded <= self.history.excluded | {node_id}
                if not isinstance(failure, LayersUnavailableError | TrackerUnreachableError):
                    assert self.history.excluded <= excluded
            case Fail(error):
                assert any(error is past for past in self.seen)
                return
            case _:
                return
        assert 0 <= wait_s <= MAX_BACKOFF_S
        self.waited_s += wait_s


@given(scripts, st.booleans())
def test_whatever_fails_without_end_ends(script: list[tuple[MeshnetError, str | None, bool]], stateless: bool) -> None:
    loop = Loop(History(stateless=stateless))
    for failure, node_id, busy in itertools.cycle(script):
        if isinstance(loop.fail(failure, node_id, busy), Fail):
            break
        assert loop.tries <= MAX_TRIES
    assert loop.waited_s <= MAX_TRIES * MAX_BACKOFF_S


@given(scripts, any_failure)
def test_a_token_in_between_begins_anew(
    script: list[tuple[MeshnetError, str | None, bool]], failure: MeshnetError
) -> None:
    """What was excluded and that no cache is in use stay; the failures before the token are over."""
    loop = Loop(History())
    for past, node_id, busy in script:
        if isinstance(loop.fail(past, node_id, busy), Fail):
            return
    after = History(excluded=loop.history.excluded, stateless=loop.history.stateless)
    first = History(excluded=loop.history.excluded, stateless=loop.history.stateless)
    assert next_action(failure, "a", after) == next_action(failure, "a", first)
    assert not loop.history.stateless or any(isinstance(action, Stateless) for action in loop.actions)


@given(scripts, st.sampled_from(FINAL))
def test_what_would_happen_again_fails_at_once(
    script: list[tuple[MeshnetError, str | None, bool]], kind: type[MeshnetError]
) -> None:
    loop = Loop(History())
    for past, node_id, busy in script:
        if isinstance(loop.fail(past, node_id, busy), Fail):
            return
    failure = kind("m")
    assert loop.fail(failure, "a", busy=True) == Fail(failure)


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
        assert not isinstance(action, Retry | Probe)
