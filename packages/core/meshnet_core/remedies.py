"""What each error means to the person who meets it, and what to do: data beside the tree of :mod:`meshnet_core.errors`.

The reference page of errors is made of this. Knows no error's message: those say what happened in the case at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshnet_core.errors import MissReason


@dataclass(frozen=True)
class Remedy:
    """``when`` an error comes, and the ``remedy``: one or two sentences each."""

    when: str
    remedy: str


REMEDIES: dict[str, Remedy] = {
    "internal": Remedy(
        "something went wrong that no other code names", "Look into the log of the part that said it; report it."
    ),
    "invalid_input": Remedy(
        "an option, a range or a document cannot be right",
        "Change what the message names; it says what would be right.",
    ),
    "unsupported_parameter": Remedy(
        "a field of an API request is wrong or not supported; `param` names it",
        "Leave the field out or change it; `docs/api.md` has every field's fate.",
    ),
    "unsupported_model": Remedy(
        "a model, or a split of it, that would not answer right",
        "Take the split that the message offers, or a family of `docs/families.md`.",
    ),
    "model_not_found": Remedy(
        "no such model on disk, at the hub or in the mesh",
        "Check the name against `/v1/models` or `meshnet status`; start nodes that hold it.",
    ),
    "layers_unavailable": Remedy(
        "no nodes that can share a route cover the layers named",
        "`meshnet status` shows the gap and the fingerprints; start a node with those layers, of the same files.",
    ),
    "tracker_unreachable": Remedy(
        "no tracker answers",
        "Check that `meshnet tracker` runs, that its port (7400) is open, and the address given with `--tracker`.",
    ),
    "registry_unreachable": Remedy(
        "the Redis of several trackers does not answer one of them",
        "Nothing stops meanwhile. Check Redis and the address given with `--registry`.",
    ),
    "unknown_node": Remedy(
        "somebody takes out a node that the tracker does not know",
        "Nothing: it was gone already. Check the node's name.",
    ),
    "directory_full": Remedy(
        "the tracker holds as many nodes as it may", "Stop nodes that are not needed, or make a second mesh."
    ),
    "forbidden": Remedy(
        "this machine may not do that, such as register a node that another machine holds",
        "Give the node a `--name` of its own; or act from the machine that the message names.",
    ),
    "ticket_refused": Remedy(
        "a join ticket is over, used up, changed, or not for this tracker",
        "Make a new one with `meshnet mesh ticket` where the mesh was made, while a tracker runs there.",
    ),
    "rate_limited": Remedy(
        "more requests than one peer may make", "Wait as long as `Retry-After` says; send fewer at once."
    ),
    "bad_frame": Remedy(
        "a frame does not fit what its session was opened with",
        "Report it, with both versions (`meshnet --version`): gateway and node disagree about the protocol.",
    ),
    "bad_grammar": Remedy(
        "the answer cannot be held to the schema or tools that were asked for",
        "Make the schema simpler, or the answer shorter; the message says what was too much.",
    ),
    "unauthorized": Remedy(
        "no API key or a wrong one at a gateway, or no certificate of this mesh elsewhere",
        "Bring the key (`MESHNET_API_KEY`, `--api-key`); on a machine in no mesh, `meshnet join TICKET`.",
    ),
    "cache_miss": Remedy(
        "a node has no usable state for a session; the gateway prefills it again",
        "Nothing. If it is frequent, see the reasons below.",
    ),
    "too_large": Remedy(
        "a request, a frame or a prompt is larger than a part takes",
        "Make it shorter: the message tells the limit, and whether it is the model's or the part's.",
    ),
    "protocol_mismatch": Remedy(
        "two parts share no version of the wire protocol", "Bring them to versions that are not far apart, one by one."
    ),
    "cache_full": Remedy(
        "no room for one more session, now or ever",
        "Try again after `Retry-After`; raise `--cache-bytes` or `--max-sessions`, or add nodes with the same layers.",
    ),
    "hop_failed": Remedy(
        "an exception inside a node, such as memory that ran out",
        "Look into that node's log. Where memory ran out: fewer layers, less `--cache-bytes`, or a smaller `--dtype`.",
    ),
    "hop_unreachable": Remedy(
        "a node does not answer; other nodes with its layers are taken where there are any",
        "Start it again; check its port, and that others reach the address it tells (`--advertise`).",
    ),
    "draining": Remedy(
        "a node is about to stop and takes nothing new", "Nothing: another node is asked, or start one."
    ),
    "deadline": Remedy(
        "a step took longer than it may; the node that hung is routed around",
        "`meshnet nodes` shows who is slow. On slow machines raise `--step-deadline`.",
    ),
}

MISSES: dict[MissReason, Remedy] = {
    MissReason.UNKNOWN_SESSION: Remedy(
        "the node never heard of the session", "Check that two nodes do not share one address."
    ),
    MissReason.EVICTED: Remedy(
        "its room was needed for others", "Raise `--cache-bytes`, or add nodes with these layers."
    ),
    MissReason.EXPIRED: Remedy("it was unused for longer than `--session-ttl`", "Raise `--session-ttl`."),
    MissReason.RESTARTED: Remedy("the node was started anew", "Look into the node's log for why it ended."),
    MissReason.POSITION_MISMATCH: Remedy("the state ends elsewhere than the frame begins", "Report it."),
    MissReason.RANGE_MISMATCH: Remedy(
        "the node holds other layers by now", "Usual while layers are moved (`--layers auto`)."
    ),
    MissReason.EPOCH_STALE: Remedy(
        "a frame from before a re-prefill", "Usual after broken connections; else report it."
    ),
    MissReason.MODEL_MISMATCH: Remedy("the node holds other contents by now", "Give all nodes the same files."),
    MissReason.RELEASED: Remedy(
        "the session was over already", "Usual when clients leave in mid-answer; else report it."
    ),
    MissReason.FAILED: Remedy("an earlier frame failed half way", "Look into the node's log for the exception."),
}
