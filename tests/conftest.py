"""What holds for every test: the settings of whoever runs them do not reach in, and no example is too slow.

Property tests draw the same examples every time, so that a change is told by what it changes; to look for new ones:
``pytest --hypothesis-profile=explore tests/property``.
"""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# A busy machine makes examples slow: neither a deadline nor a health check may speak of it.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("steady"), derandomize=False, print_blob=True)
settings.load_profile("steady")

# Shells have what they start in the background ignore Ctrl-C; children that tests send it to would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

for name in ("MESHNET_API_KEY", "MESHNET_DEBUG", "MESHNET_LOG", "MESHNET_LOG_FORMAT"):
    os.environ.pop(name, None)
os.environ["MESHNET_HOME"] = "/nonexistent/meshnet"  # nor does the mesh that this machine may be in
