"""What happened in one generation, for people and for benchmarks: the `meshnet` object of an answer."""

from __future__ import annotations

from typing import Any

from meshnet_core.clock import Clock
from meshnet_core.dtypes import TOKEN_ID_BYTES
from meshnet_core.errors import CacheMissError, MeshnetError
from meshnet_core.frames import FrameReply
from meshnet_core.route import Route

WINDOW = 50  # tokens; speed is told per window, so that a decay shows
MAX_EVENTS = 32


class GenerationReport:
    """Collects while the generation runs; `to_json` can be asked at any time."""

    def __init__(self, session: str, prompt_tokens: int, clock: Clock, *, exact: bool = False) -> None:
        self._session = session
        self._prompt_tokens = prompt_tokens
        self._clock = clock
        self._began = clock.now()
        self._token_times: list[float] = []
        self._route: Route | None = None
        self._epochs = 0
        self._cached = True
        self._stateless_tokens = 0
        self._events: list[dict[str, Any]] = []
        self._last_reply: FrameReply | None = None
        self._waited_s = 0.0
        self._drafted = self._accepted = 0
        self._exact = exact

    def epoch_began(self, route: Route, *, cached: bool) -> None:
        """All hops of a route have room for a new epoch."""
        self._route = route
        self._epochs += 1
        self._cached = cached
        self._last_reply = None

    def failed(self, failure: MeshnetError, action: str, node_id: str | None = None) -> None:
        """A failure happened, at this node where one is to blame, and this was done about it."""
        if len(self._events) < MAX_EVENTS:
            event: dict[str, Any] = {"after_tokens": len(self._token_times), "error": failure.code, "action": action}
            if isinstance(failure, CacheMissError):
                event["reason"] = failure.reason.value
            if node_id is not None:
                event["node"] = node_id
            self._events.append(event)

    def waited(self, seconds: float) -> None:
        """It took this long until nodes had room; 0.0 where they had it at once."""
        self._waited_s += seconds

    def speculated(self, drafted: int, accepted: int) -> None:
        """So many tokens were drafted up to now, and so many of them were right."""
        self._drafted, self._accepted = drafted, accepted

    def token(self) -> None:
        """A step gave a token of the answer."""
        self._token_times.append(self._clock.now())
        self._stateless_tokens += not self._cached

    def stepped(self, reply: FrameReply) -> None:
        """A step that carried no drafts, and no prefill, was answered."""
        self._last_reply = reply

    def to_json(self) -> dict[str, Any]:
        times = self._token_times
        report: dict[str, Any] = {
            "session": self._session,
            "mode": self._mode(),
            "epochs": self._epochs,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": len(times),
            "route": [
                {"node": hop.node_id, "layers": str(hop.layers), "dtype": hop.dtype, "version": hop.version}
                for hop in (self._route.hops if self._route else ())
            ],
            "recoveries": self._events,
        }
        if self._exact:
            report["recovery"] = "exact"
        if self._stateless_tokens:
            report["stateless_tokens"] = self._stateless_tokens
        if self._drafted:
            report["drafted_tokens"], report["accepted_tokens"] = self._drafted, self._accepted
        if waited_s := round(self._waited_s, 3):
            report["waited_s"] = waited_s
        if times:
            report["ttft_s"] = round(times[0] - self._began, 4)
        if len(times) > 1:
            report["tokens_per_s"] = _rate(times)
            report["tokens_per_s_first_50"] = _rate(times[: WINDOW + 1])
            report["tokens_per_s_last_50"] = _rate(times[-WINDOW - 1 :])
            report["tokens_per_s_by_50"] = [
                _rate(times[at : at + WINDOW + 1])
                for at in range(0, len(times) - 1, WINDOW)
                if at + WINDOW < len(times)
            ]
        if self._last_reply is not None:
            # Body bytes into each hop in that step: a token id into the first, hidden states into the others.
            sent = [timing.sent_bytes for timing in self._last_reply.timings[:-1]]
            first = TOKEN_ID_BYTES * (1 if self._cached else self._prompt_tokens + len(times) - 1)
            report["bytes_per_step"] = [first, *sent]
        return report

    def _mode(self) -> str:
        """How the newest token came; ``mixed`` where some came without state before there was a cache again."""
        if not self._cached:
            return "stateless"
        return "mixed" if self._stateless_tokens else "cached"


def _rate(times: list[float]) -> float:
    return round((len(times) - 1) / max(times[-1] - times[0], 1e-9), 2)
