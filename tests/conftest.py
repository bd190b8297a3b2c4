"""What holds for every test: the settings of whoever runs them do not reach in, and no example is too slow. And tiny
models that several modules run, which nobody writes to.

Property tests draw the same examples every time, so that a change is told by what it changes; to look for new ones:
``pytest --hypothesis-profile=explore tests/property``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:  # most tests need no torch
    from meshnet_node.kernel_library import StepKernels
    from shard_routes import Models

# A busy machine makes examples slow: neither a deadline nor a health check may speak of it.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("steady"), derandomize=False, print_blob=True)
settings.load_profile("steady")

# Shells have what they start in the background ignore Ctrl-C; children that tests send it to would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

for name in ("MESHNET_API_KEY", "MESHNET_DEBUG", "MESHNET_LOG", "MESHNET_LOG_FORMAT"):
    os.environ.pop(name, None)
os.environ["MESHNET_HOME"] = "/nonexistent/meshnet"  # nor does the mesh that this machine may be in


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Operations of torch run in one thread, as they do in a node beside its lane: `usefixtures` in a module."""
    import torch  # noqa: PLC0415 - most tests need none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernels() -> StepKernels:
    """This machine's; for tests that need a compiler."""
    from meshnet_node.step_kernels import step_kernels  # noqa: PLC0415

    found = step_kernels()
    assert found is not None
    return found


@pytest.fixture(scope="session")
def chunk_kernels(kernels: StepKernels) -> StepKernels:
    """This machine's, where it has those for chunks."""
    if not kernels.product_ways:
        pytest.skip("this CPU has no AVX-512, and no code for chunks")
    return kernels


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny models of every family, made as they are asked for."""
    from shard_routes import Models  # noqa: PLC0415

    return Models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny llama."""
    from tiny_models import save_tiny  # noqa: PLC0415

    return save_tiny("llama", tmp_path_factory.mktemp("llama"))
