"""What `meshnet doctor` makes of the facts about this machine itself. Pure; asks nobody and reads no file."""

from __future__ import annotations

import difflib
from datetime import timedelta

from meshnet_cli.doctor_facts import Facts
from meshnet_cli.doctor_findings import Check, Level, Objections
from meshnet_cli.status import megabytes

LEAST_DISK = 2 << 30  # bytes: a small model converted
LEAST_MEMORY = 1 << 30
SOON = timedelta(days=14)  # a running process renews months before


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


def _libraries_fine(facts: Facts) -> str:
    shown = [one for one in facts.libraries if one.name in {"torch", "transformers"}]
    return ", ".join(f"{one.name} {one.version}" for one in shown) or "not looked at"


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


def _device_fine(facts: Facts) -> str:
    device = facts.device
    return f"{device.name}, {megabytes(device.free_bytes)} free" if device.name else "not looked at"


def _steps(facts: Facts) -> Objections:
    kernels = facts.kernels
    if kernels.error is not None:
        yield (
            Level.NOTE,
            f"decode steps on the CPU are slower than they could be: {kernels.error}",
            "name another C compiler with CC"
            if kernels.compiler
            else "install a C compiler, gcc or clang, or name yours with CC",
        )


def _steps_fine(facts: Facts) -> str:
    kernels = facts.kernels
    if kernels.no_use:
        return f"plain: {kernels.no_use}"
    return (
        f"native where the model's layers allow it, built by {kernels.compiler}"
        if kernels.compiler
        else "not looked at"
    )


def _ports(facts: Facts) -> Objections:
    for port in facts.ports:
        if port.held_by is not None:
            yield (
                Level.NOTE,
                f"port {port.number}, where {port.command} listens, is taken by {port.held_by}",
                f"end that, or choose another port: {port.command} --port N",
            )


def _ports_fine(facts: Facts) -> str:
    return f"{', '.join(str(port.number) for port in facts.ports)} are free or meshnet's"


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


def _disk_fine(facts: Facts) -> str:
    return ", ".join(f"{megabytes(one.free_bytes)} free for {one.path}" for one in facts.folders)


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


def _settings_fine(facts: Facts) -> str:
    return ", ".join(facts.variables) or "none in the environment"


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


def _identity_fine(facts: Facts) -> str:
    mesh = facts.mesh
    if not mesh.there or mesh.certificate_ends is None:
        return "in no mesh with certificates"
    return f"certificate in {mesh.path} until {mesh.certificate_ends:%Y-%m-%d}, renewed before by itself"


CHECKS = (
    Check("libraries", _libraries, _libraries_fine),
    Check("device", _device, _device_fine),
    Check("steps", _steps, _steps_fine),
    Check("ports", _ports, _ports_fine),
    Check("disk", _disk, _disk_fine),
    Check("settings", _settings, _settings_fine),
    Check("identity", _identity, _identity_fine),
)
