"""Threads that kernels share with torch, or take none."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from meshnet_node import openmp
from meshnet_node.chunk_room import ChunkRoom
from meshnet_node.column_layout import in_columns
from meshnet_node.kernel_library import MatrixShape, ProductWay
from meshnet_node.native_chunk_attention import NativeChunkAttention
from meshnet_node.native_products import multiply
from meshnet_node.openmp import Team, gnu_openmp, parallel_address, team_here
from meshnet_node.step_kernels import step_kernels
from native_compiler import needs_compiler

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def another_system(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One whose libraries are not looked through; what was found before is forgotten."""
    monkeypatch.setattr(sys, "platform", "darwin")
    for found in (gnu_openmp, parallel_address):
        found.cache_clear()
    yield
    for found in (gnu_openmp, parallel_address):
        found.cache_clear()


def test_on_another_system_one_thread_alone_is_a_team(another_system: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gnu_openmp() is None
    assert parallel_address() is None
    assert team_here() == Team(1, None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert team_here() is None


@needs_compiler
@torch.inference_mode()
def test_without_a_team_kernels_take_nothing(another_system: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = step_kernels()
    assert kernels is not None
    if not kernels.product_ways:
        pytest.skip("this CPU has no AVX-512, and no code for chunks")
    weight, heads = in_columns(torch.randn(64, 8)), torch.randn(1, 2, 30, 64)
    shape = MatrixShape(weight.data_ptr(), None, 8, 64, ProductWay.FLOATS)

    def found() -> list[torch.Tensor | None]:
        attended = NativeChunkAttention(kernels, ChunkRoom()).attend(heads, heads, heads, None, 0.1)
        return [multiply(kernels, ChunkRoom(), shape, torch.randn(1, 20, 8)), attended]

    assert all(each is not None for each in found())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(kernels, "product_room", lambda *_: pytest.fail("went on"))
    assert found() == [None, None]


def test_a_team_is_as_many_as_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    if (address := parallel_address()) is None:
        pytest.skip("torch's OpenMP is not GNU's")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert team_here() == Team(3, address)
    monkeypatch.setattr(openmp, "parallel_address", lambda: None)
    assert team_here() is None
    assert gnu_openmp() is not None
