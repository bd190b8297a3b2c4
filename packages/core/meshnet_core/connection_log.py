"""A log for what servers meet on a connection: bytes that are no HTTP get one line there, and no traceback.

Strangers knock on open ports, and a traceback would tell nothing more. Knows no server.
"""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError


class _OneLine(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        cause = record.exc_info[1] if record.exc_info else None
        if isinstance(cause, HttpProcessingError):
            # What follows the first line of aiohttp's message is the stranger's bytes.
            record.msg, record.args = "not HTTP: %s", (cause.message.strip().partition("\n")[0],)
            record.exc_info = None
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


def connection_log(name: str) -> logging.Logger:
    """The logger for the connections of the server in module ``name``, to be given to aiohttp's `AppRunner`."""
    logger = logging.getLogger(f"{name}.connections")
    if not logger.filters:
        logger.addFilter(_OneLine())
    return logger
