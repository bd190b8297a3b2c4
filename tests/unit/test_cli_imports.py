"""What the command line imports: help is quick, and only a node needs torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshnet_core import __version__
from meshnet_process import run


@pytest.mark.parametrize(
    "modules",
    [
        "meshnet_cli.main",
        "meshnet_cli.main, meshnet_cli.local_mesh, meshnet_cli.chat_stream, meshnet_cli.child_progress",
        "meshnet_tracker.server, meshnet_tracker.directory",
        "meshnet_gateway.api, meshnet_gateway.generation, meshnet_gateway.mesh, meshnet_gateway.text_store",
        "meshnet_node.model_files",
    ],
)
def test_no_torch_is_imported_by(modules: str) -> None:
    code = f"import sys, {modules}; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_help_needs_no_server_and_no_model_library() -> None:
    code = (
        "import sys, meshnet_cli.main;"
        "libraries = ('aiohttp', 'fastapi', 'transformers', 'numpy', 'uvicorn', 'cryptography', 'zeroconf');"
        "print([name for name in libraries if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == "[]\n"


def test_a_node_holds_no_grammars_until_an_answer_is_constrained() -> None:
    code = "import sys, meshnet_cli.node_process; raise SystemExit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_version_is_told() -> None:
    assert run("--version").stdout == f"meshnet {__version__}\n"
