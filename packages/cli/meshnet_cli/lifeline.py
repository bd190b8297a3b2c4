"""Children that die with their parent, whatever ends it: SIGKILL and crashes too, on every POSIX system.

    parent  [write end of a pipe, never written]  ------  [read end]  child

The kernel closes the parent's end when the parent is gone, however it went; the child, blocked in a read, then sees the
pipe's end and leaves. Linux alone could do this with prctl, and would tie it to the parent's thread.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import TracebackType
from typing import Self

from meshnet_core.errors import InvalidInputError

VARIABLE = "MESHNET_LIFELINE_FD"
GRACE_S = 3.0  # for a child to leave the tracker and close, before it is simply ended


class Lifeline:
    """The parent's side: one pipe for all its children. Closing it lets go of them."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()  # neither is inherited unless a child is given it on purpose
        self._open = True

    @property
    def environment(self) -> dict[str, str]:
        """What tells a child, started with ``pass_fds=[self.read_fd]``, to hold on."""
        return {VARIABLE: str(self.read_fd)}

    def close(self) -> None:
        """Let go: children that still live leave. Idempotent."""
        if self._open:
            self._open = False
            os.close(self._write_fd)
            os.close(self.read_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def hold_on() -> None:
    """In a child: leave when the parent has gone. Does nothing where no parent gave a lifeline.

    Raises:
        InvalidInputError: if the variable holds something else than an open file descriptor.
    """
    given = os.environ.pop(VARIABLE, None)  # not for this process's own children
    if given is None:
        return
    try:
        fd = int(given)
        os.fstat(fd)
    except (ValueError, OSError) as error:
        raise InvalidInputError(f"{VARIABLE}={given} is no open file descriptor; `meshnet up` sets it") from error
    threading.Thread(target=_leave_at_end, args=(fd,), name="lifeline", daemon=True).start()


def _leave_at_end(fd: int) -> None:
    while os.read(fd, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
