"""How the commands of each page of the docs are typed: on which host, what the text supposes, and what no test can
type, with the reason. `tests/unit/test_documents.py` holds all of it against the pages."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from documents import ROOT, bare, commands

README_SECTIONS = ("Use it", "Two nodes by hand", "Two machines")
"""Those whose commands `tests/e2e/test_readme.py` types, all of them."""

Lines = tuple[tuple[str, str], ...]
"""(host, line), as typed one after another."""


@dataclass(frozen=True)
class Step:
    """How one block of a page is typed.

    Attributes:
        host: where, if comments within the block do not say it.
        before: what the text supposes was typed earlier.
        others: a line of the block -> the host that it alone is typed on.
        anew: whether all that runs is stopped first, since the block does the same in another way.
    """

    host: str = "kitchen"
    before: Lines = ()
    others: dict[str, str] = field(default_factory=dict)
    anew: bool = False


@dataclass(frozen=True)
class Scene:
    """How a page is typed.

    Attributes:
        steps: one for each of its blocks.
        models: folders that it names -> the family of the tiny model that is put there.
    """

    steps: tuple[Step, ...]
    models: dict[str, str] = field(default_factory=dict)


_CREATE: Lines = (("kitchen", "meshnet mesh create"),)
_TRACKER: Lines = (("kitchen", "meshnet tracker --host 0.0.0.0"),)
_STUDY_JOINS: Lines = (("kitchen", "meshnet mesh ticket"), ("study", "meshnet join TICKET"))
_SECOND_TRACKER: Lines = (("study", "meshnet tracker --host 0.0.0.0 --registry redis://10.0.0.5:6379/0"),)
_REDIS: Lines = (("kitchen", "redis-server --bind 0.0.0.0 --protected-mode no --save ''"),)

SCENES: dict[str, Scene] = {
    "docs/benchmarks.md": Scene((Step(),)),
    "docs/guides/clients.md": Scene((Step(before=(("kitchen", "meshnet up smollm2"),)),)),
    "docs/guides/firewall.md": Scene(
        (Step(before=_CREATE), Step(anew=True), Step(), Step(anew=True, before=_TRACKER)),
    ),
    "docs/guides/mixed-devices.md": Scene(
        (Step(before=_CREATE + _TRACKER), Step()),
        models={"Qwen/Qwen3-4B": "qwen3"},
    ),
    "docs/guides/services.md": Scene((Step(), Step())),
    "docs/guides/several-trackers.md": Scene(
        (Step(before=_REDIS + _CREATE), Step(before=_STUDY_JOINS + _SECOND_TRACKER)),
    ),
    "docs/guides/two-machines.md": Scene((Step(), Step(), Step("study"), Step(), Step("study"), Step())),
    "docs/observability.md": Scene((Step(before=_CREATE + _TRACKER), Step(anew=True, before=_TRACKER))),
    "docs/placement.md": Scene(
        (Step(before=_CREATE + _TRACKER), Step()),
        models={"Qwen2.5-7B-Instruct": "qwen2"},
    ),
    "docs/security.md": Scene((Step(others={"meshnet join TICKET": "study"}),)),
    "docs/tracker-api.md": Scene((Step(),)),
}

STAND_INS = {"10.0.0.5": "kitchen", "10.0.0.6": "study", "--memory 12GiB": "--memory 512MiB"}
"""What a reader has and a test may not have -> what is typed for it."""

_BENCHMARK = "minutes to half an hour of a quiet machine; its parts have tests of their own (test_bench_*.py)"
_ROOT = "would change users, services or /opt of the machine that runs the tests"
_ENGINE = "needs a container engine; deploy/ is checked by test_deploy.py"
EXCUSES: dict[str, str] = {
    'make demo PROMPT="What is the Moon?"': "installs; its program is run by test_demo.py, its installing by "
    "test_makefile.py",
    "make test": "is what runs the quick tests",
    "make bench": _BENCHMARK,
    'make bench ARGS="--only 1,2"': _BENCHMARK,
    'make bench ARGS="--peers"': _BENCHMARK,
    "make gpu-check": "needs a CUDA device, and says so where there is none",
    "meshnet node Qwen/Qwen3-4B --layers auto --host 0.0.0.0 --device cuda:1": "needs two CUDA devices",
    "sudo useradd --system --home-dir /var/lib/meshnet --create-home meshnet": _ROOT,
    "sudo python3 -m venv /opt/meshnet": _ROOT,
    "sudo /opt/meshnet/bin/pip install '.[node]'": _ROOT,
    "sudo -u meshnet MESHNET_HOME=/var/lib/meshnet /opt/meshnet/bin/meshnet join TICKET": _ROOT,
    "sudo install -m 644 deploy/systemd/meshnet-node.service /etc/systemd/system/": _ROOT,
    "sudo install -D -m 600 deploy/systemd/node.env /etc/meshnet/node.env": _ROOT,
    "sudo systemctl enable --now meshnet-node": _ROOT,
    "docker build -f deploy/Dockerfile --build-arg TORCH_INDEX=URL -t meshnet .": _ENGINE,
    "docker compose -f deploy/compose.yaml up": _ENGINE,
    "pip install 'meshnet[traces]'": "would install into the environment of the tests, which has it",
}
"""A line of a page -> why no test types it."""


def typed_pages() -> Iterator[str]:
    """Those that have something to type."""
    for page in SCENES:
        if any(bare(command.text) not in EXCUSES for command in commands(ROOT / page)):
            yield page


def prepare(folder: Path, scene: Scene) -> None:
    """Put what a reader would have where it is typed: models, API keys, a certificate for the API."""
    from tiny_models import save_tiny  # noqa: PLC0415 - torch is not needed to hold the scenes against the pages

    for name, family in scene.models.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_tiny(family, folder / name)
    keys = folder / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{secrets.token_hex(24)}\n")
    certificate = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=kitchen -keyout privkey.pem -out fullchain.pem"
    subprocess.run(["openssl", *certificate.split()], cwd=folder, check=True, capture_output=True)
