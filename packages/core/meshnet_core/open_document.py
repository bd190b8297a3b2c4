"""What a hop is told once, when a session opens, so that frames can be little."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

from meshnet_core.dtypes import dtype_bytes
from meshnet_core.errors import InvalidInputError
from meshnet_core.grammar import Grammar
from meshnet_core.ids import check_id
from meshnet_core.prefix import PrefixTerms
from meshnet_core.route import Hop, Route
from meshnet_core.sampling import SamplingParams
from meshnet_core.wire_fields import flag, text, whole


@dataclass(frozen=True, slots=True)
class OpenDocument:
    """One session's terms for one hop.

    Attributes:
        session, epoch: which generation, which re-prefill of it.
        hop_index: which hop of ``route`` is addressed.
        route: the whole route; each hop forwards to the next.
        wire_dtype: dtype of the hidden states between hops.
        hidden_size: width of the hidden states.
        cache: False opens the stateless path: no room is taken, every frame is a whole sequence.
        sampling: how the tail chooses tokens.
        prompt_length: positions of the prompt; what follows them is the answer.
        prefill_length: positions prefilled in this epoch: the prompt and, after a lost state, the answer so far.
        expected_length: positions the session may come to hold, prompt included.
        step_deadline_ms: time for one step, all hops together.
        history: prompt and answer token ids so far; given to the tail alone, since only it samples.
        prefix: what of the prefill may be taken from what hops hold, and is to be held; None for neither.
        grammar: what the answer is held to; given to the tail alone; None leaves it free.
        exact: every frame runs alone and in one piece, so that the same frames give the same bits whatever else a hop
            is asked for meanwhile.
    """

    session: str
    epoch: int
    hop_index: int
    route: Route
    wire_dtype: str
    hidden_size: int
    cache: bool
    sampling: SamplingParams
    prompt_length: int
    prefill_length: int
    expected_length: int
    step_deadline_ms: int
    history: tuple[int, ...] = ()
    prefix: PrefixTerms | None = None
    grammar: Grammar | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        check_id(self.session, "session")
        dtype_bytes(self.wire_dtype)
        if not 0 <= self.hop_index < len(self.route.hops):
            raise InvalidInputError(f"hop index {self.hop_index} lies outside a route of {len(self.route.hops)} hops")
        if self.epoch < 0 or self.prompt_length < 1 or self.hidden_size < 1 or self.step_deadline_ms < 1:
            raise InvalidInputError("epoch must be >= 0; prompt_length, hidden_size and step_deadline_ms >= 1")
        if not self.prompt_length <= self.prefill_length <= self.expected_length:
            raise InvalidInputError(
                f"prompt_length {self.prompt_length}, prefill_length {self.prefill_length} and expected_length "
                f"{self.expected_length} must not fall: what is prefilled holds the prompt, and fits"
            )
        if self.prefix is not None and not self.cache:
            raise InvalidInputError("with the cache off no prefix is used or held; leave it out")
        if self.prefix is not None and self.prefix.marks and self.prefix.marks[-1].position > self.prefill_length:
            raise InvalidInputError(
                f"the prefix has a mark at {self.prefix.marks[-1].position}, beyond the {self.prefill_length} "
                "positions to prefill"
            )

    @property
    def hop(self) -> Hop:
        return self.route.hops[self.hop_index]

    @property
    def next_hop(self) -> Hop | None:
        """The hop that frames are forwarded to; None at the tail."""
        after = self.hop_index + 1
        return self.route.hops[after] if after < len(self.route.hops) else None

    def for_hop(self, hop_index: int) -> OpenDocument:
        """The same terms as another hop is to be told them; what only sampling needs goes to the tail alone."""
        if hop_index == len(self.route.hops) - 1:
            return replace(self, hop_index=hop_index)
        return replace(self, hop_index=hop_index, history=(), grammar=None)

    def to_wire(self) -> dict[str, Any]:
        return {
            "session": self.session,
            "epoch": self.epoch,
            "hop_index": self.hop_index,
            "route": self.route.to_wire(),
            "wire_dtype": self.wire_dtype,
            "hidden_size": self.hidden_size,
            "cache": self.cache,
            "sampling": self.sampling.to_wire(),
            "prompt_length": self.prompt_length,
            "prefill_length": self.prefill_length,
            "expected_length": self.expected_length,
            "step_deadline_ms": self.step_deadline_ms,
            "history": list(self.history),
            **({} if self.prefix is None else {"prefix": self.prefix.to_wire()}),
            **({} if self.grammar is None else {"grammar": self.grammar.to_wire()}),
            **({"exact": True} if self.exact else {}),
        }

    @classmethod
    def from_wire(cls, document: object) -> OpenDocument:
        """Read :meth:`to_wire`'s form.

        Raises:
            InvalidInputError: on a missing, ill-typed or unknown field.
        """
        if not isinstance(document, dict):
            raise InvalidInputError(f"an open document is a JSON object, not {type(document).__name__}")
        unknown = set(document) - set(cls.__dataclass_fields__)
        if unknown:
            raise InvalidInputError(f"unknown fields in the open document: {', '.join(sorted(map(str, unknown)))}")
        try:
            return cls(
                session=text(document, "session"),
                epoch=whole(document, "epoch"),
                hop_index=whole(document, "hop_index"),
                route=Route.from_wire(document["route"]),
                wire_dtype=text(document, "wire_dtype"),
                hidden_size=whole(document, "hidden_size"),
                cache=flag(document, "cache"),
                sampling=SamplingParams.from_wire(document["sampling"]),
                prompt_length=whole(document, "prompt_length"),
                prefill_length=whole(document, "prefill_length"),
                expected_length=whole(document, "expected_length"),
                step_deadline_ms=whole(document, "step_deadline_ms"),
                history=_token_ids(document["history"]),
                prefix=PrefixTerms.from_wire(document["prefix"]) if "prefix" in document else None,
                grammar=Grammar.from_wire(document["grammar"]) if "grammar" in document else None,
                exact=flag(document, "exact") if "exact" in document else False,
            )
        except KeyError as error:
            raise InvalidInputError(f"the field {error.args[0]} is missing") from error


class FallBack(enum.StrEnum):
    """How far a hop's state falls back after a verify frame whose drafts were not all right."""

    ANYWHERE = "anywhere"  # it is cut back to the first draft that was wrong
    BEGIN = "begin"  # only to where the frame began; what was right of it is sent again


@dataclass(frozen=True, slots=True)
class OpenReply:
    """A hop's yes.

    Attributes:
        boot: its boot id.
        reserved_bytes: state that it set aside room for.
        held: positions at which the session could begin here, ascending, by prefixes that are held now. Telling is no
            promise: they may be gone when the first frame comes, which is then answered with a miss.
        snapshots: state here cannot be cut back to an earlier position, so that of a prefix within the prefill a copy
            is kept only where a frame ends at one of the positions in ``keep_at``.
        verify: how state here falls back after a verify frame; None where such frames are not spoken.
    """

    boot: str
    reserved_bytes: int = 0
    held: tuple[int, ...] = ()
    snapshots: bool = False
    verify: FallBack | None = None

    def to_wire(self) -> dict[str, Any]:
        return {
            "boot": self.boot,
            "reserved_bytes": self.reserved_bytes,
            **({"held": list(self.held)} if self.held else {}),
            **({"snapshots": True} if self.snapshots else {}),
            **({} if self.verify is None else {"verify": self.verify.value}),
        }

    @classmethod
    def from_wire(cls, document: dict[str, Any]) -> OpenReply:
        held = tuple(int(position) for position in document.get("held", ()))
        snapshots, way = bool(document.get("snapshots")), document.get("verify")
        verify = FallBack(way) if way in list(FallBack) else None  # a way of a newer peer's is none that is known here
        return cls(str(document["boot"]), int(document["reserved_bytes"]), held, snapshots, verify)


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """What a node says when asked whether it is alive.

    Attributes:
        boot: its boot id.
        position: positions it holds of the session asked about; None where it holds none.
        queued: frames that wait for its forward lane or run there; more than 0 means busy, not hung.
    """

    boot: str
    position: int | None
    queued: int

    def to_wire(self) -> dict[str, Any]:
        return {"boot": self.boot, "position": self.position, "queued": self.queued}

    @classmethod
    def from_wire(cls, document: dict[str, Any]) -> ProbeReply:
        position = document["position"]
        return cls(str(document["boot"]), None if position is None else int(position), int(document["queued"]))


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise InvalidInputError("history must be a list of token ids, whole numbers all of them")
    return tuple(value)
