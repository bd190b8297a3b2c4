"""The environment variables that are read besides those of options. Knows no option."""

from __future__ import annotations

from meshnet_cli import access, lifeline

CONFIG = "MESHNET_CONFIG"
FIXED = {
    CONFIG: "the settings' file",
    "MESHNET_HOME": "where this machine's place in a mesh is kept",
    "MESHNET_CACHE": "where downloaded and converted models are kept",
    "MESHNET_LOG": "how much is logged: DEBUG, INFO, WARNING or ERROR",
    "MESHNET_LOG_FORMAT": "text, or json for one JSON object a line",
    "MESHNET_DEBUG": "1 shows tracebacks",
    access.VARIABLE: "API keys: a gateway takes all, a client brings the first",
    lifeline.VARIABLE: "set for the processes of `meshnet up`",
}
"""Each with what it is for."""
