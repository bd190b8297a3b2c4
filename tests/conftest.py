"""What holds for every test: the settings of whoever runs them do not reach in."""

from __future__ import annotations

import os

for name in ("MESHNET_API_KEY", "MESHNET_DEBUG", "MESHNET_LOG", "MESHNET_LOG_FORMAT"):
    os.environ.pop(name, None)
os.environ["MESHNET_HOME"] = "/nonexistent/meshnet"  # nor does the mesh that this machine may be in
