"""Files that are whole or not there: written under another name, synced to the disk, then renamed.

After a crash a half-written file is left under a name that nobody reads, and two processes may write the same file at
once: the last to finish wins. Knows nothing of what is written.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SUFFIX = ".partial"
_STALE_S = 24 * 3600  # a partial file this old is a crash's, not another process's


@contextmanager
def renamed_when_done(target: Path) -> Iterator[Path]:
    """A path beside ``target`` to write a file to; it becomes ``target`` only when the block ends well."""
    partial = _beside(target)
    try:
        yield partial
        _sync(partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def folder_renamed_when_done(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` that becomes it when the block ends well; if ``target`` came to be meanwhile, that
    one stays.
    """
    partial = _beside(target)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.iterdir():
            _sync(file)
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_stale(folder: Path) -> None:
    """Remove what crashes of more than a day ago left half-written in ``folder``."""
    for path in folder.glob(f".*{_SUFFIX}"):
        try:
            if time.time() - path.stat().st_mtime < _STALE_S:
                continue
        except FileNotFoundError:  # its owner has just finished
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}{_SUFFIX}")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
