"""The wheel, built here, installed in an empty environment and run outside the checkout.

No registry is needed: the build uses the build tools that are installed, and the empty environment gets links to those
libraries of the one that runs the tests that the wheel requires, and to no others: neither to torch nor to its meshnet.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from contextlib import ExitStack
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from meshnet_core import __version__
from meshnet_process import MESHNET, running
from tiny_models import save_tiny
from tiny_tokenizers import byte_level_files

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
    """The Python of an environment that holds the wheel and what it requires without an extra, and nothing else."""
    environment = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120)
    python = environment / "bin" / "python"
    pip(python, "install", "--no-deps", "--no-index", str(wheel))
    (site,) = environment.glob("lib/python*/site-packages")
    for library in sorted(required_by("meshnet", [site])):
        link(distribution(library), site)
    return python


def pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--python", str(python), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=clean())


def clean() -> dict[str, str]:
    """This environment's variables, but for those that tell Python where to look."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def required_by(name: str, places: list[Path] | None = None) -> set[str]:
    """All that a distribution requires without an extra, and what that requires in turn."""
    found: set[str] = set()
    (root,) = distributions(name=name, path=[str(place) for place in places or ()])
    waiting = [(requirement, "") for requirement in root.requires or ()]
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            if (key := f"{canonicalize_name(requirement.name)}[{wanted}]") not in found:
                found.add(key)
                waiting += [(further, wanted) for further in distribution(requirement.name).requires or ()]
    return {key.partition("[")[0] for key in found}


def link(library: Distribution, site: Path) -> None:
    """Put what a distribution installed into ``site``, without a copy."""
    for top in {file.parts[0] for file in library.files or () if file.parts[0] not in {"..", "__pycache__"}}:
        if not (site / top).exists():
            (site / top).symlink_to(Path(str(library.locate_file(top))))


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


def test_it_says_all_that_it_needs(installed: Path) -> None:
    assert "No broken requirements found" in pip(installed, "check").stdout


@pytest.mark.parametrize("module", ["torch", "safetensors.torch", "gguf", "psutil", "pytest"])
def test_the_environment_is_empty_of_all_else(installed: Path, module: str) -> None:
    """What the tests below show of it, they show without torch."""
    done = subprocess.run([installed, "-I", "-c", f"import {module}"], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in done.stderr


def test_it_runs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [str(installed.with_name("meshnet")), *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60, env=clean()
        )
        return done.stdout

    assert run("--version") == f"meshnet {__version__}\n"
    assert "chat" in run("--help")


def test_its_tracker_and_gateway_serve_a_chat_without_torch(installed: Path, tmp_path: Path) -> None:
    """The node alone is this environment's."""
    model = save_tiny("llama", tmp_path / "tiny", vocab_size=512)
    for name, content in byte_level_files().items():
        if name.startswith("tokenizer"):
            (model / name).write_bytes(content)
    program = (str(installed), "-I", str(installed.with_name("meshnet")))
    with ExitStack() as closing:

        def start(name: str, *arguments: str, program: tuple[str, ...] = program) -> str:
            log = tmp_path / f"{name}.log"
            return closing.enter_context(running(log, *arguments, program=program)).ready()

        tracker = start("tracker", "tracker", "--port", "0")
        node = ("node", str(model), "--layers", "0-3", "--tracker", tracker, "--port", "0")
        start("node", *node, program=MESHNET)
        api = start("gateway", "gateway", "--tracker", tracker, "--port", "0")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        answer = httpx.post(f"{api}/chat/completions", json=body, timeout=60, trust_env=False).json()
        assert "usage" in answer, answer
    assert answer["usage"]["completion_tokens"] == 5
    for name in ("tracker", "gateway"):
        assert "Traceback" not in (tmp_path / f"{name}.log").read_text()
