"""Errors on their way out of a node: they name the hop and the boot id, and misses are counted."""

from __future__ import annotations

from collections import Counter

from meshnet_core.errors import (
    BadFrameError,
    CacheMissError,
    HopError,
    HopFailedError,
    MeshnetError,
    MissReason,
    UnsupportedModelError,
)


class MarkedErrors:
    """Errors that leave this block name the hop and the boot id; foreign ones become `HopFailedError`.

    Misses are counted by reason, those of this hop alone: another's come through with their hop named.
    """

    def __init__(self, hop_index: int, boot: str, misses: Counter[MissReason]) -> None:
        self._hop_index = hop_index
        self._boot = boot
        self._misses = misses

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception):
            return
        if isinstance(error, HopError):
            if error.hop_index is None:
                error.hop_index = self._hop_index
                error.boot = self._boot
                if isinstance(error, CacheMissError):
                    self._misses[error.reason] += 1
            return
        if isinstance(error, MeshnetError) and not isinstance(error, UnsupportedModelError):
            raise BadFrameError(error.message, hop_index=self._hop_index, boot=self._boot) from error
        raise HopFailedError(f"{error}", hop_index=self._hop_index, boot=self._boot) from error
