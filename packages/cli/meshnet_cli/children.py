"""Child processes of one command: started, watched by their logs, and ended together. Knows nothing of what they do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from meshnet_cli.complaint import MORE_MEMORY, CommandFailedError
from meshnet_cli.lifeline import GRACE_S, Lifeline

POLL_S = 0.05
SHOWN_LINES = 12
# -P: a file called torch.py where the user happens to be is not the torch that is meant
MESHNET = (sys.executable, "-P", "-m", "meshnet_cli")
_READY = re.compile(r"ready (https?://\S+)")


@dataclass
class Child:
    """One child; ``url`` is what its ``ready URL`` line named, None until then."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    url: str | None = None
    _offset: int = field(default=0, repr=False)

    def new_lines(self) -> Iterator[str]:
        """Whole lines written to the log since the last call."""
        with self.log.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        yield from whole.decode("utf-8", "replace").splitlines()

    def last_lines(self) -> str:
        lines = self.log.read_text("utf-8", "replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-SHOWN_LINES:]) or "  (it wrote nothing)"


class Children:
    """The children of this process. Use it with ``with``: they are gone when the block is left.

    They run in sessions of their own, so that a Ctrl-C reaches this process alone, which then ends them in order; a
    lifeline ends them if it never gets to do so.

    Args:
        folder: where their logs go.
        on_line: told each line that a child writes, but for its ready line.
        program: what every child runs, before its arguments.
    """

    def __init__(
        self,
        folder: Path,
        on_line: Callable[[Child, str], None] | None = None,
        *,
        program: Sequence[str] = MESHNET,
    ) -> None:
        self.folder = folder
        self._program = program
        self._on_line = on_line or (lambda child, line: None)
        self._lifeline = Lifeline()
        self._children: list[Child] = []

    def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        """Run the program with ``arguments``; ``environment`` comes on top of this process's own."""
        log = self.folder / f"{name.replace(' ', '-')}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [*self._program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {}), **self._lifeline.environment},
                pass_fds=[self._lifeline.read_fd],
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def wait(self, done: Callable[[], bool], *, what: str, timeout_s: float | None = None) -> None:
        """Watch the children until ``done()``.

        Raises:
            CommandFailedError: if one of them ends, or the time does; ``what`` names what was waited for.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not done():
            self.look()
            if deadline is not None and time.monotonic() > deadline:
                raise CommandFailedError(f"{what} took longer than {timeout_s:g} s; logs are in {self.folder}")
            time.sleep(POLL_S)

    def wait_ready(self, *children: Child, timeout_s: float | None = None) -> None:
        """Watch until each of ``children`` has said that it is ready."""
        names = ", ".join(child.name for child in children)
        self.wait(lambda: all(child.url for child in children), what=f"starting {names}", timeout_s=timeout_s)

    def look(self) -> None:
        """Take in what the children wrote.

        Raises:
            CommandFailedError: if one of them has ended, with the last lines of its log.
        """
        for child in self._children:
            code = child.process.poll()
            for line in child.new_lines():
                if ready := _READY.fullmatch(line):
                    child.url = ready[1]
                else:
                    self._on_line(child, line)
            if code is not None:
                how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
                if code == -signal.SIGKILL:  # the kernel's own way of saying that memory ran out
                    how += f", as happens where memory runs out ({MORE_MEMORY.rstrip('.')})"
                raise CommandFailedError(
                    f"{child.name} {how}; all else is stopped. Its last lines ({child.log}):\n{child.last_lines()}"
                )

    def stop(self) -> None:
        """End all that still run: politely, then not. Idempotent."""
        running = [child.process for child in self._children if child.process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._lifeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
