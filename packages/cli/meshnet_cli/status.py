"""`meshnet status`: who holds what of each model, what lacks, who is at work, and how fast it may go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from meshnet_cli import options
from meshnet_cli.find_trackers import NO_NODES
from meshnet_cli.mesh_source import Source


def status(
    context: typer.Context,
    url: options.GatewayUrl = None,
    tracker: options.TrackerUrls = None,
    as_json: options.Json = False,
    api_key: options.ClientKey = None,
    mesh: options.MeshPath = None,
    insecure: options.Insecure = False,
) -> None:
    """Show who holds what, which layers lack, the sessions and the speed of a mesh."""
    source = Source.chosen(context, url, api_key, options.tracker_urls(tracker), mesh, insecure=insecure)
    document = asyncio.run(source.document("status"))
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
    for model in document["models"]:
        yield from _model(model, nodes)
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


def _model(model: Mapping[str, Any], nodes: list[dict[str, Any]]) -> Iterator[str]:
    gaps = model["missing_layers"]
    whole = "whole" if model["complete"] else f"layers {', '.join(gaps)} are served by no node that can be used"
    yield f"{model['name']}: {model['num_layers']} layers, {whole}"
    for node in nodes:
        for shard in node["layers"]:
            if shard["model"] == model["name"]:
                yield f"  {shard['layers']:>9}  {node['node']} ({node['device']}, {shard['dtype']})"
    if ms := model.get("expected_ms_per_token"):
        yield f"  route {model['route']}, about {1000 / ms:.1f} tokens/s expected"
    elif gaps:
        yield f"  to close the gap: meshnet node MODEL --layers {gaps[0]}, or --layers auto"


def _node(node: Mapping[str, Any]) -> str:
    state = "" if node["answers"] else " (does not answer)"
    return f"{node['node']}{' (draining)' if node['draining'] else ''}{state}"


def _sessions(nodes: list[dict[str, Any]]) -> Iterator[int]:
    """Of each node: a session is on every node of its route, so that the most that one has is what there is."""
    return (int(node.get("sessions", 0)) for node in nodes)


def _gateway(gateway: Mapping[str, Any]) -> Iterator[str]:
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in gateway.get("requests", {}).items())
    waiting = gateway.get("waiting_for_room")
    yield (
        f"gateway: {gateway.get('active_generations', 0)} answers running"
        + (f", {waiting} waiting for room" if waiting else "")
        + (f"; so far {outcomes}" if outcomes else "")
    )
