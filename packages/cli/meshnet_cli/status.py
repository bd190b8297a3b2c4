"""`meshnet status`: who holds what of each model, what lacks, who is at work, and how fast it goes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from meshnet_cli.find_trackers import NO_NODES
from meshnet_cli.mesh_source import Document, asking
from meshnet_core.layer_range import LayerRange
from meshnet_gateway.dashboard.mesh_picture import depths


@asking
def status(document: Document, as_json: bool) -> None:
    """Show who holds what, which layers lack, the sessions and the speed of a mesh."""
    if as_json:
        print(json.dumps(document, indent=2))
        return
    print("\n".join(lines(document)))


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The status as people read it; pure.

    Args:
        document: as `GET /v1/meshnet/status` answers.
    """
    nodes = document["nodes"]
    if not nodes:
        yield NO_NODES
    named = Counter(model["name"] for model in document["models"])
    for model in document["models"]:
        yield from _model(model, nodes, tell_files=named[model["name"]] > 1)
    if nodes:
        yield f"nodes: {', '.join(map(_node, nodes))}"
        held = sum(node.get("state_bytes", 0) for node in nodes)
        yield f"sessions: {max(_sessions(nodes), default=0)}, with {megabytes(held)} of state on all nodes"
    if gateway := document.get("gateway"):
        yield from _gateway(gateway)
    for tracker in document.get("trackers", ()):
        state = "answers" if tracker["answers"] else "does not answer"
        alone = ", without its registry" if tracker.get("registry") == "unreachable" else ""
        yield f"tracker: {tracker['url']} {state}{alone}"
    for said in document.get("degraded", ()):
        yield f"degraded: {said}"


def megabytes(count: float) -> str:
    """Bytes in a unit that people read."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def _model(model: Mapping[str, Any], nodes: list[dict[str, Any]], *, tell_files: bool) -> Iterator[str]:
    """Of models of one name, which differ in their files, each with what its nodes' files are known by."""
    files = f" of the files {model['fingerprint'][:12]}" if tell_files else ""
    gaps = model["missing_layers"]
    silent = [] if gaps else silent_gaps(model, nodes)
    if gaps:
        whole = f"layers {', '.join(gaps)} are served by no node that can be used"
    elif silent:
        whole = f"but nobody who holds layers {', '.join(silent)} answers"
    else:
        whole = "whole"
    yield f"{model['name']}{files}: {model['num_layers']} layers, {whole}"
    for node in nodes:
        for shard in _shards(node, model):
            state = "" if node["answers"] else ", does not answer"
            yield f"  {shard['layers']:>9}  {node['node']} ({node['device']}, {shard['dtype']}{state})"
    if gaps or silent:
        yield f"  to close the gap: meshnet node MODEL --layers {(gaps or silent)[0]}, or --layers auto"
    elif ms := model.get("expected_ms_per_token"):
        yield f"  route {model['route']}, about {1000 / ms:.1f} tokens/s expected"


def silent_gaps(model: Mapping[str, Any], nodes: list[dict[str, Any]]) -> list[str]:
    """The layers that are held, but by no node that answers; the tracker counts with one until its lease ends."""
    answering = [node for node in nodes if node["answers"]]
    held = [LayerRange.parse(shard["layers"]) for node in answering for shard in _shards(node, model)]
    return [str(layers) for layers, holders in depths(held, model["num_layers"]) if not holders]


def _shards(node: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Those of ``model`` that a node serves; one that tells no fingerprint is taken by its name."""
    for shard in node["layers"]:
        told = shard.get("fingerprint", model["fingerprint"])
        if (shard["model"], told) == (model["name"], model["fingerprint"]):
            yield shard


def _node(node: Mapping[str, Any]) -> str:
    state = "" if node["answers"] else " (does not answer)"
    return f"{node['node']}{' (draining)' if node['draining'] else ''}{state}"


def _sessions(nodes: list[dict[str, Any]]) -> Iterator[int]:
    """Of each node: a session is on every node of its route, so that the most that one has is what there is."""
    return (int(node.get("sessions", 0)) for node in nodes)


def _gateway(gateway: Mapping[str, Any]) -> Iterator[str]:
    """What it does, each answer that runs with its measured speed, and that of the newest which ended."""
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in gateway.get("requests", {}).items())
    waiting = gateway.get("waiting_for_room")
    yield (
        f"gateway: {gateway.get('active_generations', 0)} answers running"
        + (f", {waiting} waiting for room" if waiting else "")
        + (f"; so far {outcomes}" if outcomes else "")
    )
    for running in gateway.get("running", ()):
        hops = " -> ".join(f"{hop['node']}[{hop['layers']}]" for hop in running["route"]) or "no route yet"
        yield f"  {running['model']} over {hops}: {_tokens(running)}"
    for name, ended in gateway.get("latest", {}).items():
        yield f"  {name}, the newest answer: {_tokens(ended)}"


def _tokens(told: Mapping[str, Any]) -> str:
    speed = told.get("tokens_per_s")
    return f"{told['completion_tokens']} tokens" + ("" if speed is None else f", {speed:.1f} tokens/s measured")
