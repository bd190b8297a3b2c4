"""What children write, shown as their parent's own progress: their bars and, in a log, their lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshnet_cli.progress import progress_reporter, read_line


@contextmanager
def showing_children() -> Iterator[Callable[[str, str], None]]:
    """While the block runs, (name of a child, line that it wrote) given to the function is shown if it is progress.

    Other lines stay in the child's log.
    """
    with progress_reporter() as report:

        def show(name: str, line: str) -> None:
            if (progress := read_line(line)) is not None:
                what, percent = progress
                report(name, what, percent, 100)

        yield show
