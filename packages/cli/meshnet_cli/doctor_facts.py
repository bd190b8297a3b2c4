"""What `meshnet doctor` knows of a machine and its mesh: plain values, gathered and judged elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from meshnet_core.membership import Snapshot


@dataclass(frozen=True)
class Library:
    """A library that is required: its version, None where it is missing, and the range that would do."""

    name: str
    version: str | None
    wanted: str
    fits: bool
    needed_by_nodes_alone: bool = False


@dataclass(frozen=True)
class Device:
    """What a node would compute on; ``error`` says why there is none."""

    name: str = ""
    free_bytes: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Kernels:
    """What a node here would run native decode steps with; nothing of it where that was not looked at.

    Attributes:
        compiler: the command that builds them; empty where there is none.
        error: why there are none; None where they are built and pass their check.
        no_use: why steps on this device take none, so that they were not built.
    """

    compiler: str = ""
    error: str | None = None
    no_use: str = ""


@dataclass(frozen=True)
class Port:
    """A port that a command takes unless told otherwise; ``held_by`` is None where it is free."""

    number: int
    command: str
    held_by: str | None = None


@dataclass(frozen=True)
class Folder:
    """A folder that is written to, and the room on its disk."""

    path: Path
    variable: str
    free_bytes: int = 0
    error: str | None = None


@dataclass(frozen=True)
class MeshFiles:
    """This machine's place in a mesh.

    Attributes:
        path: the folder.
        there: whether it holds anything of a mesh.
        missing: names of files that lack.
        readable_by_others: names of keys whose mode lets other users read them.
        certificate_ends, authority_ends: in UTC; None where unreadable.
        error: what else is wrong with them.
    """

    path: Path
    there: bool = False
    missing: tuple[str, ...] = ()
    readable_by_others: tuple[str, ...] = ()
    certificate_ends: datetime | None = None
    authority_ends: datetime | None = None
    error: str | None = None


@dataclass(frozen=True)
class TrackerFact:
    """One tracker as it answers from here.

    Attributes:
        ahead_s: how far this machine's clock is before the tracker's, in seconds.
        registry: ``none``, ``reachable`` or ``unreachable``.
        error: why it does not answer; None where it does.
    """

    url: str
    version: str | None = None
    ahead_s: float | None = None
    registry: str = "none"
    error: str | None = None


@dataclass(frozen=True)
class ModelFact:
    """The model that was named: its layers, or why it cannot be opened."""

    name: str
    layers: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Facts:
    """All of it.

    Attributes:
        now: in UTC, by this machine's clock.
        variables: names in the environment that begin with MESHNET_.
        known_variables: those that are read.
        settings_error: what is wrong with the settings' file.
        trackers: those that were named, or are remembered.
        no_tracker: why none is known, where none is.
        snapshot: what the first tracker that answers knows.
        unreached: nodes of it that do not answer from here, each with the reason.
    """

    version: str
    now: datetime
    libraries: tuple[Library, ...] = ()
    device: Device = field(default_factory=Device)
    kernels: Kernels = field(default_factory=Kernels)
    ports: tuple[Port, ...] = ()
    folders: tuple[Folder, ...] = ()
    variables: tuple[str, ...] = ()
    known_variables: tuple[str, ...] = ()
    settings_error: str | None = None
    mesh: MeshFiles = field(default_factory=lambda: MeshFiles(Path()))
    trackers: tuple[TrackerFact, ...] = ()
    no_tracker: str | None = None
    snapshot: Snapshot | None = None
    unreached: dict[str, str] = field(default_factory=dict)
    model: ModelFact | None = None
