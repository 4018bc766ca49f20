"""Rows of float32 as fixed-point numbers of 24 bits, three digits in base 256, for exact sums of integers (`digits`).

A value loses what lies below 2^-23 of its row's largest magnitude, as it would when added to it in float32. A row with
infinities or NaN or of extreme size has no such form and is multiplied in float32, whoever shares its batch.

Few rows become digits in each thread for itself, since that takes less than what another core wrote takes to arrive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiled import inner
from .digits import BASE, DIGITS, HALF, digit_step, finish_row
from .linears import PART_VALUES
from .team import APART, share, thread_count
from .vector_ir import constant, nearest, pointers, spread, widened

WIDE = 16
"""Numbers that become digits at once."""
SMALLEST, LARGEST = np.int32(27), np.int32(227)
"""Biased exponents of the largest magnitudes that have a scale: from 2^-100 to 2^100."""
TOO_NEAR = np.int32(BASE**2 + BASE + 1)
"""Last places of a float32: nearer to the next power of two its first digit would be 128: it takes that one's scale."""
MAGNITUDE = np.int32(0x7FFFFFFF)
"""A float32's bits but the sign."""

_I8, _I32 = ir.IntType(8), ir.IntType(32)
_ZEROS = HALF * (BASE**DIGITS - 1) // (BASE - 1)
"""Added to a number it leaves each digit + HALF in a byte of its own."""


@inner
def fixed_point(words, x, group_size, bands):  # type: ignore[no-untyped-def]
    """For `own_fixed_point`: digits of the rows of x [rows, k], with inputs in groups of `group_size`, int8 [copies,
    rows, DIGITS, step], and scales, powers of two, float32 [copies, rows].

    With several bands of rows they are there afterwards, one copy; else there is room for each thread's own.
    """
    (rows, k), copies = x.shape, thread_count(words) if bands == 1 else 1
    codes = np.empty((copies, rows, DIGITS, digit_step(k, group_size)), np.int8)
    scales = np.empty((copies, rows), np.float32)
    if copies == 1:
        parts = max(1, min(rows, rows * k // PART_VALUES))
        share(words, parts, _write_rows, (codes[0], scales[0], x, group_size))
    return codes, scales


@inner
def own_fixed_point(thread, ready, all_codes, all_scales, x, group_size):  # type: ignore[no-untyped-def]
    """The digits that a thread reads, flat, each row of them as `digits` tells, and the rows' scales; 0 for a row that
    has none. It makes its own when it first asks: ready[thread * APART].
    """
    copies, rows, _, step = all_codes.shape
    copy = thread if copies > 1 else 0
    if copies > 1 and not ready[thread * APART]:
        _write_rows(0, 1, all_codes[copy], all_scales[copy], x, group_size)
        ready[thread * APART] = 1
    return all_codes[copy].reshape(rows * DIGITS * step), all_scales[copy]


@inner
def _write_rows(part, parts, codes, scales, x, group_size):  # type: ignore[no-untyped-def]
    """One part of the rows of x as digits and scales."""
    (rows, k), step = x.shape, codes.shape[2]
    values, bits, scale_bits = x.reshape(rows * k), x.view(np.int32), scales.view(np.int32)
    flat = codes.reshape(rows * DIGITS * step)
    for t in range(rows * part // parts, rows * (part + 1) // parts):
        row, largest = bits[t], np.int32(0)
        for j in range(k):
            largest = max(largest, np.int32(row[j] & MAGNITUDE))
        exponent = np.int32(largest + TOO_NEAR) >> np.int32(23)
        if not SMALLEST <= exponent <= LARGEST:
            scales[t] = np.float32(0)
            continue
        scale_bits[t] = (exponent - np.int32(22)) << np.int32(23)
        write_digits(flat, t * DIGITS * step, step, values, t * k, k, np.float32(1) / scales[t])
        for d in range(t * DIGITS, (t + 1) * DIGITS):
            finish_row(flat[d * step : (d + 1) * step], k, group_size)


@intrinsic
def write_digits(
    typingctx: Any, codes: Any, at: Any, step: Any, x: Any, x_at: Any, count: Any, factor: Any
) -> Any:
    """codes[at + d * step + j] = digit d of x[x_at + j] * factor, rounded to the nearest (ties to even), for j < count.

    codes is int8 and flat, x float32 and flat; the products are of less than `DIGITS` digits' magnitude.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays, (_, at, step, _, x_at, count, factor) = pointers(context, b, signature, args), args
        word = count.type
        whole = b.and_(count, word(-WIDE))
        for first, last, lanes in ((word(0), whole, WIDE), (whole, count, 1)):
            with cgutils.for_range_slice(b, first, last, word(lanes), word) as (j, _):
                value = b.fmul(
                    widened(b, arrays[3], b.add(x_at, j), types.float32, lanes), spread(b, factor, lanes)
                )
                kind = ir.VectorType(_I32, lanes) if lanes > 1 else _I32
                bits = b.add(b.fptosi(nearest(b, value), kind), constant(kind, _ZEROS))
                for d in range(DIGITS):
                    digit = b.lshr(bits, constant(kind, 8 * (DIGITS - 1 - d)))
                    digit = b.trunc(
                        b.xor(digit, constant(kind, HALF)), ir.VectorType(_I8, lanes) if lanes > 1 else _I8
                    )
                    place = b.gep(arrays[0], [b.add(b.add(at, j), b.mul(step, word(d)))])
                    b.store(digit, b.bitcast(place, digit.type.as_pointer()), align=1)
        return context.get_dummy_value()

    word = types.int64
    return types.void(codes, word, word, x, word, word, types.float32), generate
