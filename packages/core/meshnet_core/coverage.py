"""Which layers of which models the nodes of a snapshot serve, and what is missing and why. Pure; knows no cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from meshnet_core.frames import PROTOCOLS
from meshnet_core.layer_range import LayerRange

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshnet_core.membership import NodeInfo, ShardInfo, Snapshot

_NAMED = 8  # gaps, holders or models that one error message names


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One model, with one fingerprint, as the nodes of a snapshot serve it to new sessions.

    Attributes:
        name, fingerprint, num_layers, hidden_size: which model.
        max_positions: the least that any of its shards tells.
        complete: whether a route exists.
        missing: the layers that no usable shard holds; empty exactly where ``complete``.
        dtypes: what its shards compute in, sorted.
    """

    name: str
    fingerprint: str
    num_layers: int
    hidden_size: int
    max_positions: int
    complete: bool
    missing: tuple[LayerRange, ...]
    dtypes: tuple[str, ...]


class Offer(NamedTuple):
    """A shard and the node that holds it."""

    node: NodeInfo
    shard: ShardInfo


class VariantKey(NamedTuple):
    """What shards must have in common to share a route."""

    name: str
    fingerprint: str
    num_layers: int
    hidden_size: int

    def __str__(self) -> str:
        return f"fingerprint {self.fingerprint[:12]}, {self.num_layers} layers of width {self.hidden_size}"


@dataclass(frozen=True, slots=True)
class Variant:
    """All shards that may share a route."""

    key: VariantKey
    offers: list[Offer] = field(default_factory=list)

    def usable(self, excluded: frozenset[str], protocol: int) -> list[Offer]:
        """The offers that a new session speaking ``protocol`` may be sent to."""
        return [offer for offer in self.offers if _hindrance(offer.node, excluded, protocol) is None]

    def best_protocol(self, excluded: frozenset[str], protocols: range) -> tuple[int, list[LayerRange]]:
        """The protocol whose speakers leave out the fewest layers, and those layers; the newest of equals."""
        found = [
            (protocol, missing_layers(self.usable(excluded, protocol), self.key.num_layers)) for protocol in protocols
        ]
        return min(found, key=lambda choice: (_size(choice[1]), -choice[0]))


def variants_of(snapshot: Snapshot) -> list[Variant]:
    """The shards of a snapshot by what they must have in common, sorted by name and fingerprint."""
    grouped: dict[VariantKey, Variant] = {}
    for node in snapshot.nodes:
        for shard in node.shards:
            key = VariantKey(shard.model, shard.fingerprint, shard.num_layers, shard.hidden_size)
            if key not in grouped:
                grouped[key] = Variant(key)
            grouped[key].offers.append(Offer(node, shard))
    return [grouped[key] for key in sorted(grouped)]


def served_models(snapshot: Snapshot, *, protocols: range = PROTOCOLS) -> list[ModelSummary]:
    """Every model of the snapshot, one entry for each fingerprint, sorted by name and fingerprint.

    ``complete`` says what `planning.plan_route` would find with no node excluded.
    """
    summaries = []
    for variant in variants_of(snapshot):
        _, missing = variant.best_protocol(frozenset(), protocols)
        summaries.append(
            ModelSummary(
                name=variant.key.name,
                fingerprint=variant.key.fingerprint,
                num_layers=variant.key.num_layers,
                hidden_size=variant.key.hidden_size,
                max_positions=min(shard.max_positions for _, shard in variant.offers),
                complete=not missing,
                missing=tuple(missing),
                dtypes=tuple(sorted({shard.dtype for _, shard in variant.offers})),
            )
        )
    return summaries


def missing_layers(offers: Iterable[Offer], num_layers: int) -> list[LayerRange]:
    """The layers of ``[0, num_layers)`` that none of the offers holds, in order."""
    gaps, at = [], 0
    for layers in sorted(offer.shard.layers for offer in offers):
        if layers.start > at:
            gaps.append(LayerRange(at, layers.start))
        at = max(at, layers.stop)
    if at < num_layers:
        gaps.append(LayerRange(at, num_layers))
    return gaps


def may_follow(node: NodeInfo, other: NodeInfo) -> bool:
    """Whether a hop on some shard of ``node`` may hand on to one of ``other``: that holds the layer after its last."""
    return any(
        (theirs.model, theirs.fingerprint) == (ours.model, ours.fingerprint) and ours.layers.stop in theirs.layers
        for ours in node.shards
        for theirs in other.shards
    )


def left_out(
    served: Iterable[Variant], key: VariantKey, excluded: frozenset[str], protocol: int
) -> list[tuple[Offer, str]]:
    """The offers that a route of the variant ``key`` cannot go through, each with the reason."""
    found = []
    for variant in served:
        for offer in variant.offers:
            why = _hindrance(offer.node, excluded, protocol) if variant.key == key else f"is of {variant.key}"
            if why is not None:
                found.append((offer, why))
    return found


def explain_gaps(
    served: list[Variant], wanted: list[Variant], excluded: frozenset[str] = frozenset(), protocols: range = PROTOCOLS
) -> str:
    """What is missing, and who holds it in vain, for the one of ``wanted`` that comes closest to being whole.

    Args:
        served: all variants under the model's name; the shards of the others count as held in vain.
        wanted: those of them that would do; not empty, and none of them whole.
        excluded: ids of nodes that were left out.
        protocols: the wire protocols that would do.
    """
    found = [(variant, *variant.best_protocol(excluded, protocols)) for variant in wanted]
    variant, protocol, missing = min(found, key=lambda choice: (_size(choice[2]), choice[0].key))
    sentences = []
    for gap in missing[:_NAMED]:
        in_vain = [
            f"{node.node_id} holds {shard.layers} but "
            + (str(_hindrance(node, excluded, protocol)) if other is variant else f"of {other.key}, not {variant.key}")
            for other in served
            for node, shard in other.offers
            if shard.layers.start < gap.stop and gap.start < shard.layers.stop
        ]
        subject = f"layer {gap.start}" if len(gap) == 1 else f"layers {gap}"
        verb = "is" if len(gap) == 1 else "are"
        tail = f" that can be used: {listed(in_vain)}" if in_vain else ""
        sentences.append(f"{subject} of {variant.key.name} {verb} served by no node{tail}")
    if len(missing) > _NAMED:
        sentences.append(f"and {len(missing) - _NAMED} more gaps")
    return "; ".join(sentences)


def listed(items: Iterable[str]) -> str:
    """The first few for a message, and how many more there are."""
    iterator = iter(items)
    named = list(islice(iterator, _NAMED))
    more = sum(1 for _ in iterator)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _hindrance(node: NodeInfo, excluded: frozenset[str], protocol: int) -> str | None:
    """Why new sessions of this protocol cannot go to the node; None where they can."""
    if node.node_id in excluded:
        return "is excluded"
    if node.draining:
        return "is draining"
    if not node.protocol_min <= protocol <= node.protocol_max:
        return f"speaks wire protocol {node.protocol_min}-{node.protocol_max}, not {protocol}"
    return None


def _size(gaps: list[LayerRange]) -> int:
    return sum(len(gap) for gap in gaps)
