"""README as a newcomer takes it: each section's commands are typed as they stand, on hosts that are network namespaces,
with the real SmolLM2; what they say must be what the text promises.

Of other pages only the form of commands is checked (`tests/unit/test_documents.py`): they name machines, models and
files that are a reader's own, or need root or a container engine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import smollm2
from documents import ROOT, sections
from meshnet_process import MESHNET, READY, wait_until
from network_namespaces import Host, hosts, missing

pytestmark = [pytest.mark.long, pytest.mark.real_model, pytest.mark.timeout(900)]

SERVERS = {"up", "tracker", "node", "gateway"}
CALLED = """hostname "$0" && exec "$@" """


@dataclass
class Typist:
    """Types a block's lines on a host: what serves is left running, what ends is waited for."""

    network: Mapping[str, Host]
    folder: Path
    said: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    running: list[tuple[subprocess.Popen[bytes], Path]] = field(default_factory=list)

    def type_block(self, block: str, host: Host) -> None:
        for line in block.splitlines():
            if found := re.fullmatch(r"# on (\w+)", line.strip()):
                host = self.network[found[1]]
            elif line.strip():
                self._type(line.replace("kitchen:", f"{self.network['kitchen'].address}:"), host)

    def _type(self, line: str, host: Host) -> None:
        if found := re.match(r"export (\w+)=(.*)", line):
            told = subprocess.run(["bash", "-c", f"echo {found[2]}"], capture_output=True, text=True, check=True)
            self.environment[found[1]] = told.stdout.strip()
            return
        if re.search(r"\bTICKET\b", line):
            line = re.sub(r"\bTICKET\b", re.findall(r"^meshnet-\S+$", "\n".join(self.said), re.MULTILINE)[-1], line)
        meshnet = " ".join(MESHNET)
        assert line.startswith("meshnet "), line
        script = line.replace("meshnet ", f"exec {meshnet} ", 1)
        script = re.sub(r"&\s*(#.*)?$", "", script)
        command = ["ip", "netns", "exec", host.namespace, "unshare", "--uts", "sh", "-c", CALLED, host.name,
                   "bash", "-c", script]  # fmt: skip
        environment = os.environ | {"MESHNET_HOME": str(host.home), "COLUMNS": "150"} | self.environment
        if line.split()[1] in SERVERS:
            log = self.folder / f"{len(self.running)}.log"
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment
                )
            self.running.append((process, log))
            self._wait_ready(process, log)
            return
        done = subprocess.run(
            command, input="", env=environment, capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}\n{[log.read_text()[-2000:] for _, log in self.running]}"
        self.said.append(done.stdout)

    @staticmethod
    def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> None:
        def said() -> bool:
            assert process.poll() is None, log.read_text()
            return READY.search(log.read_text()) is not None

        wait_until(said, 240)

    def stop(self) -> None:
        for process, _ in reversed(self.running):
            process.terminate()
        deadline = time.monotonic() + 60
        for process, _ in self.running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def typist(folder: Path) -> Iterator[Typist]:
    if (lacks := missing()) is not None:
        pytest.skip(lacks)
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here (Debian: util-linux)")
    smollm2.gguf_path()  # skips where the model is not there
    with hosts(folder, ["kitchen", "study"]) as network:
        one = Typist(network, folder)
        try:
            yield one
        finally:
            one.stop()


@pytest.mark.parametrize("section", ["Use it", "Two nodes by hand", "Two machines"])
def test_a_section_of_the_readme_does_what_it_says(section: str, tmp_path: Path) -> None:
    with typist(tmp_path) as one:
        blocks = sections(ROOT / "README.md")[section]
        assert blocks
        for block in blocks:
            one.type_block(block, one.network["kitchen"])
        answers = [text for text in one.said if text.strip() and not text.startswith("meshnet-")]
        assert answers, one.said
        assert re.search(r"red|blue|green|colou?r", "\n".join(answers), re.IGNORECASE), answers
