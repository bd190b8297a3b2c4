"""Logs as one JSON object a line, with the session, the hop and the route that a line is about.

What is about one session in a task is told by `about`, once for all lines of it; a line may also name it itself, with
logging's ``extra``. The text form of the log knows nothing of either.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

FIELDS = ("session", "epoch", "hop", "route", "request", "outcome")  # of `about` and ``extra``; others are not written

_about: ContextVar[Mapping[str, object]] = ContextVar("meshnet_log_about", default={})  # noqa: B039 - never changed


@contextmanager
def about(**fields: object) -> Iterator[None]:
    """Lines logged within the block, and in tasks begun there, have these fields, rendered by ``str`` when written.

    Args:
        fields: names of `FIELDS`; None says nothing.
    """
    token = _about.set({**_about.get(), **fields})
    try:
        yield
    finally:
        _about.reset(token)


class AboutFilter(logging.Filter):
    """Puts what `about` told into each record, in the context that logged it."""

    def filter(self, record: logging.LogRecord) -> bool:
        for name, value in _about.get().items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


class JsonLines(logging.Formatter):
    """``{"time", "level", "logger", "message"}``, `FIELDS` where they are known, ``exception`` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in FIELDS:
            if (value := getattr(record, name, None)) is not None:
                line[name] = value if isinstance(value, int) else str(value)
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)  # ASCII: it is one line for every reader, in every locale
