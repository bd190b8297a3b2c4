"""What `deploy/` holds, as far as it can be checked without running it: units, image, compose file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from documents import ROOT, Command, parsed

DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MOST_EXPOSED = 45
"""In tenths, of 100: what `systemd-analyze security` calls medium begins at 50."""

systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")


@pytest.fixture(params=UNITS, ids=lambda unit: unit.name)
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One of the units, with a program that is there in place of meshnet."""
    program = shutil.which("true")
    assert program is not None
    there: Path = tmp_path / request.param.name
    there.write_text(request.param.read_text().replace("/opt/meshnet/bin/meshnet", program))
    return there


@systemd
def test_a_unit_is_one_that_systemd_takes(unit: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@systemd
def test_a_unit_is_hardened(unit: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={MOST_EXPOSED}", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


@pytest.mark.parametrize("unit_file", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_a_command_of_the_program(unit_file: Path) -> None:
    text = unit_file.read_text()
    part = unit_file.stem.removeprefix("meshnet-")
    settings = dict(re.findall(r"^(\w+)=(.*)$", (unit_file.parent / f"{part}.env").read_text(), re.MULTILINE))
    started = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert started is not None
    line = re.sub(r"\$\{?(\w+)\}?", lambda name: settings[name[1]], started[1])
    assert parsed(Command(unit_file.name, line)) == part
    # The settings' file tells further options in a comment: they are options too.
    for example in re.findall(
        r"^# More options, such as: (.*)$", (unit_file.parent / f"{part}.env").read_text(), re.MULTILINE
    ):
        parsed(Command(unit_file.name, f"{line} {example}"))


def test_the_image_is_one_that_hadolint_takes() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("there is no hadolint here")
    done = subprocess.run(
        [hadolint, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_what_the_image_copies_is_there_and_it_runs_as_nobody_in_particular() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE)]
    assert all((ROOT / name).exists() for names in copied for name in names)
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["1000"]


@pytest.mark.parametrize("broken", [False, True])
def test_the_compose_file_is_one_by_the_schema_of_compose_files(broken: bool, tmp_path: Path) -> None:
    checker = Path(sys.executable).with_name("check-jsonschema")
    if not checker.exists():
        pytest.skip("there is no check-jsonschema here")
    text = (DEPLOY / "compose.yaml").read_text()
    (file := tmp_path / "compose.yaml").write_text(text.replace("    hostname:", "    hostnaem:") if broken else text)
    command = [checker, "--builtin-schema", "vendor.compose-spec", file]  # within its wheel; nothing is fetched
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode != 0) is broken, done.stdout
    assert ("hostnaem" in done.stdout) is broken


def test_the_compose_file_starts_commands_of_the_program_in_containers_that_fit_together() -> None:
    services = COMPOSE["services"]
    assert set(services) == {"tracker", "node-a", "node-b", "gateway"}
    for name, service in services.items():
        assert set(service.get("depends_on", [])) <= set(services)
        assert {volume.split(":")[0] for volume in service["volumes"]} <= set(COMPOSE["volumes"])
        assert service["hostname"] == name
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        script = service["command"][0].replace("$$", "$").replace("$MODEL", "some/model").replace("$(hostname)", name)
        run = re.findall(r"(?:exec |\|\| |until |^)(meshnet .*?)(?: [<>] .*)?(?:; do .*)?$", script, re.MULTILINE)
        assert len(run) == script.count("meshnet ")
        for line in run:
            parsed(Command(f"compose.yaml, {name}", line))
    # What the tracker tells the others to dial is a container's name.
    assert "https://tracker:7400" in services["tracker"]["command"][0]
    assert services["gateway"]["ports"] == ["8000:8000"]
