"""One model measured: which systems, in which order, how often. Starts what it needs and stops it again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks import environment
from benchmarks.busy import BusyWatch
from benchmarks.generate import GENERATE, generate_system
from benchmarks.mesh_processes import NodeOptions, mesh_processes
from benchmarks.mesh_system import MeshSystem, mesh_system
from benchmarks.models import BenchModel, PreparedModel
from benchmarks.one_process import ONE_PROCESS, one_process_system
from benchmarks.peers import Absent, PeerOptions, found_peers
from benchmarks.systems import Run, System

TWO_NODES, ONE_NODE = "two nodes, cached", "one node, cached"
PACKED = "two nodes, packed GGUF"
WARM_UP_TOKENS = 8
STATELESS_STEPS = 2  # at each length

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How to measure.

    Attributes:
        dtype, device, threads: the same for all systems; each node has ``threads`` of its own.
        stateless_lengths: lengths of answer at which a stateless step is timed; none leaves that path out.
        one_process: measure the same code over the whole model in one process too: what is lost by cutting it.
        one_node: measure a mesh of one node with the whole model too, which has one hop over a socket.
        packed: measure two nodes that hold a GGUF's blocks packed too, where the model is one.
        gateway: run an idle gateway beside each mesh, to tell its memory.
        wait_policy: see `NodeOptions`.
    """

    dtype: str
    device: str
    threads: int
    new_tokens: int
    repeats: int
    stateless_lengths: tuple[int, ...] = (0, 100, 200, 400)
    one_process: bool = True
    one_node: bool = True
    packed: bool = True
    gateway: bool = False
    wait_policy: str = "meshnet"


@dataclass(slots=True)
class Measurement:
    """What was measured of one model.

    Attributes:
        runs: by system, one for each repeat, in their order.
        stateless: by length of answer, seconds of single steps, of all repeats.
        peak_rss: by system, most bytes held by each of its processes.
        facts: of the machine and the software.
        absent: peers that were asked for and are not here, with the reason.
    """

    model: BenchModel
    plan: Plan
    facts: dict[str, Any]
    prompt_tokens: int
    runs: dict[str, list[Run]] = field(default_factory=dict)
    stateless: dict[int, list[float]] = field(default_factory=dict)
    peak_rss: dict[str, dict[str, int | None]] = field(default_factory=dict)
    seconds: float = 0.0
    absent: dict[str, str] = field(default_factory=dict)


async def measure(
    model: BenchModel, prepared: PreparedModel, plan: Plan, tell: Tell, peers: PeerOptions | None = None
) -> Measurement:
    """Start all systems, run them in turns, stop them.

    All stay started throughout and wait for their turns, asleep; which one begins changes with every repeat. ``peers``:
    where to find them; None leaves them out.
    """
    began = time.monotonic()
    facts = environment.facts()
    found = Measurement(model, plan, facts, len(prepared.prompt))
    async with AsyncExitStack() as running:
        systems = await _start(model, prepared, plan, tell, running)
        for peer in [] if peers is None else found_peers(peers, prepared, plan.threads):
            if isinstance(peer, Absent):
                tell(f"{model.key}: without {peer.name}: {peer.reason}")
                found.absent[peer.name] = peer.reason
                continue
            tell(f"{model.key}: starting {peer.name}")
            systems.append(await running.enter_async_context(peer.start()))
        for system in systems:
            tell(f"{model.key}: warming up {system.name}")
            await system.run(prepared.prompt, WARM_UP_TOKENS)
        for repeat in range(plan.repeats):
            for system in systems if repeat % 2 == 0 else systems[::-1]:
                tell(f"{model.key}: repeat {repeat + 1} of {plan.repeats}: {system.name}")
                with BusyWatch() as busy:
                    run = await system.run(prepared.prompt, plan.new_tokens)
                run.facts.update(busy.to_json())
                found.runs.setdefault(system.name, []).append(run)
            await _stateless(systems, found, prepared.prompt, tell, repeat)
        for system in systems:
            found.peak_rss[system.name] = system.peak_rss()
    found.seconds = time.monotonic() - began
    return found


async def _start(
    model: BenchModel, prepared: PreparedModel, plan: Plan, tell: Tell, running: AsyncExitStack
) -> list[System]:
    tell(f"{model.key}: starting {GENERATE}")
    systems: list[System] = [
        await running.enter_async_context(
            generate_system(prepared.folder, dtype=plan.dtype, device=plan.device, threads=plan.threads)
        )
    ]
    layers = [split.split("-") for split in model.splits]
    whole = f"{layers[0][0]}-{layers[-1][-1]}"
    if plan.one_process:
        tell(f"{model.key}: starting {ONE_PROCESS}")
        whole_model = one_process_system(
            prepared.folder, whole, dtype=plan.dtype, device=plan.device, threads=plan.threads
        )
        systems.append(await running.enter_async_context(whole_model))
    meshes = [(TWO_NODES, model.splits, "none")]
    if plan.one_node:
        meshes.append((ONE_NODE, (whole,), "none"))
    if plan.packed and prepared.gguf is not None and (plan.dtype, plan.device) == ("bfloat16", "cpu"):
        meshes.append((PACKED, model.splits, "auto"))
    for name, splits, quantize in meshes:
        options = NodeOptions(plan.dtype, plan.threads, (plan.device,), plan.wait_policy, quantize)
        tell(f"{model.key}: starting {name}: layers {' and '.join(splits)}")
        processes = running.enter_context(mesh_processes(prepared.model, splits, options, gateway=plan.gateway))
        systems.append(await running.enter_async_context(mesh_system(name, prepared.name, processes)))
    return systems


async def _stateless(
    systems: Sequence[System], found: Measurement, prompt: Sequence[int], tell: Tell, repeat: int
) -> None:
    """Time single steps of the stateless path, each over the prompt and that much of the cached answer."""
    mesh = next(system for system in systems if isinstance(system, MeshSystem) and system.name == TWO_NODES)
    answer = found.runs[TWO_NODES][-1].tokens
    for length in found.plan.stateless_lengths:
        if length > len(answer):
            continue
        tell(f"{found.model.key}: repeat {repeat + 1}: a stateless step at {length} tokens")
        steps = await mesh.stateless_step_s((*prompt, *answer[:length]), STATELESS_STEPS)
        found.stateless.setdefault(length, []).extend(steps)
