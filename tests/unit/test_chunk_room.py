"""Memory that kernels for chunks work in."""

from __future__ import annotations

import torch

from meshnet_node.chunk_room import ChunkRoom


def test_room_is_aligned_and_kept() -> None:
    room = ChunkRoom()
    addresses = [room.at(values) for values in (1000, 10, 1000)]
    assert len(set(addresses)) == 1
    assert addresses[0] % 64 == 0
    held = room._held
    assert addresses[0] + 4000 <= held.data_ptr() + 4 * held.numel()
    assert room.at(5000) % 64 == 0
    assert room._held is not held


def test_room_is_of_float32_whatever_the_default_is() -> None:
    room, before = ChunkRoom(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        room.at(1000)
    finally:
        torch.set_default_dtype(before)
    assert room._held.nbytes >= 4000
