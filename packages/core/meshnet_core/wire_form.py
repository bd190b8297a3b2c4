"""In which form frames are sent to hops, as people choose it. Knows no transport."""

from __future__ import annotations

import enum


class WireForm(enum.StrEnum):
    """``stream``: many frames on one connection, where the hop can do it; ``http``: each frame is a post."""

    STREAM = "stream"
    HTTP = "http"
