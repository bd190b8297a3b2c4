"""Packed 4-bit matrices against gguf's own de-quantisation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from meshnet_node.gguf_blocks import BLOCK_BYTES, GROUP, PLANES, coded_rows
from meshnet_node.packed_matrix import PackedMatrix, packed_bytes
from meshnet_node.quantised_layers import QuantisedEmbedding, QuantisedLinear

KINDS = sorted(BLOCK_BYTES)


def blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random blocks of a kind, uint8 ``[rows, row bytes]``: every code occurs, scales are of ordinary size."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, columns // GROUP, BLOCK_BYTES[kind]), np.uint8)
    for at in (0, 2)[: 2 if kind == "Q4_1" else 1]:
        scales = rng.normal(0, 0.02, raw.shape[:2]).astype(np.float16)
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def dequantized(kind: str, raw: np.ndarray) -> torch.Tensor:
    """By gguf, float32."""
    return torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]))


def packed(kind: str, raw: np.ndarray, columns: int) -> PackedMatrix:
    matrix = PackedMatrix(raw.shape[0], columns, PLANES[kind])
    step = 64
    for start in range(0, raw.shape[0], step):
        matrix.fill(start, coded_rows(kind, raw[start : start + step]))
    return matrix


@pytest.mark.parametrize("kind", KINDS)
def test_codes_scales_and_zeros_are_exactly_what_the_file_says(kind: str) -> None:
    raw = blocks(kind, 5, 96)
    coded = coded_rows(kind, raw)
    assert coded.codes.max() <= 15
    np.testing.assert_allclose(coded.values(PLANES[kind]), dequantized(kind, raw).numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [64, 100, 192])
def test_rows_come_back_but_for_the_rounding_of_scales(kind: str, rows: int) -> None:
    raw = blocks(kind, rows, 96)
    expected = dequantized(kind, raw)
    got = packed(kind, raw, 96).take(torch.arange(rows)).float()
    # A scale and a zero are rounded to 8 bits each, and the value once more.
    assert (got - expected).abs().max() <= 2**-7 * expected.abs().max()
    assert torch.equal(got[[3, 3, 40]], packed(kind, raw, 96).take(torch.tensor([3, 3, 40])).float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [1, 7, 200])
def test_products_are_those_of_the_rows(kind: str, inputs: int) -> None:
    raw = blocks(kind, 100, 96)
    matrix = packed(kind, raw, 96)
    given = torch.randn(inputs, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = given.double() @ matrix.take(torch.arange(100)).double().t()
    got = matrix.product(given).double()
    assert got.shape == (inputs, 100)
    assert (got - exact).abs().max() <= 0.01 * exact.abs().max()


def test_a_large_matrix_is_unpacked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = packed("Q8_0", blocks("Q8_0", 200, 64), 64)
    given = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = matrix.product(given)
    monkeypatch.setattr("meshnet_node.packed_matrix.UNPACKED_VALUES", 64 * 64)
    assert torch.equal(matrix.product(given), whole)


def test_joined_matrices_give_the_same_bits_as_each() -> None:
    parts = [packed("Q4_1", blocks("Q4_1", rows, 64, seed=rows), 64) for rows in (128, 64, 70)]
    given = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = PackedMatrix.joined(parts)
    assert torch.equal(whole.product(given), torch.cat([part.product(given) for part in parts], dim=1))
    with pytest.raises(ValueError, match="64 rows"):
        PackedMatrix.joined([parts[2], parts[0]])
    with pytest.raises(ValueError, match="cannot be joined"):
        PackedMatrix.joined([parts[0], packed("Q8_0", blocks("Q8_0", 64, 64), 64)])


def test_sizes_are_told_ahead() -> None:
    for rows, columns, planes in ((64, 32, 1), (100, 96, 2)):
        matrix = PackedMatrix(rows, columns, planes)
        assert packed_bytes(rows, columns, planes) == sum(buffer.nbytes for buffer in matrix.buffers())


def test_a_linear_and_an_embedding_share_one_matrix() -> None:
    raw = blocks("Q8_0", 70, 64)
    matrix = packed("Q8_0", raw, 64)
    head, table = QuantisedLinear(matrix, torch.ones(70)), QuantisedEmbedding(matrix)
    ids = torch.tensor([[0, 69, 3]])
    hidden = table(ids)
    assert hidden.shape == (1, 3, 64)
    assert hidden.dtype == torch.bfloat16
    out = head(hidden.float())
    assert out.shape == (1, 3, 70)
    assert out.dtype == torch.float32
    assert torch.allclose(out, head(hidden).float(), atol=0.05)
