"""What `meshnet doctor` makes of the facts: findings, each with what to do. Pure; asks nobody and reads no file."""

from __future__ import annotations

import difflib
import enum
import ipaddress
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from meshnet_cli.doctor_facts import Facts
from meshnet_cli.status import megabytes
from meshnet_core.coverage import served_models
from meshnet_core.frames import PROTOCOL_MAX, PROTOCOL_MIN

LEAST_DISK = 2 << 30  # bytes: a small model converted
LEAST_MEMORY = 1 << 30
SKEW_S = 30.0  # beyond what a slow answer explains
SOON = timedelta(days=14)  # a running process renews months before


class Level(enum.StrEnum):
    """How bad a finding is; only ``wrong`` makes the exit code 1."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``remedy`` is what to do, empty where there is nothing to do."""

    check: str
    level: Level
    what: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def findings(facts: Facts) -> list[Finding]:
    """Everything that the facts tell, in the order of `CHECKS`; a check without an objection says so once."""
    found = []
    for name, check in CHECKS:
        objections = [Finding(name, level, what, remedy) for level, what, remedy in check(facts)]
        found += objections or [Finding(name, Level.OK, _FINE[name](facts))]
    return found


Objections = Iterator[tuple[Level, str, str]]


def _libraries(facts: Facts) -> Objections:
    for library in facts.libraries:
        if library.version is None:
            yield (
                Level.NOTE if library.needed_by_nodes_alone else Level.WRONG,
                f"{library.name} is not installed" + (": no node runs here" if library.needed_by_nodes_alone else ""),
                "pip install 'meshnet[node]'" if library.needed_by_nodes_alone else "pip install meshnet again",
            )
        elif not library.fits:
            yield (
                Level.WRONG,
                f"{library.name} is {library.version}, which is not {library.wanted}",
                f"pip install '{library.name}{library.wanted}'",
            )


def _device(facts: Facts) -> Objections:
    device = facts.device
    if device.error is not None:
        yield Level.WRONG, device.error, "choose another --device, or install a torch that fits this machine"
    elif device.name and device.free_bytes < LEAST_MEMORY:
        yield (
            Level.WRONG,
            f"only {megabytes(device.free_bytes)} of memory are free on {device.name}",
            "end what takes the memory, or hold fewer layers here (--layers, --memory)",
        )


def _ports(facts: Facts) -> Objections:
    for port in facts.ports:
        if port.held_by is not None:
            yield (
                Level.NOTE,
                f"port {port.number}, where {port.command} listens, is taken by {port.held_by}",
                f"end that, or choose another port: {port.command} --port N",
            )


def _disk(facts: Facts) -> Objections:
    for folder in facts.folders:
        if folder.error is not None:
            yield (
                Level.WRONG,
                f"{folder.path} cannot be used: {folder.error}",
                f"set {folder.variable} to a folder that can be written to",
            )
        elif folder.free_bytes < LEAST_DISK:
            yield (
                Level.WRONG,
                f"only {megabytes(folder.free_bytes)} are free where {folder.path} is",
                f"make room, or set {folder.variable} to a folder on a larger disk",
            )


def _settings(facts: Facts) -> Objections:
    if facts.settings_error is not None:
        yield Level.WRONG, facts.settings_error, "correct the file, or name another one with MESHNET_CONFIG"
    for name in facts.variables:
        if name not in facts.known_variables:
            near = difflib.get_close_matches(name, facts.known_variables, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            yield (
                Level.WRONG,
                f"{name} is set, and nothing reads it",
                f"{meant}unset it; `meshnet config --all` names what is read",
            )


def _identity(facts: Facts) -> Objections:
    mesh = facts.mesh
    if not mesh.there:
        return
    if mesh.missing:
        yield (
            Level.WRONG,
            f"{mesh.path} lacks {', '.join(mesh.missing)}",
            "join again with a new ticket: `meshnet mesh ticket` where the mesh was made, `meshnet join TICKET` here",
        )
    for name in mesh.readable_by_others:
        yield Level.WRONG, f"other users of this machine can read {mesh.path / name}", f"chmod 600 {mesh.path / name}"
    if mesh.error is not None:
        yield Level.WRONG, mesh.error, f"remove {mesh.path} and join again with `meshnet join TICKET`"
    for whose, ends in (("this machine's", mesh.certificate_ends), ("the authority's", mesh.authority_ends)):
        if ends is None:
            continue
        again = (
            "join again with a new ticket (`meshnet mesh ticket` where the mesh was made)"
            if whose == "this machine's"
            else "make a new mesh with `meshnet mesh create`, and have all machines join it"
        )
        if ends <= facts.now:
            yield Level.WRONG, f"{whose} certificate ended on {ends:%Y-%m-%d}", again
        elif ends - facts.now < SOON:
            yield Level.NOTE, f"{whose} certificate ends on {ends:%Y-%m-%d} and was not renewed", again


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


def _clock(facts: Facts) -> Objections:
    for tracker in facts.trackers:
        if tracker.ahead_s is not None and abs(tracker.ahead_s) > SKEW_S:
            side = "ahead of" if tracker.ahead_s > 0 else "behind"
            yield (
                Level.WRONG,
                f"this machine's clock is {abs(tracker.ahead_s):.0f} s {side} that of the tracker at {tracker.url}",
                "set both by NTP (timedatectl set-ntp true): certificates are judged by these clocks",
            )


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


CHECKS: tuple[tuple[str, Callable[[Facts], Objections]], ...] = (
    ("libraries", _libraries),
    ("device", _device),
    ("ports", _ports),
    ("disk", _disk),
    ("settings", _settings),
    ("identity", _identity),
    ("trackers", _trackers),
    ("clock", _clock),
    ("reachability", _reach),
    ("versions", _versions),
    ("models", _models),
)


def _libraries_fine(facts: Facts) -> str:
    shown = [one for one in facts.libraries if one.name in {"torch", "transformers"}]
    return ", ".join(f"{one.name} {one.version}" for one in shown) or "not looked at"


def _clock_fine(facts: Facts) -> str:
    told = [abs(tracker.ahead_s) for tracker in facts.trackers if tracker.ahead_s is not None]
    return f"within {max(1.0, *told):.0f} s of the trackers'" if told else "no tracker to compare with"


def _identity_fine(facts: Facts) -> str:
    mesh = facts.mesh
    if not mesh.there or mesh.certificate_ends is None:
        return "in no mesh with certificates"
    return f"certificate in {mesh.path} until {mesh.certificate_ends:%Y-%m-%d}, renewed before by itself"


def _models_fine(facts: Facts) -> str:
    told = [f"{facts.model.name} has {facts.model.layers} layers"] if facts.model is not None else []
    served = served_models(facts.snapshot) if facts.snapshot is not None else []
    told += [f"{name} is served whole" for name in sorted({model.name for model in served})]
    return ", ".join(told) or "none named and none served"


_FINE: dict[str, Callable[[Facts], str]] = {
    "libraries": _libraries_fine,
    "device": lambda facts: (
        f"{facts.device.name}, {megabytes(facts.device.free_bytes)} free" if facts.device.name else "not looked at"
    ),
    "ports": lambda facts: f"{', '.join(str(port.number) for port in facts.ports)} are free or meshnet's",
    "disk": lambda facts: ", ".join(f"{megabytes(one.free_bytes)} free for {one.path}" for one in facts.folders),
    "settings": lambda facts: ", ".join(facts.variables) or "none in the environment",
    "identity": _identity_fine,
    "trackers": lambda facts: f"answering: {', '.join(tracker.url for tracker in facts.trackers)}",
    "clock": _clock_fine,
    "reachability": lambda facts: (
        f"answering from here: {len(facts.snapshot.nodes)}" if facts.snapshot is not None else "no nodes to ask"
    ),
    "versions": lambda facts: f"meshnet {facts.version}, as everywhere",
    "models": _models_fine,
}
