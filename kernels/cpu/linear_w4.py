"""Linear layers with packed weights: a strip of them is widened to float32 once, for all rows of x.

The widened values are those the weight stands for, so the sums are `products`' own, in its order.
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
from .vector_ir import LANES, load, store

PART_PRODUCTS = 150_000
"""Products in one part of the work: about 5 microseconds of one core."""
WIDENING = 3
"""What widening a weight costs, in products."""


@intrinsic(prefer_literal=True)
def _widen(
    typingctx: Any, out: Any, start: Any, codes: Any, first: Any, count: Any, bits: Any, zero: Any, scale: Any
) -> Any:
    """out[start + j] = (code j - zero) * scale for j < `count`, the codes packed from byte `first` on.

    `bits` is a literal 4 (`count` a multiple of 16) or 8 (a multiple of 8).
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out, codes = (
            context.make_array(kind)(context, b, value).data
            for kind, value in ((signature.args[0], args[0]), (signature.args[2], args[2]))
        )
        _, start, _, first, count, _, zero, scale = args
        word, byte, real = ir.IntType(32), ir.IntType(8), ir.FloatType()
        integers, bytes_, floats = (ir.VectorType(kind, LANES) for kind in (word, byte, real))

        def all_lanes(value: Any) -> Any:
            vector = b.insert_element(ir.Constant(floats, ir.Undefined), value, word(0))
            return b.shuffle_vector(vector, vector, ir.Constant(integers, [0] * LANES))

        zeros, scales = all_lanes(zero), all_lanes(scale)
        halves = 8 // bits.literal_value
        step = count.type(LANES * halves)
        with cgutils.for_range_slice(b, count.type(0), count, step, count.type) as (j, _):
            place = b.gep(codes, [b.add(first, b.udiv(j, count.type(halves)))])
            pair = b.zext(b.load(b.bitcast(place, bytes_.as_pointer()), align=1), integers)
            for half in range(halves):
                code = pair
                if halves == 2:
                    code = (
                        b.lshr(pair, ir.Constant(integers, [4] * LANES))
                        if half
                        else b.and_(pair, ir.Constant(integers, [15] * LANES))
                    )
                value = b.fmul(b.fsub(b.sitofp(code, floats), zeros), scales)
                target = b.gep(out, [b.add(b.add(start, j), count.type(half * LANES))])
                b.store(value, b.bitcast(target, floats.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(out, start, codes, first, count, bits, types.float32, types.float32), generate


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
def _columns(part, parts, out, x, rows, codes, scales, zeros, bits, group_size, size, bias, k):  # type: ignore[no-untyped-def]
    """One part of the columns of out [rows, size] = x [rows, k] @ weight [size, k] transposed + bias."""
    strips = (size + STRIP - 1) // STRIP
    begin, end = strips * part // parts * STRIP, min(strips * (part + 1) // parts * STRIP, size)
    x_rows, out_rows, wide_rows = evenly_spaced(rows, k), evenly_spaced(rows, size), evenly_spaced(STRIP, k)
    wide = np.empty(STRIP * k, np.float32)
    strip = STRIP if rows > 2 else STRIP // 3
    for n in range(begin, end, strip):
        width = min(strip, end - n)
        for i in range(width):
            _widen_row(wide, i * k, codes, scales, zeros, bits, group_size, n + i, k)
        row_products(out, out_rows, n, x, x_rows, 0, rows, wide, wide_rows, 0, width, k)
        if bias.size:
            for t in range(rows):
                for i in range(width):
                    at = out_rows[t] + n + i
                    store(out, at, load(out, at) + load(bias, n + i))


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
