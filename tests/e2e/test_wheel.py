"""The wheel, built here, installed in an empty environment and run outside the checkout.

No registry is needed: the build uses the build tools that are installed, and the empty environment sees the libraries
of the one that runs the tests through a path file, but not its meshnet.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

from meshnet_core import __version__
from meshnet_process import READY, wait_until

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("meshnet_core", "meshnet_tracker", "meshnet_node", "meshnet_gateway", "meshnet_cli")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    built = list(out.glob("*.whl"))
    assert [path.name for path in built] == [f"meshnet-{__version__}-py3-none-any.whl"]
    return built[0]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of an environment that holds the wheel."""
    environment = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120)
    python = environment / "bin" / "python"
    site = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    # `site.addsitedir` would read the path files there, and so find the checkout; a plain path does not.
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (site / "libraries.pth").write_text("\n".join(libraries) + "\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    where = subprocess.run(
        [python, "-c", "import meshnet_cli; print(meshnet_cli.__file__)"],
        check=True,
        capture_output=True,
        text=True,
        cwd="/",
    ).stdout.strip()
    assert Path(where).is_relative_to(environment)
    return environment / "bin"


def test_it_holds_the_packages_with_their_types_and_licence_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"meshnet-{__version__}.dist-info/METADATA").decode()
    tops = {name.split("/")[0] for name in names}
    assert tops == {*PACKAGES, f"meshnet-{__version__}.dist-info"}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    torch = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: torch")]
    assert torch
    assert all("extra == 'node'" in line for line in torch)


def test_it_runs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [str(installed / "meshnet"), *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60).stdout

    assert run("--version") == f"meshnet {__version__}\n"
    assert "chat" in run("--help")


def test_its_tracker_serves(installed: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(installed / "meshnet"), "tracker", "--port", "0"], cwd=tmp_path, stdout=file, stderr=file, env=clean
        )
    try:
        wait_until(lambda: READY.search(log.read_text()) is not None)
        found = READY.search(log.read_text())
        assert found is not None
        with urllib.request.urlopen(f"{found[1]}/healthz", timeout=10) as response:  # noqa: S310 - our own tracker
            assert response.status == 200
    finally:
        process.terminate()
        assert process.wait(15) == 0
