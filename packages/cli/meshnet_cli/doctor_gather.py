"""Gathers what `meshnet doctor` judges: looks at this machine, its files, trackers and nodes. Judges nothing."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import socket
import ssl
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import aiohttp

from meshnet_cli import find_trackers, options
from meshnet_cli.doctor_facts import Device, Facts, Folder, Kernels, Library, MeshFiles, ModelFact, Port, TrackerFact
from meshnet_core import __version__, certificates
from meshnet_core.connection_words import connection_words
from meshnet_core.errors import MeshnetError
from meshnet_core.membership import Snapshot
from meshnet_core.mesh_folder import MeshFolder
from meshnet_core.tracker_client import TrackerClient

TIMEOUT_S = 3.0  # for each tracker and node
PORTS = (
    (options.DEFAULT_TRACKER_PORT, "meshnet tracker"),
    (options.FIRST_NODE_PORT, "meshnet node"),
    (options.DEFAULT_GATEWAY_PORT, "meshnet gateway"),
)


async def gather(
    trackers: Sequence[str],
    folder: MeshFolder,
    *,
    model: str | None,
    device: str,
    known_variables: Sequence[str],
    settings_error: str | None = None,
    ports: Sequence[tuple[int, str]] = PORTS,
) -> Facts:
    """Everything there is to know; what cannot be known is told as a fact too, and nothing is raised for it.

    Args:
        trackers: addresses; where none are given those remembered in ``folder``, or on a machine in no mesh those that
            it runs for itself.
        folder: with this machine's place in a mesh, which need not be there.
        model: MODEL, to be opened; None for none.
        device: as given with ``--device``.
        known_variables: names of the environment variables that are read.
        settings_error: what is wrong with the settings' file.
        ports: to look at, each with the command that takes it.
    """
    files, tls = _mesh_files(folder)
    urls, no_tracker = _addresses(trackers, folder)
    if not urls and not files.there and (here := await find_trackers.of_this_machine()):
        urls, no_tracker = here, None
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(ssl=tls or True)) as http:
        found = await asyncio.gather(*(_tracker(http, url) for url in urls))
        snapshot = await _snapshot([one.url for one in found if one.error is None], tls)
        unreached = await _unreached(http, snapshot)
        held = await asyncio.gather(*(_port(http, number, command) for number, command in ports))
    on, cache = _device(device), _cache_folder()
    return Facts(
        version=__version__,
        now=datetime.now(UTC),
        libraries=_libraries(),
        device=on,
        kernels=_kernels(on, cache),
        ports=tuple(held),
        folders=(cache,),
        variables=tuple(sorted(name for name in os.environ if name.startswith("MESHNET_"))),
        known_variables=tuple(known_variables),
        settings_error=settings_error,
        mesh=files,
        trackers=tuple(found),
        no_tracker=no_tracker,
        snapshot=snapshot,
        unreached=unreached,
        model=None if model is None else _model(model),
    )


def _libraries() -> tuple[Library, ...]:
    """What the installed meshnet asks for; without its metadata, in a checkout say, nothing can be told."""
    from packaging.requirements import Requirement

    try:
        required = [Requirement(line) for line in metadata.requires("meshnet") or ()]
    except metadata.PackageNotFoundError:
        return ()
    found = []
    for one in required:
        nodes = one.marker is not None and "extra" in str(one.marker)
        if one.marker is not None and not one.marker.evaluate({"extra": "node"}):
            continue
        try:
            version = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            found.append(Library(one.name, None, str(one.specifier), fits=False, needed_by_nodes_alone=nodes))
            continue
        fits = one.specifier.contains(version, prereleases=True)
        found.append(Library(one.name, version, str(one.specifier), fits, needed_by_nodes_alone=nodes))
    return tuple(found)


def _device(wanted: str) -> Device:
    try:
        from meshnet_node.device_choice import choose_device
        from meshnet_node.device_memory import free_bytes
    except ImportError as error:
        missing = error.name in {"torch", "psutil"}  # a machine without nodes; the libraries tell that
        return Device() if missing else Device(error=f"torch cannot be imported: {error}")
    except OSError as error:  # a shared library that lacks or does not fit
        return Device(error=f"torch cannot be imported: {error}")
    try:
        device = choose_device(wanted)
        return Device(str(device), free_bytes(device))
    except MeshnetError as error:
        return Device(error=error.message)
    except RuntimeError as error:  # the driver's
        return Device(error=f"device {wanted} cannot be used: {error}")


def _kernels(device: Device, cache: Folder) -> Kernels:
    """Built and checked, in a second or two, unless a node has done so; what is wrong with device or folder is told of
    them."""
    if not device.name or cache.error is not None:
        return Kernels()
    import torch

    from meshnet_node.device_choice import choose_dtype, dtype_name
    from meshnet_node.step_kernels import compiler, kernels_here

    on = torch.device(device.name)
    if on.type != "cpu":
        return Kernels(no_use=f"native steps are for CPUs, not for {on.type}")
    if (dtype := choose_dtype("auto", on, torch.bfloat16)) is not torch.bfloat16:
        return Kernels(no_use=f"native steps are in bfloat16, and this CPU is quicker in {dtype_name(dtype)}")
    try:
        command = shlex.join(compiler())
    except MeshnetError as error:
        return Kernels(error=error.message)
    found = kernels_here()
    return Kernels(command, None if found.kernels is not None else found.reason)


async def _port(http: aiohttp.ClientSession, number: int, command: str) -> Port:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.LOOPBACK, number))
        except PermissionError:
            return Port(number, command, "nobody, but this user may not have it")
        except OSError:
            ours = await _is_meshnet(http, number)
            return Port(number, command, None if ours else "another program")
    return Port(number, command)


async def _is_meshnet(http: aiohttp.ClientSession, number: int) -> bool:
    for scheme in ("http", "https"):
        try:
            async with http.get(f"{scheme}://{options.LOOPBACK}:{number}/healthz") as response:
                told = await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            continue
        if isinstance(told, dict) and ("version" in told or "boot" in told):
            return True
    return False


def _cache_folder() -> Folder:
    from meshnet_node.cache_folder import default_cache_dir

    try:
        path = default_cache_dir()
    except MeshnetError as error:
        return Folder(Path(os.environ.get("MESHNET_CACHE", "~/.cache")), "MESHNET_CACHE", error=error.message)
    there = next((one for one in (path, *path.parents) if one.exists()), Path("/"))
    if not there.is_dir():
        return Folder(path, "MESHNET_CACHE", error=f"{there} is no folder")
    if not os.access(there, os.W_OK):
        return Folder(path, "MESHNET_CACHE", error=f"{there} may not be written to")
    return Folder(path, "MESHNET_CACHE", shutil.disk_usage(there).free)


def _mesh_files(folder: MeshFolder) -> tuple[MeshFiles, ssl.SSLContext | None]:
    paths = (folder.authority_path, folder.certificate_path, folder.key_path)
    if not any(path.exists() for path in paths):
        return MeshFiles(folder.path), None
    keys = (folder.key_path, folder.authority_key_path)
    files: dict[str, Any] = {
        "there": True,
        "missing": tuple(path.name for path in paths if not path.exists()),
        "readable_by_others": tuple(key.name for key in keys if key.exists() and key.stat().st_mode & 0o077),
    }
    tls = None
    try:
        if folder.certificate_path.exists():
            files["certificate_ends"] = certificates.expires_at(folder.certificate_path.read_bytes())
        if folder.authority_path.exists():
            files["authority_ends"] = certificates.expires_at(folder.authority_path.read_bytes())
        if not files["missing"]:
            tls = folder.credentials().client_context()
    except MeshnetError as error:
        files["error"] = error.message
    except (OSError, ValueError) as error:
        files["error"] = f"files in {folder.path} cannot be read: {error}"
    return MeshFiles(folder.path, **files), tls


def _addresses(given: Sequence[str], folder: MeshFolder) -> tuple[list[str], str | None]:
    if given:
        return list(given), None
    try:
        known = list(folder.trackers())
    except MeshnetError as error:
        return [], error.message
    return known, None if known else "no tracker is known here, so that no mesh was looked at"


async def _tracker(http: aiohttp.ClientSession, url: str) -> TrackerFact:
    try:
        async with http.get(f"{url}/healthz") as response:
            told, date = await response.json(), response.headers.get("Date")
            arrived = time.time()
    except TimeoutError:
        return TrackerFact(url, error=f"no answer within {TIMEOUT_S:g} s")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return TrackerFact(url, error=connection_words(error))
    if not isinstance(told, dict) or "nodes" not in told:
        return TrackerFact(url, error=f"what answers there is no tracker (status {response.status})")
    registry = told.get("registry")
    reachable = registry.get("reachable") if isinstance(registry, dict) else None
    return TrackerFact(
        url,
        str(told.get("version")),
        None if date is None else arrived - parsedate_to_datetime(date).timestamp(),
        "none" if reachable is None else "reachable" if reachable is True else "unreachable",
    )


async def _snapshot(urls: Sequence[str], tls: ssl.SSLContext | None) -> Snapshot | None:
    for url in urls:
        try:
            client = TrackerClient(url, timeout_s=TIMEOUT_S, tls=tls if url.startswith("https://") else None)
        except MeshnetError:
            continue
        try:
            return await client.snapshot()
        except MeshnetError:
            continue
        finally:
            await client.close()
    return None


async def _unreached(http: aiohttp.ClientSession, snapshot: Snapshot | None) -> dict[str, str]:
    async def why(url: str) -> str | None:
        try:
            async with http.get(f"{url}/healthz") as response:
                return None if response.status == 200 else f"status {response.status}"
        except TimeoutError:
            return f"no answer within {TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return connection_words(error)

    nodes = snapshot.nodes if snapshot is not None else ()
    reasons = await asyncio.gather(*(why(node.url) for node in nodes))
    return {node.node_id: reason for node, reason in zip(nodes, reasons, strict=True) if reason is not None}


def _model(model: str) -> ModelFact:
    from meshnet_node.model_files import open_model

    try:
        files = open_model(model)
    except MeshnetError as error:
        return ModelFact(model, error=error.message)
    return ModelFact(files.name, files.num_layers)
