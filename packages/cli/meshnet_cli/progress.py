"""Progress of what takes long, on stderr: bars on a terminal, plain lines elsewhere. Knows nothing of the work."""

from __future__ import annotations

import re
import sys
from types import TracebackType
from typing import Protocol, Self

_LINE = re.compile(r"(?P<what>.+), (?P<percent>\d{1,3}) %")
_LINE_STEP = 10  # percent between two plain lines of one task


class ProgressReporter(Protocol):
    """Shows tasks by name. Use it with ``with``; callable from any thread, one call at a time for each task."""

    def __call__(self, task: str, what: str, done: float, total: float) -> None:
        """Task ``task`` is at ``done`` of ``total``, just now doing ``what``."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def progress_reporter() -> ProgressReporter:
    """Bars where stderr is a terminal, lines where it is a file or a pipe."""
    return _Bars() if sys.stderr.isatty() else _Lines()


def read_line(line: str) -> tuple[str, int] | None:
    """What and percent, if ``line`` is one that the plain reporter wrote; for who watches a child's log."""
    match = _LINE.fullmatch(line)
    return (match["what"], int(match["percent"])) if match else None


def _percent(done: float, total: float) -> int:
    return min(100, int(100 * done / total)) if total > 0 else 100


class _Lines:
    """A line at each tenth of a task, ``WHAT, NN %``; the task's own name first where it has one."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def __call__(self, task: str, what: str, done: float, total: float) -> None:
        percent = _percent(done, total)
        if percent < self._next.get(task, 0):
            if percent > 0:
                return
            self._next[task] = 0  # the next piece of work begins
        self._next[task] = percent - percent % _LINE_STEP + _LINE_STEP
        sys.stderr.write(f"{task}: {what}, {percent} %\n" if task else f"{what}, {percent} %\n")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class _Bars:
    """One bar for each task, gone when the block ends."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, task: str, what: str, done: float, total: float) -> None:
        text = f"{task}: {what}" if task else what
        if task not in self._tasks:
            self._tasks[task] = self._bars.add_task(text, total=100)
        self._bars.update(self._tasks[task], description=text, completed=_percent(done, total))

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
