"""Which API keys a gateway takes, and which one a client brings: from options, a file or the environment."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshnet_cli import trust
from meshnet_core.errors import InvalidInputError

if TYPE_CHECKING:
    from meshnet_gateway.api_keys import ApiKeys

VARIABLE = "MESHNET_API_KEY"
"""Keys, with commas between them: a gateway takes all, a client brings the first."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeyOptions:
    """What was given about keys at the command line."""

    keys: Sequence[str] = ()
    file: Path | None = None
    none: bool = False


def keys_for(host: str, given: KeyOptions, *, insecure: bool) -> ApiKeys | None:
    """The keys that a gateway on ``host`` takes; None where everybody is let in.

    Raises:
        InvalidInputError: a key or the file is no good, or everybody who reaches ``host`` would be let in unasked.
    """
    from meshnet_gateway.api_keys import ApiKeys

    named = [*given.keys, *_in_file(given.file)]
    if given.none:
        if named:
            raise InvalidInputError("--no-api-key lets everybody in, --api-key only some; give one of them")
        return None
    if keys := named or _in_environment():
        return ApiKeys(keys)
    if given.file is not None:
        raise InvalidInputError(f"--api-keys-file {given.file} holds no key; write one a line")
    if trust.is_loopback(host):
        return None
    if insecure:
        logger.warning("the API on %s takes no key: whoever reaches it may use it", host)
    else:
        raise InvalidInputError(
            f"the API on {host} would be open to everyone there: give a key with --api-keys-file FILE or {VARIABLE} "
            "(make one with: openssl rand -hex 24), or --no-api-key to let everybody in"
        )
    return None


def client_key() -> str | None:
    """The key that clients bring when none is named."""
    return next(iter(_in_environment()), None)


def headers_with(key: str | None) -> dict[str, str]:
    """The header that brings ``key``.

    Raises:
        InvalidInputError: no header can.
    """
    if key is not None and not key.isprintable():
        raise InvalidInputError("an API key is one line of characters that can be seen; look for a line break in it")
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _in_environment() -> list[str]:
    return [key.strip() for key in os.environ.get(VARIABLE, "").split(",") if key.strip()]


def _in_file(path: Path | None) -> list[str]:
    """One key a line; lines that begin with # are remarks."""
    if path is None:
        return []
    try:
        lines = path.read_text("utf-8").splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"--api-keys-file {path} cannot be read: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        logger.warning("%s can be read by other users of this machine; chmod 600 it", path)
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
