"""`meshnet bench --profile`: where decode steps go, as the mesh told it, and what the step of a shard is made of.

The mesh's parts add up by the gateway's and the hops' clocks. What is within a hop's `forward` no node tells, since
measuring it would slow it down: with ``--step-of MODEL`` the same layers are loaded and run in this process, with
steps of the kind that the node has, and its figures stand beside the mesh's rather than in them.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from meshnet_cli import options
from meshnet_cli.steps_told import Steps
from meshnet_core.errors import InvalidInputError
from meshnet_core.layer_range import LayerRange

if TYPE_CHECKING:
    from meshnet_node.model_backend import TorchModelShard

STEPS = 10  # of each hop's layers that are profiled here
SILENT = "6"  # kineto tells of each beginning and end on the terminal up to level 5


@dataclass(frozen=True, slots=True)
class MeshProfile:
    """Means over decode steps of one or more answers, in milliseconds.

    Attributes:
        steps: so many.
        step_ms: from one token's reply to the next one's.
        parts: what that is made of, by name, as the gateway told it.
    """

    steps: int
    step_ms: float
    parts: dict[str, float]

    @classmethod
    def of(cls, told: Iterable[dict[str, Any]]) -> MeshProfile:
        """Of the ``profile`` objects of answers, each of which counts as often as it has steps.

        Raises:
            InvalidInputError: none of them has a step.
        """
        steps, whole = 0, 0.0
        sums: defaultdict[str, float] = defaultdict(float)
        for one in told:
            count = int(one.get("steps", 0))
            steps += count
            whole += count * float(one.get("step_ms", 0))
            for name, ms in one.get("parts", {}).items():
                sums[name] += count * float(ms)
        if not steps:
            raise InvalidInputError(
                "the gateway tells no profile: the answers were too short; give --tokens 20 or more"
            )
        return cls(steps, whole / steps, {name: total / steps for name, total in sums.items()})

    @property
    def left_ms(self) -> float:
        """What the parts do not account for: the rounding on the way here."""
        return self.step_ms - sum(self.parts.values())

    def to_json(self) -> dict[str, Any]:
        parts = {name: round(ms, 4) for name, ms in self.parts.items()}
        return {
            "steps": self.steps,
            "step_ms": round(self.step_ms, 4),
            "parts": parts,
            "left_ms": round(self.left_ms, 4),
        }


@dataclass(frozen=True, slots=True)
class HopSplit:
    """What the step of one hop's layers is made of, in this process; milliseconds. See `meshnet_node.step_profile`.

    Attributes:
        steps: as they were here.
        node_steps: as they are at the node; None where it does not tell.
    """

    layers: str
    dtype: str
    steps: Steps
    node_steps: Steps | None
    step_ms: float
    unprofiled_ms: float
    products: float
    attention: float
    rest: float

    def to_json(self) -> dict[str, Any]:
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


def check_model(model: str) -> None:
    """That MODEL is one, before minutes of measuring end with the news that it is not.

    Raises:
        MeshnetError: it is none, or not found.
    """
    from meshnet_node.model_files import open_model

    open_model(model)


def split_here(
    model: str,
    route: Sequence[dict[str, Any]],
    position: int,
    threads: int | None,
    told: Sequence[Steps | None],
    steps: int = STEPS,
) -> list[HopSplit]:
    """Load each hop's layers of MODEL in turn and profile its steps at ``position``.

    Args:
        route: hops as a report tells them, with ``layers`` and ``dtype``.
        threads: of torch; None leaves it as it is.
        told: what each hop's steps are; where that is not known, as a node's are that was told nothing.

    Raises:
        MeshnetError: the model is not found, or a shard cannot be loaded here.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)  # before torch reads it
    import torch

    from meshnet_node.model_files import open_model
    from meshnet_node.shard_loader import load_shard
    from meshnet_node.step_profile import profile_steps

    if threads is not None:
        torch.set_num_threads(threads)
    files = open_model(model)
    found = []
    for hop, node_steps in zip(route, told, strict=True):
        layers, dtype = LayerRange.parse(hop["layers"]), str(hop["dtype"])
        computed, _, held = dtype.partition("+")
        quantize = "none" if not held else "auto" if files.blocks else held  # as the hop's node was told, or chose
        folder = files.prepare(layers, dtype=computed, packed=bool(held))
        shard = load_shard(folder, layers, dtype=computed, device="cpu", quantize=quantize)
        here = _take(shard, Steps.NATIVE if node_steps is None else node_steps)
        split = profile_steps(shard, position, steps)
        shard.close()
        parts = (split.products, split.attention, split.rest)
        found.append(HopSplit(str(layers), dtype, here, node_steps, split.step_ms, split.unprofiled_ms, *parts))
    return found


def _take(shard: TorchModelShard, wanted: Steps) -> Steps:
    """Have steps be as wanted, if they can be here; tells what they are."""
    from meshnet_node.step_warm_up import StepWarmUp

    if wanted is Steps.NATIVE:
        shard.use_kernels()
    elif wanted is Steps.COMPILED:  # seconds where a node of this machine has kept them, else half a minute
        StepWarmUp(shard, is_worth=lambda _found: True).run()
    return Steps.COMPILED if shard.runs_compiled else Steps.NATIVE if shard.runs_native else Steps.PLAIN


@dataclass(frozen=True, slots=True)
class Profile:
    """What the mesh told, and the splits of its hops' layers in this process where those were asked for."""

    mesh: MeshProfile
    splits: tuple[HopSplit, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**self.mesh.to_json(), "split": [split.to_json() for split in self.splits]}


def profile_of(
    reports: Sequence[dict[str, Any]], step_of: str | None, threads: int | None, told: Sequence[Steps | None]
) -> Profile:
    """The profile of answers with these reports; their layers of MODEL ``step_of`` are profiled here in mid-answer.

    Args:
        told: what steps are at each hop of the last one's route.

    Raises:
        MeshnetError: no report has a profile, or the layers cannot be loaded here.
    """
    mesh = MeshProfile.of(report.get("profile", {}) for report in reports)
    if step_of is None:
        return Profile(mesh)
    last = reports[-1]
    position = int(last.get("prompt_tokens", 0)) + int(last.get("completion_tokens", 0)) // 2
    return Profile(mesh, tuple(split_here(step_of, last.get("route", ()), position, threads, told)))


def show(profile: Profile) -> None:
    """For people."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else options.PIPED_WIDTH)
    console.print(_mesh_table(profile.mesh))
    if profile.splits:
        console.print(_split_table(profile.splits))


def _mesh_table(profile: MeshProfile) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"where a decode step goes, mean of {profile.steps}", title_justify="left")
    table.add_column("part")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    rows = {**profile.parts, "not accounted for": profile.left_ms, "whole": profile.step_ms}
    for name, ms in rows.items():
        if abs(ms) >= 0.0005 or name == "whole":
            share = ms / profile.step_ms if profile.step_ms else 0.0
            table.add_row(name, f"{ms:.3f}", f"{100 * share:.1f} %")
    return table


def _split_table(splits: Sequence[HopSplit]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title="what a forward is made of: the same layers in this process, profiled, ms",
        title_justify="left",
        caption="\n".join(
            ["the parts add up to `profiled`; a step that is not profiled takes `unprofiled`", *_unlike(splits)]
        ),
        caption_justify="left",
    )
    table.add_column("layers")
    for title in ("products", "attention", "rest", "profiled", "unprofiled"):
        table.add_column(title, justify="right")
    for split in splits:
        values = (split.products, split.attention, split.rest, split.step_ms, split.unprofiled_ms)
        table.add_row(f"{split.layers} {split.dtype}, {split.steps}", *(f"{value:.3f}" for value in values))
    return table


def _unlike(splits: Sequence[HopSplit]) -> list[str]:
    """Where what ran here is not, or may not be, what the nodes run."""
    unlike = [split for split in splits if split.node_steps is not split.steps]
    return [
        f"layers {split.layers}: {split.steps} steps here, "
        + ("the node does not tell what its are" if split.node_steps is None else f"{split.node_steps} at the node")
        for split in unlike
    ]
