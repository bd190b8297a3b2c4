"""Where converted and downloaded files are kept, and what to say where that cannot be. Knows nothing of the files."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from meshnet_core.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

_REMEDY = "set MESHNET_CACHE to a folder that can be written to"


def default_cache_dir() -> Path:
    """``$MESHNET_CACHE``, else ``$XDG_CACHE_HOME/meshnet``, else ``~/.cache/meshnet``; an empty variable is unset.

    Raises:
        InvalidInputError: there is no home folder to put it in.
    """
    try:
        if own := os.environ.get("MESHNET_CACHE"):
            return Path(own).expanduser()
        if xdg := os.environ.get("XDG_CACHE_HOME"):
            return Path(xdg).expanduser() / "meshnet"
        return Path.home() / ".cache" / "meshnet"
    except RuntimeError as error:  # no such user, or one without a home
        raise InvalidInputError(f"no place for the cache: {error}; {_REMEDY}") from error


@contextmanager
def writing_to_cache() -> Iterator[None]:
    """Around what writes there.

    Raises:
        InvalidInputError: it cannot be written to, or is full.
    """
    try:
        yield
    except OSError as error:
        raise InvalidInputError(f"the cache folder cannot be used: {error}; {_REMEDY}") from error
