"""Linear layers with packed weights, whose values are widened to float32 in registers or, for more rows, by strips.

The values are those the weight stands for, and the sums are in the order of `vector_ir.dots` on either way, so that a
row's result does not depend on which one was taken.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..packed_weight import PackedWeight
from .arrays import as_array, as_floats, optional
from .compiled import compiled
from .products import STRIP, evenly_spaced, row_products
from .team import TEAM, share
from .vector_ir import LANES, load, store, total

DIRECT_ROWS = 2
"""Up to this many rows values stay in registers; above, a strip is widened into a scratch for all of them."""
TILE = 4
"""Weight rows handled together in registers."""
PART_PRODUCTS = 150_000
"""Products in one part of the work: about 5 microseconds of one core."""
WIDENING = 3
"""What widening a weight costs, in products."""

_WORD, _REAL = ir.IntType(32), ir.FloatType()
_WORDS, _REALS = ir.VectorType(_WORD, LANES), ir.VectorType(_REAL, LANES)
_OCTETS = ir.VectorType(ir.IntType(8), LANES)


def _data(context: Any, b: Any, signature: Any, args: Any, index: int) -> Any:
    """The data pointer of an argument that is an array."""
    return context.make_array(signature.args[index])(context, b, args[index]).data


def _all_lanes(b: Any, value: Any) -> Any:
    vector = b.insert_element(ir.Constant(_REALS, ir.Undefined), value, _WORD(0))
    return b.shuffle_vector(vector, vector, ir.Constant(_WORDS, [0] * LANES))


def _at(b: Any, pointer: Any, index: Any) -> Any:
    """The eight floats that begin at pointer[index], as a place to load from or store to (`align=4`)."""
    return b.bitcast(b.gep(pointer, [index]), _REALS.as_pointer())


def _values(b: Any, codes: Any, place: Any, halves: int, zeros: Any, scales: Any) -> list[Any]:
    """(code - zero) * scale for the codes in the eight bytes from codes[place] on, in order: `halves` vectors."""
    octets = b.load(b.bitcast(b.gep(codes, [place]), _OCTETS.as_pointer()), align=1)
    words = b.zext(octets, _WORDS)
    parts = [words]
    if halves == 2:
        low, four = ir.Constant(_WORDS, [15] * LANES), ir.Constant(_WORDS, [4] * LANES)
        parts = [b.and_(words, low), b.lshr(words, four)]
    return [b.fmul(b.fsub(b.sitofp(part, _REALS), zeros), scales) for part in parts]


@intrinsic(prefer_literal=True)
def _widen(
    typingctx: Any, out: Any, start: Any, codes: Any, first: Any, count: Any, bits: Any, zero: Any, scale: Any
) -> Any:
    """out[start + j] = (code j - zero) * scale for j < `count`, the codes packed from byte `first` on.

    `bits` is a literal 4 (`count` a multiple of 16) or 8 (a multiple of 8).
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out, codes = (_data(context, b, signature, args, i) for i in (0, 2))
        _, start, _, first, count, _, zero, scale = args
        zeros, scales = _all_lanes(b, zero), _all_lanes(b, scale)
        halves = 8 // bits.literal_value
        step = count.type(LANES * halves)
        with cgutils.for_range_slice(b, count.type(0), count, step, count.type) as (j, _):
            place = b.add(first, b.udiv(j, count.type(halves)))
            for half, value in enumerate(_values(b, codes, place, halves, zeros, scales)):
                b.store(value, _at(b, out, b.add(b.add(start, j), count.type(half * LANES))), align=4)
        return context.get_dummy_value()

    return types.void(out, start, codes, first, count, bits, types.float32, types.float32), generate


@intrinsic(prefer_literal=True)
def _lane_sums(
    typingctx: Any, sums: Any, x: Any, x_rows: Any, codes: Any, w_rows: Any, zeros: Any, scales: Any, k: Any,
    group_size: Any, bits: Any,
) -> Any:  # fmt: skip
    """The eight lanes of `dots` before they are added up, for M rows of x times N rows of the weight.

    sums[8 * (m * N + n) + i] belongs to row m, column n, lane i. `x_rows` (elements) and `w_rows` (bytes) are tuples
    of M and N offsets; zeros and scales are float32, column n's from n * groups on; `bits` is a literal 4 or 8.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        sums, x, codes, zeros, scales = (_data(context, b, signature, args, i) for i in (0, 1, 3, 5, 6))
        x_rows, w_rows = cgutils.unpack_tuple(b, args[2]), cgutils.unpack_tuple(b, args[4])
        k, group_size = args[7], args[8]
        word = k.type
        halves = 8 // bits.literal_value
        fma = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(_REALS, [_REALS] * 3), f"llvm.fma.v{LANES}f32"
        )
        slots = [
            cgutils.alloca_once_value(b, ir.Constant(_REALS, [0.0] * LANES)) for _ in x_rows for _ in w_rows
        ]
        groups = b.sdiv(b.add(k, b.sub(group_size, word(1))), group_size)
        with cgutils.for_range(b, groups) as loop:
            begin = b.mul(loop.index, group_size)
            end = b.add(begin, group_size)
            end = b.select(b.icmp_signed("<", end, k), end, k)
            columns = []
            for n in range(len(w_rows)):
                place = b.add(b.mul(word(n), groups), loop.index)
                columns.append([_all_lanes(b, b.load(b.gep(array, [place]))) for array in (zeros, scales)])
            with cgutils.for_range_slice(b, begin, end, word(LANES * halves), word) as (j, _):
                factors = [
                    [
                        b.load(_at(b, x, b.add(b.add(row, j), word(half * LANES))), align=4)
                        for half in range(halves)
                    ]
                    for row in x_rows
                ]
                for n, row in enumerate(w_rows):
                    place = b.add(row, b.udiv(j, word(halves)))
                    for half, value in enumerate(_values(b, codes, place, halves, *columns[n])):
                        for m in range(len(x_rows)):
                            slot = slots[m * len(w_rows) + n]
                            b.store(b.call(fma, [factors[m][half], value, b.load(slot)]), slot)
        for i, slot in enumerate(slots):
            b.store(b.load(slot), _at(b, sums, word(i * LANES)), align=4)
        return context.get_dummy_value()

    signature = types.void(sums, x, x_rows, codes, w_rows, zeros, scales, types.int64, types.int64, bits)
    return signature, generate


@compiled
def _widen_row(wide, start, codes, scales, zeros, bits, group_size, n, k):  # type: ignore[no-untyped-def]
    """wide[start : start + k] = row n of the weight"""
    groups = zeros.shape[1]
    for g in range(groups):
        j = g * group_size
        count = min(group_size, k - j)
        zero, scale = np.float32(zeros[n, g]), load(scales, n * groups + g)
        if bits == 4:
            _widen(wide, start + j, codes, (n * k + j) // 2, count, 4, zero, scale)
        else:
            _widen(wide, start + j, codes, n * k + j, count, 8, zero, scale)


@compiled
def _direct(out, x, rows, codes, scales, zeros, bits, group_size, begin, end, size, k):  # type: ignore[no-untyped-def]
    """Columns `begin` to `end` of out for one row of x, or two."""
    groups, row_bytes = zeros.shape[1], k * bits // 8
    sums = np.empty(2 * TILE * LANES, np.float32)
    tile_zeros, tile_scales = np.empty(TILE * groups, np.float32), np.empty(TILE * groups, np.float32)
    for first in range(begin, end, TILE):
        width = min(TILE, end - first)
        for i in range(TILE):  # a tile that is not full has its last row again
            n = first + min(i, width - 1)
            for g in range(groups):
                tile_zeros[i * groups + g] = zeros[n, g]
                tile_scales[i * groups + g] = load(scales, n * groups + g)
        last = first + width - 1
        places = (
            first * row_bytes,
            min(first + 1, last) * row_bytes,
            min(first + 2, last) * row_bytes,
            min(first + 3, last) * row_bytes,
        )
        if rows == 1 and bits == 4:
            _lane_sums(sums, x, (0,), codes, places, tile_zeros, tile_scales, k, group_size, 4)
        elif rows == 1:
            _lane_sums(sums, x, (0,), codes, places, tile_zeros, tile_scales, k, group_size, 8)
        elif bits == 4:
            _lane_sums(sums, x, (0, k), codes, places, tile_zeros, tile_scales, k, group_size, 4)
        else:
            _lane_sums(sums, x, (0, k), codes, places, tile_zeros, tile_scales, k, group_size, 8)
        for t in range(rows):
            for i in range(width):
                store(out, t * size + first + i, total(sums, (t * TILE + i) * LANES, LANES))


@compiled
def _columns(part, parts, out, x, rows, codes, scales, zeros, bits, group_size, size, bias, k):  # type: ignore[no-untyped-def]
    """One part of the columns of out [rows, size] = x [rows, k] @ weight [size, k] transposed + bias."""
    strips = (size + STRIP - 1) // STRIP
    begin, end = strips * part // parts * STRIP, min(strips * (part + 1) // parts * STRIP, size)
    if rows <= DIRECT_ROWS:
        _direct(out, x, rows, codes, scales, zeros, bits, group_size, begin, end, size, k)
    else:
        x_rows, out_rows, wide_rows = (
            evenly_spaced(rows, k),
            evenly_spaced(rows, size),
            evenly_spaced(STRIP, k),
        )
        wide = np.empty(STRIP * k, np.float32)
        for n in range(begin, end, STRIP):
            width = min(STRIP, end - n)
            for i in range(width):
                _widen_row(wide, i * k, codes, scales, zeros, bits, group_size, n + i, k)
            row_products(out, out_rows, n, x, x_rows, 0, rows, wide, wide_rows, 0, width, k)
    if bias.size:
        for t in range(rows):
            for n in range(begin, end):
                store(out, t * size + n, load(out, t * size + n) + load(bias, n))


@compiled
def _product(words, parts, out, x, rows, codes, scales, zeros, bits, group_size, size, bias, k):  # type: ignore[no-untyped-def]
    share(words, parts, _columns, (out, x, rows, codes, scales, zeros, bits, group_size, size, bias, k))


def linear_w4(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """y[t, n] = sum_j x[t, order[j]] * (codes[n, j] - zeros[n, g]) * scales[n, g] + bias[n]"""
    rows, k = x.shape
    size = weight.out_features
    out = torch.empty((rows, size), dtype=torch.float32)
    if rows and size:
        ordered = x if weight.order is None else x.index_select(1, weight.order)
        parts = max(1, min((rows + WIDENING) * size * k // PART_PRODUCTS, size // STRIP))
        _product(
            TEAM.words, parts, out.numpy(), as_floats(ordered), rows, as_array(weight.codes),
            as_array(weight.scales), as_array(weight.zeros), weight.bits, weight.group_size, size,
            optional(bias), k,
        )  # fmt: skip
    return out if x.dtype == torch.float32 else out.to(x.dtype)
