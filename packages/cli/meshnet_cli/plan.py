"""`meshnet plan`: what would go where on which machines, and what speed to expect, before anything is loaded."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshnet_cli import find_trackers, options, trust
from meshnet_cli.complaint import FAILURE
from meshnet_cli.machine_text import DTYPES, MachineText
from meshnet_core.errors import InvalidInputError

if TYPE_CHECKING:
    from meshnet_core.membership import Snapshot
    from meshnet_core.model_facts import ModelFacts
    from meshnet_tracker.forecast import Forecast
    from meshnet_tracker.machine import Machine
    from meshnet_tracker.placement import Placement


def plan(
    command: typer.Context,
    model: options.Model,
    on: Annotated[
        list[str] | None,
        typer.Option(
            "--on",
            metavar="MACHINE",
            help="A machine: DEVICE:MEMORY, such as gpu:24GiB, or with more said of it, "
            "NAME=DEVICE:MEMORY/DTYPE@LAYERms+HOPms, such as desk=cpu:16GiB@1.5ms; DEVICE is gpu, mps or cpu, the "
            "times are of one layer and of one hop. Give it once for each.",
        ),
    ] = None,
    on_mesh: Annotated[
        bool, typer.Option("--on-mesh", help="The machines that serve MODEL in the mesh of --tracker, as well.")
    ] = False,
    tracker: options.TrackerUrls = None,
    dtype: options.Dtype = options.DtypeChoice.AUTO,
    prompt: Annotated[
        int, typer.Option("--prompt", min=1, metavar="N", help="Tokens of a prompt, for the time to the first token.")
    ] = 512,
    context: Annotated[
        int,
        typer.Option("--context", min=0, metavar="N", help="Tokens of sessions for which each machine keeps room."),
    ] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of the table.")] = False,
    mesh: options.MeshPath = None,
    insecure: options.Insecure = False,
) -> None:
    """Say what of MODEL would go where, and how fast it would be; needs its config alone, and loads nothing."""
    written = [MachineText.parse(text) for text in on or ()]
    if not written and not on_mesh:
        raise InvalidInputError("name the machines: --on gpu:24GiB --on cpu:16GiB, or --on-mesh for those of a mesh")
    if options.typed(command, "tracker") and not on_mesh:
        raise InvalidInputError("--tracker says where the mesh of --on-mesh is; give both or neither")
    facts = _facts(model, context)
    snapshot = None
    if on_mesh:
        identity = trust.identity_for(options.LOOPBACK, mesh, insecure=insecure, command="plan")
        given = options.tracker_urls(tracker)
        snapshot = asyncio.run(find_trackers.snapshot_of(given, identity, insecure=insecure))
    machines = _machines(written, snapshot, facts, None if dtype is options.DtypeChoice.AUTO else dtype.value)
    found = _Plan.made(facts, machines, prompt)
    if as_json:
        print(json.dumps(found.document(), indent=2))
    else:
        found.show()
    if found.placement.missing:
        raise typer.Exit(FAILURE)


@dataclass(frozen=True)
class _Candidate:
    """A machine, what it is, and whether its speed is a guess."""

    machine: Machine
    device: str
    dtype: str
    guessed: bool


@dataclass(frozen=True)
class _Plan:
    facts: ModelFacts
    candidates: dict[str, _Candidate]
    placement: Placement
    prompt: int
    speed: Forecast | None
    alone: tuple[str, Forecast] | None

    @classmethod
    def made(cls, facts: ModelFacts, candidates: list[_Candidate], prompt: int) -> _Plan:
        from meshnet_tracker.forecast import alone, forecast
        from meshnet_tracker.placement import place

        machines = [candidate.machine for candidate in candidates]
        devices = {candidate.machine.name: candidate.device for candidate in candidates}
        placement = place(machines, facts)
        speed = None if placement.cover is None else forecast(placement.cover, facts, devices, prompt)
        single = alone(machines, facts)
        return cls(
            facts,
            {candidate.machine.name: candidate for candidate in candidates},
            placement,
            prompt,
            speed,
            None if single is None else (single[0].machine.name, forecast(single, facts, devices, prompt)),
        )

    @property
    def verdict(self) -> str:
        """What a person should know of it, in a sentence or two."""
        facts, missing = self.facts, self.placement.missing
        if self.speed is None:
            least = sum(facts.layers) + facts.embedding + facts.head - facts.shared
            gaps = ", ".join(map(str, missing))
            return (
                f"not all of {facts.model} fits: layers {gaps} are left over. It has {least / 1e9:.2f} billion "
                f"weights, {_size(2 * least)} in 16 bits and {_size(4 * least)} in 32, besides room for sessions; add "
                "a machine, or keep less --context"
            )
        if self.alone is None:
            return "no one machine holds it all: it takes the mesh"
        name, single = self.alone
        parts = len(self.placement.cover or ())
        if parts == 1:
            return f"one machine alone is best: {name}"
        if single.step_ms < self.speed.step_ms:
            return (
                f"one machine alone would be faster for one answer: {name}, {single.tokens_per_s:.1f} tokens/s instead "
                f"of {self.speed.tokens_per_s:.1f}; these {parts} parts are better for many answers at once, "
                f"{self.speed.tokens_per_s_together:.1f} tokens/s instead of {single.tokens_per_s_together:.1f}"
                if self.speed.slowest_ms < single.slowest_ms
                else f"one machine alone would be faster: {name}, {single.tokens_per_s:.1f} tokens/s instead of "
                f"{self.speed.tokens_per_s:.1f}"
            )
        return f"faster than any one machine alone: {name} would make {single.tokens_per_s:.1f} tokens/s"

    def rows(self) -> list[dict[str, Any]]:
        """By layers, those that get none last."""
        run = {part.machine.name: part for part in self.placement.cover or ()}
        rows = []
        for name, candidate in self.candidates.items():
            layers, machine, part = self.placement.ranges.get(name), candidate.machine, run.get(name)
            rows.append({
                "machine": name,
                "device": candidate.device,
                "dtype": candidate.dtype,
                "layers": None if layers is None else str(layers),
                "role": "none" if layers is None else "part" if part or self.speed is None else "redundancy",
                "bytes": 0 if layers is None else machine.bytes(self.facts, layers.start, layers.stop),
                "memory": None if machine.fixed else machine.memory,
                "layer_ms": round(machine.layer_ms, 4),
                "guessed": candidate.guessed,
                "step_ms": None if part is None else round(machine.time(self.facts, part.start, part.stop), 3),
            })  # fmt: skip
        first = {name: layers.start for name, layers in self.placement.ranges.items()}
        return sorted(rows, key=lambda row: (row["role"] != "part", first.get(row["machine"], 0), row["machine"]))

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "model": self.facts.model,
            "num_layers": self.facts.num_layers,
            "machines": self.rows(),
            "missing": [str(layers) for layers in self.placement.missing],
            "expected": _speed_document(self.speed),
            "alone": None if self.alone is None else {"machine": self.alone[0], **_speed_document(self.alone[1])},
            "prompt": self.prompt,
            "verdict": self.verdict,
        }

    def show(self) -> None:
        """As a table, with the verdict below."""
        from rich.console import Console
        from rich.table import Table

        table = Table("machine", "device", "layers", "memory", "ms a token", "", box=None, pad_edge=False)
        for row in self.rows():
            memory = _size(row["bytes"]) + ("" if row["memory"] is None else f" of {_size(row['memory'])}")
            ms = "" if row["step_ms"] is None else f"{'about ' if row['guessed'] else ''}{row['step_ms']:.1f}"
            role = {"part": "", "redundancy": "in reserve", "none": "nothing fits"}[row["role"]]
            table.add_row(row["machine"], f"{row['device']}, {row['dtype']}", row["layers"] or "-", memory, ms, role)
        console = Console(highlight=False, soft_wrap=True)
        console.print(f"{self.facts.model}, {self.facts.num_layers} layers")
        console.print(table)
        if self.speed is not None:
            console.print(
                f"expected: {self.speed.tokens_per_s:.1f} tokens/s of one answer, "
                f"{self.speed.tokens_per_s_together:.1f} of many together; {_time(self.speed.first_token_ms)} to the "
                f"first token after a prompt of {self.prompt}"
            )
        console.print(self.verdict)
        if any(candidate.guessed for candidate in self.candidates.values()):
            console.print("Times are guessed by device where none were given or measured; @LAYERms says better.")


def _facts(model: str, context: int) -> ModelFacts:
    from meshnet_node.model_files import open_model
    from meshnet_node.placeable_model import PlaceableModel

    return PlaceableModel(open_model(model), device="cpu").facts(context)


def _machines(
    written: list[MachineText], snapshot: Snapshot | None, facts: ModelFacts, dtype: str | None
) -> list[_Candidate]:
    from meshnet_core.dtypes import weight_width
    from meshnet_tracker.machine import Machine
    from meshnet_tracker.mesh_machines import machines_of
    from meshnet_tracker.speed import HOP_MS, layer_ms

    candidates: dict[str, _Candidate] = {}
    nodes = {} if snapshot is None else {node.node_id: node for node in snapshot.nodes}
    for machine in [] if snapshot is None else machines_of(snapshot, facts):
        node = nodes[machine.name.partition("/")[0]]
        kinds = {shard.dtype for shard in node.shards if shard.fingerprint == facts.fingerprint}
        kind = node.placement.dtype if node.placement is not None else kinds.pop()
        guessed = not any(shard.decode_ms for shard in node.shards)
        candidates[machine.name] = _Candidate(machine, node.device, kind, guessed)
    for number, text in enumerate(written, start=1):
        name = text.name or f"{text.kind}-{number}"
        if name in candidates:
            raise InvalidInputError(f"two machines are called {name}; give each a name of its own: NAME=DEVICE:MEMORY")
        kind = text.dtype or dtype or DTYPES[text.device]
        ms = text.layer_ms or layer_ms(text.device, weight_width(kind), facts)
        hop = HOP_MS if text.hop_ms is None else text.hop_ms
        candidates[name] = _Candidate(
            Machine(name, text.memory, facts.width(kind), ms, hop), text.device, kind, guessed=text.layer_ms is None
        )
    if not candidates:
        raise InvalidInputError(f"no node of the mesh serves {facts.model}; name machines with --on")
    return list(candidates.values())


def _speed_document(speed: Forecast | None) -> dict[str, float]:
    if speed is None:
        return {}
    return {
        "tokens_per_s": round(speed.tokens_per_s, 2),
        "tokens_per_s_together": round(speed.tokens_per_s_together, 2),
        "first_token_s": round(speed.first_token_ms / 1000, 3),
    }


def _time(ms: float) -> str:
    return f"{ms / 1000:.1f} s" if ms >= 1000 else f"{ms:.0f} ms"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
