"""Products of a step's rows in C code: against double precision, with a chunk's bits, and where they are taken."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet_node.chunk_room import ChunkRoom
from meshnet_node.column_layout import in_columns, lies_in_columns
from meshnet_node.kernel_library import MatrixShape, ProductWay, StepKernels
from meshnet_node.native_chunks import has_products, shape_of
from meshnet_node.native_products import MOST_FEW, multiply_few
from meshnet_node.openmp import parallel_address
from meshnet_node.packed_linear import MANY_ROWS, PackedLinear, can_pack, laid_out
from native_compiler import needs_compiler

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]
BFLOAT16 = torch.bfloat16


class Matrix:
    """One in columns, and rows to multiply by it: results lie between guards that nothing may write to."""

    def __init__(self, kernels: StepKernels, rows: int, inputs: int, out: int, *, bias: bool) -> None:
        draw = torch.Generator().manual_seed(rows + inputs + out)
        sizes = ((rows, inputs), (out, inputs), (out,))
        self.kernels = kernels
        self.x, self.weight, self.bias = (torch.randn(size, generator=draw).to(BFLOAT16) for size in sizes)
        self.has_bias = bias
        self.laid = in_columns(self.weight)
        bias_at = self.bias.data_ptr() if bias else None
        self.shape = MatrixShape(self.laid.data_ptr(), bias_at, inputs, out, ProductWay.WIDENED)

    def exact(self) -> torch.Tensor:
        found = self.x.double() @ self.weight.double().T
        return found + self.bias.double() if self.has_bias else found

    def product(self, x: torch.Tensor, threads: int = 1) -> torch.Tensor:
        found = torch.full((len(x) + 2, len(self.weight)), -7.0, dtype=BFLOAT16)
        parallel = parallel_address() if threads > 1 else None
        self.kernels.few(self.shape, len(x), x.data_ptr(), found[1].data_ptr(), threads, parallel)
        assert bool((found[[0, -1]] == -7).all())
        return found[1:-1]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 20),
    inputs=st.integers(1, 450).map(lambda quads: 4 * quads),
    out=st.integers(1, 4).map(lambda columns: 64 * columns),
    bias=st.booleans(),
)
def test_a_product_is_that_of_double_precision(
    kernels: StepKernels, rows: int, inputs: int, out: int, bias: bool
) -> None:
    matrix = Matrix(kernels, rows, inputs, out, bias=bias)
    found, rounding = matrix.product(matrix.x), 5e-7 * inputs + 1e-6  # sums grow with the root of what is added
    torch.testing.assert_close(found.double(), matrix.exact(), rtol=2**-8, atol=rounding)
    for row, one in enumerate(found):  # the same bits, however many rows go together
        assert torch.equal(matrix.product(matrix.x[row : row + 1])[0], one)


@pytest.mark.parametrize("rows", [1, 3, 4, 7])
@pytest.mark.parametrize("inputs", [64, 780])
def test_a_step_has_the_bits_of_a_chunk(chunk_kernels: StepKernels, rows: int, inputs: int) -> None:
    if ProductWay.WIDENED not in chunk_kernels.product_ways:
        pytest.skip("this CPU has no instructions for bfloat16")
    matrix = Matrix(chunk_kernels, rows, inputs, 192, bias=True)
    chunk = torch.empty(rows, 192, dtype=BFLOAT16)
    room = ChunkRoom()
    at = room.at(chunk_kernels.product_room(matrix.shape, rows, 1))
    chunk_kernels.product(matrix.shape, rows, matrix.x.data_ptr(), chunk.data_ptr(), at, 1, None)
    assert torch.equal(matrix.product(matrix.x), chunk)


@pytest.mark.parametrize("out", [64, 320])
def test_threads_change_no_bit(kernels: StepKernels, out: int) -> None:
    if parallel_address() is None:
        pytest.skip("torch's OpenMP is not GNU's")
    matrix = Matrix(kernels, 5, 1000, out, bias=True)
    alone = matrix.product(matrix.x)
    for threads in (2, 3, 7):
        assert torch.equal(matrix.product(matrix.x, threads), alone)


def test_what_is_no_number_stays_its_rows(kernels: StepKernels) -> None:
    matrix = Matrix(kernels, 3, 64, 64, bias=False)
    matrix.x[1, 5] = float("nan")
    found = matrix.product(matrix.x)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@pytest.fixture
def linear() -> PackedLinear:
    """One whose weights this CPU's products read in columns."""
    draw = torch.Generator().manual_seed(0)
    made, bias = torch.randn(128, 96, generator=draw).to(BFLOAT16), torch.randn(128, generator=draw).to(BFLOAT16)
    if not can_pack(BFLOAT16) or not lies_in_columns(laid_out(made), made):
        pytest.skip("this CPU's products read weights in another layout")
    return PackedLinear(made, bias)


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(96,), (1, 96), (1, 1, 96), (MOST_FEW, 1, 96), (1, MOST_FEW, 96), (2, 3, 96)])
def test_a_step_of_any_form_is_taken(kernels: StepKernels, linear: PackedLinear, shape: tuple[int, ...]) -> None:
    assert has_products(linear)
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(BFLOAT16)
    found = multiply_few(kernels, shape_of(linear, ProductWay.PAIRS), inputs)
    assert found is not None
    torch.testing.assert_close(found, linear(inputs), rtol=2**-7, atol=1e-3)


@torch.inference_mode()
def test_what_is_none_of_its_is_left(
    kernels: StepKernels, linear: PackedLinear, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_of(linear, ProductWay.PAIRS)
    assert multiply_few(kernels, shape, torch.zeros(MOST_FEW + 1, 96).to(BFLOAT16)) is None
    assert multiply_few(kernels, shape, torch.zeros(1, 96)) is None
    monkeypatch.setattr("meshnet_node.native_products.team_here", lambda: None)
    assert multiply_few(kernels, shape, torch.zeros(1, 96).to(BFLOAT16)) is None


@torch.inference_mode()
def test_a_module_asks_for_few_rows_what_is_there_for_few(linear: PackedLinear) -> None:
    asked: list[int] = []
    marked = torch.ones(1)

    def few(inputs: torch.Tensor) -> torch.Tensor | None:
        asked.append(inputs.shape[-2])
        return marked if inputs.shape[-2] == 1 else None

    linear.of_few = few
    inputs = torch.zeros(1, MANY_ROWS, 96).to(BFLOAT16)
    assert linear(inputs[:, :1]) is marked
    assert linear(inputs[:, :3]).shape == (1, 3, 128)
    assert linear(inputs).shape == (1, MANY_ROWS, 128)
    assert asked == [1, 3]
