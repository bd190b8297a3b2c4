"""Products of chunks in C code: against double precision, and of the same bits however rows and threads are shared."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet_node import native_products, packed_linear
from meshnet_node.chunk_room import ChunkRoom
from meshnet_node.column_layout import in_columns, lies_in_columns
from meshnet_node.kernel_library import MatrixShape, ProductWay, StepKernels
from meshnet_node.native_products import MOST_ROWS, matrix_shape, multiply, quickest_way
from meshnet_node.openmp import parallel_address
from meshnet_node.packed_linear import MANY_ROWS, PackedLinear, can_pack, laid_out
from native_compiler import needs_compiler

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]
EACH_WAY = pytest.mark.parametrize("way", list(ProductWay), ids=[way.name for way in ProductWay])
DTYPES = {way: torch.bfloat16 if way else torch.float32 for way in ProductWay}
INPUTS = st.integers(1, 450).map(lambda quads: 4 * quads)
OUT = st.integers(1, 4).map(lambda panels: 64 * panels)


class Matrix:
    """One in columns, and rows to multiply by it: results lie between guards that nothing may write to."""

    def __init__(
        self, chunk_kernels: StepKernels, way: ProductWay, rows: int, inputs: int, out: int, *, bias: bool
    ) -> None:
        if way not in chunk_kernels.product_ways:
            pytest.skip("this CPU has no instructions for bfloat16")
        draw = torch.Generator().manual_seed(rows + inputs + out)
        sizes = ((rows, inputs), (out, inputs), (out,))
        self.kernels, self.way = chunk_kernels, way
        self.x, self.weight, self.bias = (torch.randn(size, generator=draw).to(DTYPES[way]) for size in sizes)
        self.has_bias = bias
        self.laid, self.room = in_columns(self.weight), ChunkRoom()

    def exact(self) -> torch.Tensor:
        found = self.x.double() @ self.weight.double().T
        return found + self.bias.double() if self.has_bias else found

    def product(self, x: torch.Tensor, threads: int = 1, way: ProductWay | None = None) -> torch.Tensor:
        out, inputs = self.weight.shape
        bias = self.bias.data_ptr() if self.has_bias else None
        shape = MatrixShape(self.laid.data_ptr(), bias, inputs, out, self.way if way is None else way)
        rows, parallel = len(x), parallel_address() if threads > 1 else None
        found = torch.full((rows + 2, out), -7.0, dtype=x.dtype)
        values = self.kernels.product_room(shape, rows, threads)
        at = self.room.at(values + 64)
        behind = (ctypes.c_float * 64).from_address(at + 4 * values)
        behind[:] = [3.0] * 64
        self.kernels.product(shape, rows, x.data_ptr(), found[1].data_ptr(), at, threads, parallel)
        assert bool((found[[0, -1]] == -7).all())
        assert set(behind) == {3.0}  # it keeps to its room
        return found[1:-1]


@EACH_WAY
@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 300), inputs=INPUTS, out=OUT, bias=st.booleans())
def test_a_product_is_that_of_double_precision(
    chunk_kernels: StepKernels, way: ProductWay, rows: int, inputs: int, out: int, bias: bool
) -> None:
    matrix = Matrix(chunk_kernels, way, rows, inputs, out, bias=bias)
    found, rounding = matrix.product(matrix.x), 5e-7 * inputs + 1e-6  # sums grow with the root of what is added
    torch.testing.assert_close(found.double(), matrix.exact(), rtol=2**-8 if way else 1e-6, atol=rounding)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 60), inputs=INPUTS, out=OUT, bias=st.booleans())
def test_both_ways_of_bfloat16_have_the_same_bits(
    chunk_kernels: StepKernels, rows: int, inputs: int, out: int, bias: bool
) -> None:
    matrix = Matrix(chunk_kernels, ProductWay.PAIRS, rows, inputs, out, bias=bias)
    assert torch.equal(matrix.product(matrix.x), matrix.product(matrix.x, way=ProductWay.WIDENED))


@EACH_WAY
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(2, 90), inputs=INPUTS, bias=st.booleans(), data=st.data())
def test_a_row_gets_the_same_bits_in_any_company(
    chunk_kernels: StepKernels, way: ProductWay, rows: int, inputs: int, bias: bool, data: st.DataObject
) -> None:
    matrix = Matrix(chunk_kernels, way, rows, inputs, 128, bias=bias)
    together = matrix.product(matrix.x)
    cut = data.draw(st.integers(1, rows - 1))
    assert torch.equal(torch.cat([matrix.product(matrix.x[:cut]), matrix.product(matrix.x[cut:])]), together)
    assert torch.equal(matrix.product(matrix.x[[cut]])[0], together[cut])


@EACH_WAY
@pytest.mark.parametrize("out", [64, 320])
def test_threads_change_no_bit(chunk_kernels: StepKernels, way: ProductWay, out: int) -> None:
    if parallel_address() is None:
        pytest.skip("torch's OpenMP is not GNU's")
    matrix = Matrix(chunk_kernels, way, 37, 1000, out, bias=True)
    alone = matrix.product(matrix.x)
    for threads in (2, 3, 7):
        assert torch.equal(matrix.product(matrix.x, threads), alone)


@pytest.fixture
def weight(chunk_kernels: StepKernels, request: pytest.FixtureRequest) -> torch.Tensor:
    """Of the dtype asked for, if this CPU's products read it in columns."""
    made = torch.randn(128, 96, generator=torch.Generator().manual_seed(0)).to(request.param)
    if not can_pack(made.dtype) or not lies_in_columns(laid_out(made), made):
        pytest.skip("this CPU's products read weights in another layout")
    if made.dtype is torch.bfloat16 and ProductWay.WIDENED not in chunk_kernels.product_ways:
        pytest.skip("this CPU has no instructions for bfloat16")
    return made


OF_EACH_DTYPE = pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32], indirect=True)


def way_of(weight: torch.Tensor) -> ProductWay:
    return ProductWay.FLOATS if weight.dtype is torch.float32 else ProductWay.WIDENED


@OF_EACH_DTYPE
@pytest.mark.parametrize("shape", [(1, 3), (1, MOST_ROWS), (1, MOST_ROWS + 1), (1, 2 * MOST_ROWS + 9), (3, 100)])
@torch.inference_mode()
def test_rows_beyond_what_is_multiplied_at_once(
    chunk_kernels: StepKernels, weight: torch.Tensor, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    bias, inputs = torch.randn(128).to(weight.dtype), torch.randn(*shape, 96).to(weight.dtype)
    linear, room = PackedLinear(weight, bias), ChunkRoom()
    multiplied, own = [], chunk_kernels.product

    def noting(matrix: MatrixShape, rows: int, *rest: object) -> None:
        multiplied.append(rows)
        own(matrix, rows, *rest)

    monkeypatch.setattr(chunk_kernels, "product", noting)
    found = multiply(chunk_kernels, room, matrix_shape(linear.weight, bias, way_of(weight)), inputs)
    assert found is not None
    assert found.shape == (*shape, 128)
    assert max(multiplied) <= MOST_ROWS
    assert sum(multiplied) == shape[0] * shape[1]
    near = 2**-7 if weight.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, linear(inputs), rtol=near, atol=near)


@OF_EACH_DTYPE
@torch.inference_mode()
def test_many_rows_are_for_another_product_and_few_are_not(weight: torch.Tensor) -> None:
    linear = PackedLinear(weight, None)
    assert linear.in_columns
    many, few = (torch.randn(1, rows, 96).to(weight.dtype) for rows in (MANY_ROWS, MANY_ROWS - 1))
    plain, marked = linear(many), torch.zeros(1)
    linear.of_many = lambda _: marked
    assert linear(many) is marked
    assert linear(few) is not marked
    linear.of_many = lambda _: None
    assert torch.equal(linear(many), plain)
    given: list[torch.Tensor] = []
    linear.of_many = given.append  # which gives None
    assert torch.equal(linear(many.transpose(0, 1).contiguous().transpose(0, 1)), plain)
    assert given[0].is_contiguous()


def test_the_layout_is_looked_at_for_each_dtype_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    for matrix in (torch.randn(128, 8), torch.randn(128, 8).bfloat16()):
        laid = in_columns(matrix).flatten()
        block, entry, output, each = 1, 3, 5, matrix.element_size() == 2
        held = 2 if each else 1
        at = block * 64 * 8 + entry // held * 64 * held + output * held + entry % held
        assert laid[at] == matrix[64 + output, entry]
    monkeypatch.setattr(packed_linear, "_in_columns", {})
    dtypes = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)]
    with monkeypatch.context() as patch:
        seen = dict.fromkeys(dtypes, 0)
        patch.setattr(
            packed_linear, "lies_in_columns", lambda _, own: bool(seen.update({own.dtype: seen[own.dtype] + 1}))
        )
        assert not any(PackedLinear(torch.randn(64, 96).to(dtype), None).in_columns for dtype in dtypes * 2)
        assert set(seen.values()) == {1}
    for dtype in dtypes:
        matrix = torch.randn(128, 64).to(dtype)
        laid = laid_out(matrix)
        is_so = ctypes.string_at(torch.ops.mkldnn.data_ptr(laid), laid.nbytes) == bytes(
            in_columns(matrix).view(torch.uint8).flatten().tolist()
        )
        assert PackedLinear(matrix, None).in_columns is is_so
        assert not lies_in_columns(laid_out(matrix), matrix.flip(0))
        assert not PackedLinear(torch.randn(100, 64).to(dtype), None).in_columns


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("ours", "is_taken"), [(1.0, True), (1.05, True), (2.0, False)])
def test_the_quickest_way_is_measured_once(
    chunk_kernels: StepKernels, dtype: torch.dtype, ours: float, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = set(chunk_kernels.product_ways) & (
        {ProductWay.FLOATS} if dtype is torch.float32 else {ProductWay.WIDENED, ProductWay.PAIRS}
    )
    if not ways or not can_pack(dtype):
        pytest.skip("this CPU has no way for it")
    seconds = iter([ours + slower for slower in reversed(range(len(ways)))] + [1.0])  # the library's is the last

    def measured(call: Callable[[], object]) -> float:
        call()
        return next(seconds)

    monkeypatch.setattr(native_products, "_seconds", measured)
    native_products._measured_way.cache_clear()
    try:
        expected = max(ways) if is_taken else None
        assert quickest_way(chunk_kernels, dtype) is expected
        assert next(seconds, None) is None
        assert quickest_way(chunk_kernels, dtype) is expected
    finally:
        native_products._measured_way.cache_clear()


def test_without_a_way_nothing_is_measured(chunk_kernels: StepKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_kernels, "product_ways", frozenset())
    monkeypatch.setattr(native_products, "_seconds", lambda _: pytest.fail("measured"))
    native_products._measured_way.cache_clear()
    assert quickest_way(chunk_kernels, torch.float32) is None
    native_products._measured_way.cache_clear()
