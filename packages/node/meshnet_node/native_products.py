"""Products as C code, over the weights that the CPU's products read too.

A chunk's product in the library waits for its weights to come from memory, which for 128 rows is a tenth of its time
and more for fewer; and on CPUs whose instructions for bfloat16 make half of what those for float32 do, bfloat16 takes
twice the time. The kernel fetches weights ahead, and widens them where that is quicker. Of a step nearly all is waiting
for weights: there is a kernel for its few rows too, which takes two thirds of the library's time. Knows no modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial

import torch

from meshnet_node.chunk_room import ChunkRoom
from meshnet_node.column_layout import in_columns
from meshnet_node.kernel_library import COLUMN, MatrixShape, ProductWay, StepKernels
from meshnet_node.openmp import team_here
from meshnet_node.packed_linear import MANY_ROWS, laid_out

MOST_ROWS = 256
"""That are multiplied at once: so many sums of a column stay in a core's second cache beside the weights."""
MOST_FEW = MANY_ROWS - 1
"""Rows of a step: more are not waiting for weights any more."""
IN_STEP = 4
"""What the inputs of a matrix are a multiple of."""
_DTYPES = {
    ProductWay.FLOATS: torch.float32,
    ProductWay.WIDENED: torch.bfloat16,
    ProductWay.PAIRS: torch.bfloat16,
}
_TRIAL = (96, 8 * COLUMN, 8 * COLUMN)  # rows, out, in
_TRIALS = 5
_ENOUGH = 1.1  # times the library's time that ours may take: what counts for it, cold weights, is not in a trial


def matrix_shape(weight: torch.Tensor, bias: torch.Tensor | None, way: ProductWay) -> MatrixShape:
    """Of a weight that is laid out in columns; who has the shape holds the tensors, too."""
    out, inputs = weight.shape
    bias_at = None if bias is None else bias.data_ptr()
    return MatrixShape(torch.ops.mkldnn.data_ptr(weight), bias_at, inputs, out, way)


def multiply(kernels: StepKernels, room: ChunkRoom, shape: MatrixShape, inputs: torch.Tensor) -> torch.Tensor | None:
    """``[..., in]`` without gaps -> ``[..., out]``; None where threads cannot be shared, or a dtype is another."""
    team = team_here()
    if team is None or inputs.dtype is not _DTYPES[shape.way]:
        return None
    rows, out = inputs.view(-1, shape.inputs), inputs.new_empty(*inputs.shape[:-1], shape.out)
    at = room.at(kernels.product_room(shape, min(len(rows), MOST_ROWS), team.threads))
    results = out.view(-1, shape.out)
    for start in range(0, len(rows), MOST_ROWS):
        some = rows[start : start + MOST_ROWS]
        kernels.product(shape, len(some), some.data_ptr(), results[start].data_ptr(), at, *team)
    return out


def multiply_few(kernels: StepKernels, shape: MatrixShape, inputs: torch.Tensor) -> torch.Tensor | None:
    """:func:`multiply` for at most ``MOST_FEW`` rows in bfloat16; None for others, too."""
    rows, team = inputs.numel() // shape.inputs, team_here()
    if team is None or rows > MOST_FEW or inputs.dtype is not torch.bfloat16:
        return None
    out = inputs.new_empty(*inputs.shape[:-1], shape.out)
    kernels.few(shape, rows, inputs.data_ptr(), out.data_ptr(), *team)
    return out


def quickest_way(kernels: StepKernels, dtype: torch.dtype) -> ProductWay | None:
    """The way for matrices of ``dtype``, as measured once with one thread; None where the library's product is quicker.

    All ways of a dtype give the same bits.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured_way(kernels, dtype)
    finally:
        torch.set_num_threads(threads)


@cache
def _measured_way(kernels: StepKernels, dtype: torch.dtype) -> ProductWay | None:
    ways = {ProductWay.FLOATS} if dtype is torch.float32 else {ProductWay.WIDENED, ProductWay.PAIRS}
    rows, out, inputs = _TRIAL
    x, made, plain = (torch.ones(size, dtype=dtype) for size in ((rows, inputs), (rows, out), (out, inputs)))
    laid, columns, room = laid_out(plain), in_columns(plain), ChunkRoom()
    taken: dict[ProductWay, float] = {}
    for way in sorted(ways & kernels.product_ways):
        shape = MatrixShape(columns.data_ptr(), None, inputs, out, way)
        at = room.at(kernels.product_room(shape, rows, 1))
        taken[way] = _seconds(partial(kernels.product, shape, rows, x.data_ptr(), made.data_ptr(), at, 1, None))
    if not taken:
        return None
    quickest = min(taken, key=taken.__getitem__)
    library = _seconds(partial(torch.ops.mkldnn._linear_pointwise, x, laid, None, "none", [], ""))
    return quickest if taken[quickest] < _ENOUGH * library else None


def _seconds(call: Callable[[], object]) -> float:
    """The best of some."""
    taken = []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)
