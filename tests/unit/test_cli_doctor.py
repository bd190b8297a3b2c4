"""`meshnet doctor`: what is broken on purpose is found, and each finding says what to do."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from typer.testing import CliRunner

from announcements import node, shard, snapshot
from app_thread import serving_app
from meshnet_cli import doctor_gather
from meshnet_cli.doctor_checks import CHECKS, findings
from meshnet_cli.doctor_facts import Device, Facts, Folder, Kernels, Library, MeshFiles, ModelFact, Port, TrackerFact
from meshnet_cli.doctor_findings import Level
from meshnet_cli.main import app
from meshnet_core import __version__, certificates
from meshnet_core.mesh_folder import MeshFolder
from meshnet_node import device_choice, step_kernels
from meshnet_node.step_kernels import KernelsHere

NOW = datetime(2026, 5, 1, tzinfo=UTC)
WHERE = Path("/mesh")
TRACKER = TrackerFact("http://10.0.0.5:7400", "0.1.0", 0.2)
WELL = Facts(
    "0.1.0",
    NOW,
    libraries=(Library("torch", "2.13.0", "<2.14,>=2.9", True, True), Library("transformers", "5.24.0", "", True)),
    device=Device("cpu", 8 << 30),
    kernels=Kernels("/usr/bin/cc"),
    ports=(Port(7400, "meshnet tracker"),),
    folders=(Folder(Path("/cache"), "MESHNET_CACHE", 20 << 30),),
    variables=("MESHNET_CACHE",),
    known_variables=("MESHNET_CACHE", "MESHNET_HOME"),
    mesh=MeshFiles(WHERE, True, certificate_ends=NOW + timedelta(200), authority_ends=NOW + timedelta(3000)),
    trackers=(TRACKER,),
    snapshot=snapshot(node("a", "0-14"), node("b", "15-29")),
    model=ModelFact("m", 30),
)


def changed(**changes: Any) -> Facts:
    return replace(WELL, **changes)


BROKEN = {
    "torch lacks": (
        changed(libraries=(Library("torch", None, "", False, True),)),
        Level.NOTE,
        r"torch is not installed.*'meshnet\[node\]'",
    ),
    "transformers of another time": (
        changed(libraries=(Library("transformers", "4.0", ">=5.24", False),)),
        Level.WRONG,
        r"transformers is 4.0.*pip install 'transformers>=5.24'",
    ),
    "torch does not load": (
        changed(device=Device(error="torch cannot be imported: libcuda")),
        Level.WRONG,
        r"libcuda.*install a torch that fits",
    ),
    "memory is full": (changed(device=Device("cpu", 1 << 20)), Level.WRONG, r"only 1.0 MiB.*hold fewer layers"),
    "there is no C compiler": (
        changed(kernels=Kernels(error="there is no C compiler on the path")),
        Level.NOTE,
        r"steps on the CPU are slower.*no C compiler on the path.*install a C compiler.*CC",
    ),
    "the C compiler fails": (
        changed(kernels=Kernels("/usr/bin/cc", "cc cannot build them: no math.h")),
        Level.NOTE,
        r"cc cannot build them: no math.h -> name another C compiler with CC",
    ),
    "a port is taken": (
        changed(ports=(Port(7400, "meshnet tracker", "another program"),)),
        Level.NOTE,
        r"port 7400.*meshnet tracker --port N",
    ),
    "the disk is full": (
        changed(folders=(Folder(Path("/cache"), "MESHNET_CACHE", 1 << 20),)),
        Level.WRONG,
        r"only 1.0 MiB are free.*MESHNET_CACHE to a folder on a larger disk",
    ),
    "the cache is read-only": (
        changed(folders=(Folder(Path("/cache"), "MESHNET_CACHE", 0, "it may not be written to"),)),
        Level.WRONG,
        r"/cache cannot be used.*set MESHNET_CACHE",
    ),
    "a variable is mistyped": (
        changed(variables=("MESHNET_CAHCE",)),
        Level.WRONG,
        r"MESHNET_CAHCE is set.*did you mean MESHNET_CACHE\?",
    ),
    "the settings are wrong": (
        changed(settings_error="config.toml: unknown key 'prot'"),
        Level.WRONG,
        r"unknown key 'prot'.*MESHNET_CONFIG",
    ),
    "a file of the mesh lacks": (
        changed(mesh=MeshFiles(WHERE, True, missing=("key.pem",))),
        Level.WRONG,
        r"/mesh lacks key.pem.*meshnet join TICKET",
    ),
    "a key is open to others": (
        changed(mesh=MeshFiles(WHERE, True, readable_by_others=("key.pem",))),
        Level.WRONG,
        r"other users.*chmod 600 /mesh/key.pem",
    ),
    "the certificate ended": (
        changed(mesh=MeshFiles(WHERE, True, certificate_ends=NOW - timedelta(1))),
        Level.WRONG,
        r"ended on 2026-04-30.*meshnet mesh ticket",
    ),
    "the certificate ends soon": (
        changed(mesh=MeshFiles(WHERE, True, certificate_ends=NOW + timedelta(3))),
        Level.NOTE,
        r"ends on 2026-05-04.*meshnet mesh ticket",
    ),
    "the authority ended": (
        changed(mesh=MeshFiles(WHERE, True, authority_ends=NOW - timedelta(1))),
        Level.WRONG,
        r"the authority's certificate ended.*meshnet mesh create",
    ),
    "the tracker is gone": (
        changed(trackers=(replace(TRACKER, error="Connection refused"),)),
        Level.WRONG,
        r"does not answer: Connection refused.*start it with `meshnet tracker`",
    ),
    "Redis is gone": (
        changed(trackers=(replace(TRACKER, registry="unreachable"),)),
        Level.WRONG,
        r"does not reach its Redis.*start that Redis again",
    ),
    "the clock is wrong": (
        changed(trackers=(replace(TRACKER, ahead_s=-600.0),)),
        Level.WRONG,
        r"600 s behind.*timedatectl",
    ),
    "a node does not answer": (
        changed(unreached={"a": "Connection refused"}),
        Level.WRONG,
        r"node a at .* does not answer from here.*firewall",
    ),
    "a node is announced on loopback": (
        changed(snapshot=snapshot(node("a", "0-14", url="http://127.0.0.1:7410"), node("b", "15-29"))),
        Level.WRONG,
        r"node a is announced at http://127.0.0.1:7410.*--host 0.0.0.0",
    ),
    "a node speaks another protocol": (
        changed(snapshot=snapshot(node("a", "0-29"), node("b", "15-29", protocol_min=7, protocol_max=8))),
        Level.WRONG,
        r"node b speaks wire protocol 7-8.*upgrade this machine",
    ),
    "versions differ": (
        changed(trackers=(replace(TRACKER, version="0.0.9"),)),
        Level.NOTE,
        r"runs 0.0.9.*pip install --upgrade",
    ),
    "contents differ": (
        changed(snapshot=snapshot(node("a", "0-29"), node("b", shard("15-29", fingerprint="f2")))),
        Level.WRONG,
        r"different contents \(f1, f2\).*the same files",
    ),
    "layers lack": (
        changed(snapshot=snapshot(node("a", "0-14"))),
        Level.WRONG,
        r"layers 15-29 of m.*meshnet node MODEL --layers 15-29",
    ),
    "the model lacks": (
        changed(model=ModelFact("m", error="no such model folder")),
        Level.WRONG,
        r"no such model folder.*a GGUF file",
    ),
    "no tracker is known": (changed(no_tracker="none is known"), Level.NOTE, r"none is known.*--tracker URL"),
}


@pytest.mark.parametrize(("facts", "level", "told"), BROKEN.values(), ids=BROKEN)
def test_each_thing_that_is_broken_is_found_with_its_remedy_and_nothing_else(
    facts: Facts, level: Level, told: str
) -> None:
    (found,) = [one for one in findings(facts) if one.level is not Level.OK]
    assert found.level is level
    assert re.search(told, f"{found.what} -> {found.remedy}"), found


def test_where_all_is_well_each_check_says_so_once() -> None:
    found = findings(WELL)
    assert [one.check for one in found] == [check.name for check in CHECKS]
    assert {one.level for one in found} == {Level.OK}


def test_steps_that_cannot_be_native_are_nothing_to_mend() -> None:
    for kernels, said in (
        (Kernels("/usr/bin/cc"), "native where the model's layers allow it, built by /usr/bin/cc"),
        (Kernels(no_use="native steps are for CPUs, not for cuda"), "plain: native steps are for CPUs, not for cuda"),
        (Kernels(), "not looked at"),
    ):
        (found,) = [one for one in findings(changed(kernels=kernels)) if one.check == "steps"]
        assert (found.level, found.what) == (Level.OK, said)


CPU, CACHE = Device("cpu", 8 << 30), Folder(Path("/cache"), "MESHNET_CACHE", 20 << 30)


@pytest.mark.parametrize("compiles", [True, False])
def test_kernels_are_built_and_checked_where_they_are_of_use(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    built: Any = KernelsHere(object()) if compiles else KernelsHere(None, "cc cannot build them")  # type: ignore[arg-type]
    monkeypatch.setattr(device_choice, "choose_dtype", lambda *_: torch.bfloat16)
    monkeypatch.setattr(step_kernels, "compiler", lambda: ["/usr/bin/my cc", "-O1"])
    monkeypatch.setattr(step_kernels, "kernels_here", lambda: built)
    found = doctor_gather._kernels(CPU, CACHE)
    assert found == Kernels("'/usr/bin/my cc' -O1", None if compiles else "cc cannot build them")


def test_kernels_are_not_built_where_nothing_would_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> KernelsHere:
        raise AssertionError("nothing is to be built")

    monkeypatch.setattr(step_kernels, "kernels_here", build)
    assert doctor_gather._kernels(Device(), CACHE) == Kernels()  # no torch
    assert doctor_gather._kernels(CPU, replace(CACHE, error="it may not be written to")) == Kernels()
    assert "not for cuda" in doctor_gather._kernels(Device("cuda:0", 8 << 30), CACHE).no_use
    monkeypatch.setattr(device_choice, "choose_dtype", lambda *_: torch.float32)
    assert "quicker in float32" in doctor_gather._kernels(CPU, CACHE).no_use
    monkeypatch.setattr(device_choice, "choose_dtype", lambda *_: torch.bfloat16)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert doctor_gather._kernels(CPU, CACHE) == Kernels(error="CC names no-such-compiler, which is not on the path")


def examined(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.stdout


def scripted_mesh(late: timedelta) -> web.Application:
    """A tracker whose clock is wrong and whose Redis is gone, in a mesh in which much else is."""
    there = snapshot(
        node("a", "0-9", url="http://127.0.0.1:1"),
        node("b", shard("0-9", fingerprint="f2"), url="http://192.0.2.1:7410", protocol_min=7, protocol_max=8),
    )

    async def healthz(_: web.Request) -> web.Response:
        date = (datetime.now(UTC) - late).strftime("%a, %d %b %Y %H:%M:%S GMT")
        told = {"status": "degraded", "version": __version__, "nodes": 2, "registry": {"reachable": False}}
        return web.json_response(told, headers={"Date": date})

    async def known(_: web.Request) -> web.Response:
        return web.json_response(there.to_wire() | {"trackers": [], "registry": "unreachable"})

    served = web.Application()
    served.add_routes([web.get("/healthz", healthz), web.get("/v1/snapshot", known)])
    return served


def test_ten_and_more_things_broken_at_once_on_a_real_machine_are_all_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = MeshFolder(tmp_path / "mesh")
    folder.create("home", "desk")
    authority = folder.authority()
    assert authority is not None
    request = certificates.make_request(folder.key_path.read_bytes(), "desk")
    folder.renew(authority.sign(request, datetime.now(UTC) - timedelta(800)))  # ended more than a year ago
    folder.key_path.chmod(0o644)
    (tmp_path / "cache").write_text("a file where a folder should be")
    monkeypatch.setenv("MESHNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MESHNET_CAHCE", "x")
    monkeypatch.setattr(doctor_gather, "TIMEOUT_S", 0.5)
    with serving_app(scripted_mesh(timedelta(hours=1))) as url:
        code, out = examined(
            *("--tracker", f"{url},http://127.0.0.1:1", "--mesh", str(folder.path)),
            *("--model", str(tmp_path / "none"), "--device", "cuda:63", "--json"),
        )
    assert code == 1
    document = json.loads(out)
    told = [f"{one['what']} -> {one['remedy']}" for one in document["findings"] if one["level"] == "wrong"]
    assert len(told) == document["wrong"]
    for expected in (
        r"device 'cuda:63' is not on this machine.*--device",
        r"cache cannot be used.*MESHNET_CACHE",
        r"MESHNET_CAHCE is set.*did you mean MESHNET_CACHE",
        r"can read .*key.pem.*chmod 600",
        r"certificate ended on .*join again",
        r"tracker at http://127.0.0.1:1 does not answer.*meshnet tracker",
        r"does not reach its Redis.*--registry",
        r"clock is 3\d\d\d s ahead.*NTP",
        r"node a is announced at http://127.0.0.1:1,.*--advertise",
        r"node b at http://192.0.2.1:7410 does not answer from here.*firewall",
        r"node b speaks wire protocol 7-8.*upgrade",
        r"nodes hold m with different contents.*same files",
        r"layers .* of m are served by no node.*--layers",
        r"no such model folder.*GGUF",
    ):
        assert any(re.search(expected, one) for one in told), (expected, told)


def test_a_taken_port_is_told_unless_it_is_meshnets_own() -> None:
    async def ports(*numbers: int) -> list[str | None]:
        facts = await doctor_gather.gather(
            (),
            MeshFolder(Path("/nonexistent")),
            model=None,
            device="cpu",
            known_variables=(),
            ports=[(number, "meshnet node") for number in numbers],
        )
        return [port.held_by for port in facts.ports]

    with socket.create_server(("127.0.0.1", 0)) as server, serving_app(scripted_mesh(timedelta())) as url:
        doctor_gather_timeout, doctor_gather.TIMEOUT_S = doctor_gather.TIMEOUT_S, 0.5
        try:
            held = asyncio.run(ports(server.getsockname()[1], int(url.rpartition(":")[2])))
        finally:
            doctor_gather.TIMEOUT_S = doctor_gather_timeout
    assert held == ["another program", None]


def test_people_get_lines_and_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_CAHCE", "x")
    code, out = examined("--mesh", str(tmp_path), "--device", "cpu")
    assert code == 1
    assert re.search(r"wrong settings: MESHNET_CAHCE is set.*\n +-> did you mean MESHNET_CACHE\?", out)
    assert out.splitlines()[-1] == "1 thing is wrong"
