"""Children die with their parent, however it goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshnet_cli import lifeline
from meshnet_core.errors import InvalidInputError

CHILD = "from meshnet_cli import lifeline; lifeline.hold_on(); print('on', flush=True); import time; time.sleep(60)"
DEAF_CHILD = (
    "from meshnet_cli import lifeline; import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "lifeline.GRACE_S = 0.2; lifeline.hold_on(); print('on', flush=True); time.sleep(60)"
)
PARENT = """
import sys, time
from pathlib import Path
from meshnet_cli.children import Children
children = Children(Path(sys.argv[1]), program=(sys.executable, "-c"))
print(children.start("child", [sys.argv[2]]).process.pid, flush=True)
time.sleep(60)
"""


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("child", [CHILD, DEAF_CHILD], ids=["polite", "deaf to SIGTERM"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_when_its_parent_is_killed(number: int, child: str, tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), child], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_until(lambda: (tmp_path / "child.log").read_text() == "on\n")
    assert alive(pid)
    parent.send_signal(number)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not alive(pid))


def wait_until(done: object, seconds: float = 20.0) -> None:
    assert callable(done)
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_without_a_parent_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lifeline.VARIABLE, raising=False)
    lifeline.hold_on()


@pytest.mark.parametrize("value", ["x", "-1", "99999"])
def test_a_variable_that_is_no_descriptor_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lifeline.VARIABLE, value)
    with pytest.raises(InvalidInputError, match="no open file descriptor"):
        lifeline.hold_on()
