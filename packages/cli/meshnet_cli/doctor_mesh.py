"""What `meshnet doctor` makes of the facts about the mesh around this machine. Pure; asks nobody."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from urllib.parse import urlsplit

from meshnet_cli.doctor_facts import Facts
from meshnet_cli.doctor_findings import Check, Level, Objections
from meshnet_core.coverage import served_models
from meshnet_core.frames import PROTOCOL_MAX, PROTOCOL_MIN

SKEW_S = 30.0  # beyond what a slow answer explains


def _trackers(facts: Facts) -> Objections:
    if facts.no_tracker is not None:
        yield Level.NOTE, facts.no_tracker, "name one with --tracker URL, or join a mesh with `meshnet join TICKET`"
    for tracker in facts.trackers:
        if tracker.error is not None:
            yield (
                Level.WRONG,
                f"the tracker at {tracker.url} does not answer: {tracker.error}",
                "start it with `meshnet tracker`, open its port in the firewall, or name another with --tracker",
            )
        elif tracker.registry == "unreachable":
            yield (
                Level.WRONG,
                f"the tracker at {tracker.url} does not reach its Redis, and hears nothing of the other trackers",
                "start that Redis again, or correct the tracker's --registry; until then it goes on alone",
            )


def _trackers_fine(facts: Facts) -> str:
    return f"answering: {', '.join(tracker.url for tracker in facts.trackers)}"


def _clock(facts: Facts) -> Objections:
    for tracker in facts.trackers:
        if tracker.ahead_s is not None and abs(tracker.ahead_s) > SKEW_S:
            side = "ahead of" if tracker.ahead_s > 0 else "behind"
            yield (
                Level.WRONG,
                f"this machine's clock is {abs(tracker.ahead_s):.0f} s {side} that of the tracker at {tracker.url}",
                "set both by NTP (timedatectl set-ntp true): certificates are judged by these clocks",
            )


def _clock_fine(facts: Facts) -> str:
    told = [abs(tracker.ahead_s) for tracker in facts.trackers if tracker.ahead_s is not None]
    return f"within {max(1.0, *told):.0f} s of the trackers'" if told else "no tracker to compare with"


def _reach(facts: Facts) -> Objections:
    nodes = facts.snapshot.nodes if facts.snapshot is not None else ()
    shared = any(not _on_loopback(tracker.url) for tracker in facts.trackers) or any(
        not _on_loopback(node.url) for node in nodes
    )
    for node in nodes:
        if _on_loopback(node.url) and shared:
            yield (
                Level.WRONG,
                f"node {node.node_id} is announced at {node.url}, which other machines cannot dial",
                "start it with --host 0.0.0.0, or say its address with --advertise URL",
            )
        elif node.node_id in facts.unreached:
            yield (
                Level.WRONG,
                f"node {node.node_id} at {node.url} does not answer from here: {facts.unreached[node.node_id]}",
                "is it still running? else open its port in its firewall, or correct its --advertise",
            )


def _reach_fine(facts: Facts) -> str:
    return f"answering from here: {len(facts.snapshot.nodes)}" if facts.snapshot is not None else "no nodes to ask"


def _on_loopback(url: str) -> bool:
    """Whether an address says so itself; names are not looked up."""
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _versions(facts: Facts) -> Objections:
    nodes = facts.snapshot.nodes if facts.snapshot is not None else ()
    for node in nodes:
        if node.protocol_max < PROTOCOL_MIN or node.protocol_min > PROTOCOL_MAX:
            older = "this machine" if node.protocol_min > PROTOCOL_MAX else f"node {node.node_id}"
            spoken = f"{node.protocol_min}-{node.protocol_max}, this machine {PROTOCOL_MIN}-{PROTOCOL_MAX}"
            yield (
                Level.WRONG,
                f"node {node.node_id} speaks wire protocol {spoken}",
                f"upgrade {older}: pip install --upgrade meshnet",
            )
    versions = {node.node_id: node.version.partition(" ")[0] for node in nodes}
    versions |= {tracker.url: tracker.version for tracker in facts.trackers if tracker.version is not None}
    other = {where: version for where, version in versions.items() if version != facts.version}
    if other:
        told = ", ".join(f"{where} runs {version}" for where, version in sorted(other.items()))
        yield (
            Level.NOTE,
            f"{told}, this machine {facts.version}",
            "upgrade the older ones: pip install --upgrade meshnet",
        )


def _versions_fine(facts: Facts) -> str:
    return f"meshnet {facts.version}, as everywhere"


def _models(facts: Facts) -> Objections:
    if facts.model is not None and facts.model.error is not None:
        yield (
            Level.WRONG,
            facts.model.error,
            "name a folder with config.json and safetensors, a GGUF file, a hub id ORG/NAME, or smollm2",
        )
    served = served_models(facts.snapshot) if facts.snapshot is not None else []
    for name in sorted({model.name for model in served}):
        prints = sorted({model.fingerprint for model in served if model.name == name})
        if len(prints) > 1:
            named = ", ".join(one[:12] for one in prints)
            yield (
                Level.WRONG,
                f"nodes hold {name} with different contents ({named}), which never share a route",
                "give all nodes the same files: the same revision of the folder, or the same GGUF file",
            )
        if not any(model.complete for model in served if model.name == name):
            gaps = next(model.missing for model in served if model.name == name)
            yield (
                Level.WRONG,
                f"layers {', '.join(map(str, gaps))} of {name} are served by no node that can be used",
                f"start one: meshnet node MODEL --layers {gaps[0]}, or --layers auto",
            )


def _models_fine(facts: Facts) -> str:
    told = [f"{facts.model.name} has {facts.model.layers} layers"] if facts.model is not None else []
    served = served_models(facts.snapshot) if facts.snapshot is not None else []
    told += [f"{name} is served whole" for name in sorted({model.name for model in served})]
    return ", ".join(told) or "none named and none served"


CHECKS = (
    Check("trackers", _trackers, _trackers_fine),
    Check("clock", _clock, _clock_fine),
    Check("reachability", _reach, _reach_fine),
    Check("versions", _versions, _versions_fine),
    Check("models", _models, _models_fine),
)
