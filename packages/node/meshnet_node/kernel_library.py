"""The functions of a library that was built of our C sources, and the shapes that they are told.

Knows tensors' addresses, no tensors, no modules and no compiler.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

MOST_WIDTH = 512
"""The widest heads that can attend: as the source has it."""
ATTENDED = 256
"""Positions of a block, whose keys and values are attended to at once: as the source has it."""
MOST_SHARING = 4
"""Rows that a matrix is read for at once."""
COLUMN = 64
"""Outputs whose weights lie together in a matrix in columns."""


class AttentionShape(ctypes.Structure):
    """What an attention layer is to :meth:`StepKernels.attend`; held by whoever passes its address.

    ``head_norm``: address of ``[heads + key_heads, width]``, in the dtype of what attends, or None; ``turns``: whether
    rope is applied; ``eps``: of the heads' norms.
    """

    _fields_ = (
        *(("head_norm", c_void_p), ("heads", c_int), ("key_heads", c_int), ("width", c_int), ("turns", c_int)),
        *(("scaling", c_float), ("eps", c_float)),
    )


class DeltaShape(ctypes.Structure):
    """What a layer with a gated delta rule is to :meth:`StepKernels.delta`; held by whoever passes its address.

    ``conv``: address of bfloat16 ``[channels, taps]``, of queries, keys and values in that order; ``rate`` and
    ``step_bias``: of float32 ``[heads]``, ``-exp(A_log)`` and what is added to the steps; ``norm``: of bfloat16
    ``[width]``, with ``eps``.
    """

    _fields_ = (
        *((name, c_void_p) for name in ("conv", "rate", "step_bias", "norm")),
        *((name, c_int) for name in ("heads", "key_heads", "width", "key_width", "taps")),
        ("eps", c_float),
    )


class MixtureShape(ctypes.Structure):
    """What a layer's experts are to :meth:`StepKernels.experts`; held by whoever passes its address.

    ``gate_up``, ``down``: addresses of int64 ``[experts]``, the addresses of each one's matrices, bfloat16
    ``[2 * inner, hidden]`` and ``[hidden, inner]`` in columns (:mod:`meshnet_node.column_layout`); ``chosen``: experts
    of a row; ``rounds``: whether what was weighted is rounded to bfloat16, as it is where the weights are.
    """

    _fields_ = (
        *((name, c_void_p) for name in ("gate_up", "down")),
        *((name, c_int) for name in ("experts", "chosen", "hidden", "inner", "rounds")),
    )


class MatrixShape(ctypes.Structure):
    """What a matrix is to :meth:`StepKernels.product`; held by whoever passes its address.

    ``weight``: address of ``[out, in]`` in columns, ``bias``: of ``[out]``, or None; ``way``: one of
    :class:`ProductWay`, which says of what dtype all are.
    """

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_int) for name in ("inputs", "out", "way")),
    )


class ProductWay(IntEnum):
    """How chunks' rows are multiplied: in float32, or in bfloat16 that is widened to it, or two by two."""

    FLOATS = 0
    WIDENED = 1
    PAIRS = 2


class ChunkShape(ctypes.Structure):
    """What a chunk's attention is to :meth:`StepKernels.attend_chunk`.

    Addresses of queries, keys, values and what comes out, ``[count, heads, width]``; strides in values: of queries from
    position to position and from head to head, of keys and of values from head to head, whose positions lie together.
    ``way``: :attr:`ProductWay.FLOATS`, or else bfloat16.
    """

    _fields_ = (
        *((name, c_void_p) for name in ("query", "keys", "values", "out")),
        *((name, c_int64) for name in ("query_stride", "query_head_stride", "key_stride", "value_stride")),
        *((name, c_int) for name in ("heads", "key_heads", "width", "positions", "count", "way")),
        ("scaling", c_float),
    )


class StepKernels:
    """The functions of one library. Arguments are addresses of dense bfloat16 tensors, unless it says otherwise.

    The interpreter's lock is kept meanwhile: they take microseconds, but for those that say otherwise.

    Attributes:
        norm: ``(x, weight, out, rows, width, eps)``: transformers' RMS norm of each row.
        add: ``(x, other, count)``: ``x += other``.
        add_norm: ``(x, other, weight, out, rows, width, eps)``: both, one after the other.
        silu_mul: ``(gate_up, out, rows, width)``: ``silu(gate) * up`` of rows ``[gate, up]``.
        attend: ``(shape, qkv, cosines, sines, keys, values, key_stride, value_stride, positions, room, out, threads,
            parallel)``: one session's newest position. Queries and keys are normed and turned where they are; keys and
            values go to the last of ``positions`` rows of their slot, ``[key_heads, positions, width]`` with that many
            values from head to head; ``out`` ``[heads, width]`` is what attention gives, or None for none. The first
            half of ``sines`` is negated. ``room``: for ``heads * (width + 2)`` float32 for each ``ATTENDED`` positions
            or part of them; ``threads`` and ``parallel`` as for `product`.
        attend_long: the same, and other threads may run meanwhile.
        take: ``(codes, scales, out, groups, planes, half, byte, shift, stride)``: one row of a packed matrix. ``codes``
            is of its block (uint8, ``half`` bytes a column, the row's at ``byte``, by ``shift`` bits), ``scales`` of
            its first group (the next one's are ``stride`` values on).
        delta: ``(shape, rows, kept, mixed, gate, beta, step, room, out)``: positions of several sessions, those of one
            in order, through a gated delta rule, between its projections: convolution, rule, norm and gate. ``kept``:
            int64 ``[rows, 2]``, the addresses of a session's columns, bfloat16 ``[channels, taps]``, and state,
            float32 ``[heads, key_width, width]``, both renewed where they are. ``mixed`` ``[rows, channels]``, ``gate``
            and ``out`` ``[rows, heads, width]``, ``beta`` and ``step`` ``[rows, heads]``; ``room``: for ``channels``
            float32. Other threads may run meanwhile.
        experts: ``(shape, rows, x, chosen, weights, room, made, out)``: each row's experts, weighted and added up.
            ``x`` and ``out`` ``[rows, hidden]``; ``chosen`` int64 and ``weights`` float32 ``[rows, k]``; an expert
            behind the last one gives nothing. ``room``: for ``MOST_SHARING * (2 * inner + hidden)`` values, ``made``:
            float32 ``[rows, k, hidden]``. Other threads may run meanwhile.
        few: ``(shape, rows, x, out, threads, parallel)``: `product` of a step's rows, as quick as the weights come
            from memory, on any CPU; the same bits for a row, however many there are. The shape's way does not count.
            Other threads may run meanwhile.
        product: ``(shape, rows, x, out, room, threads, parallel)``: ``x`` ``[rows, in]`` by a matrix whose ``in`` is a
            multiple of 4, and ``out`` of ``COLUMN``. ``room``: for ``product_room(shape, rows, threads)`` float32, at a
            multiple of 64 bytes; ``parallel``: for more threads than one, the address of libgomp's ``GOMP_parallel``.
            Other threads may run meanwhile.
        product_ways: the ways that this CPU has; with none there is no `attend_chunk` either.
        attend_chunk: ``(shape, room, threads, parallel)``: each of ``count`` queries' heads over the keys up to its
            own, the last ``count`` of ``positions``; ``width`` is a multiple of ``COLUMN``. ``room``: for ``threads``
            times :attr:`chunk_room` of the width, and ``parallel``, as for `product`. Other threads may run meanwhile.
        chunk_add_norm: ``(is_float, x, other, weight, out, rows, width, eps, threads, parallel)``: ``x += other``,
            unless that is None, and the norm of it, unless ``weight`` is. Here and below of float32 tensors, where
            ``is_float`` says so; and other threads may run meanwhile.
        chunk_silu_mul: ``(is_float, gate_up, out, rows, width, threads, parallel)``, as `silu_mul`.
        chunk_take_in: ``(shape, is_float, rows, qkv, cosines, sines, keys, values, key_stride, value_stride, before,
            threads, parallel)``: what `attend` begins with, for rows of which ``before`` positions come before the
            first; cosines and sines ``[rows, width]``.
    """

    def __init__(self, path: Path) -> None:
        library: Any = ctypes.PyDLL(str(path))
        p, n, f = c_void_p, c_int, c_float
        self.norm = _bound(library.meshnet_norm, p, p, p, n, n, f)
        self.add = _bound(library.meshnet_add, p, p, n)
        self.add_norm = _bound(library.meshnet_add_norm, p, p, p, p, n, n, f)
        self.silu_mul = _bound(library.meshnet_silu_mul, p, p, n, n)
        self.take = _bound(library.meshnet_take, p, p, p, n, n, n, n, n, c_int64)
        attended = (POINTER(AttentionShape), p, p, p, p, p, c_int64, c_int64, n, p, p, n, p)
        self.attend = _bound(library.meshnet_attend, *attended)
        unlocked: Any = ctypes.CDLL(str(path))
        self.attend_long = _bound(unlocked.meshnet_attend, *attended)
        self.delta = _bound(unlocked.meshnet_delta, POINTER(DeltaShape), n, p, p, p, p, p, p, p)
        self.experts = _bound(unlocked.meshnet_experts, POINTER(MixtureShape), n, p, p, p, p, p, p)
        self.few = _bound(unlocked.meshnet_few, POINTER(MatrixShape), n, p, p, n, p)
        self.product = _bound(unlocked.meshnet_product, POINTER(MatrixShape), n, p, p, p, n, p)
        self.attend_chunk = _bound(unlocked.meshnet_attend_chunk, POINTER(ChunkShape), p, n, p)
        self.chunk_add_norm = _bound(unlocked.meshnet_chunk_add_norm, n, p, p, p, p, n, n, f, n, p)
        self.chunk_silu_mul = _bound(unlocked.meshnet_chunk_silu_mul, n, p, p, n, n, n, p)
        taken_in = (POINTER(AttentionShape), n, n, p, p, p, p, p, c_int64, c_int64, c_int64, n, p)
        self.chunk_take_in = _bound(unlocked.meshnet_chunk_take_in, *taken_in)
        self.chunk_room = library.meshnet_attend_chunk_room
        self.chunk_room.argtypes, self.chunk_room.restype = (n,), c_int64
        self.product_room = library.meshnet_product_room
        self.product_room.argtypes, self.product_room.restype = (POINTER(MatrixShape), n, n), c_int64
        self.product_ways = frozenset(list(ProductWay)[: library.meshnet_product_ways()])


def _bound(function: Any, *arguments: Any) -> Any:
    function.argtypes, function.restype = arguments, None
    return function
