"""Telling a future its outcome, from a callback."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


def settle(future: asyncio.Future[T], outcome: T | Exception | None) -> None:
    """Give ``future`` its result or exception, None cancels it; nothing where nobody waits for it any more."""
    if future.done():
        return
    if outcome is None:
        future.cancel()
    elif isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
