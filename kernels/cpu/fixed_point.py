"""Rows of float32 as fixed-point numbers of 24 bits, three digits in base 256, for exact sums of integers (`digits`).

A value loses what lies below 2^-23 of its row's largest magnitude, as it would when added to it in float32. A row with
infinities or NaN or of extreme size has no such form and is multiplied in float32, whoever shares its batch.

Few rows become digits in each thread for itself, since that takes less than what another core wrote takes to arrive.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .amx import TILE
from .arrays import aligned
from .compiled import inner
from .digits import BASE, DIGITS, HALF, QUAD, SUM_BYTES, add_products, digit_step
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
_ONES = 0x01010101
_ZEROS = HALF * (BASE**DIGITS - 1) // (BASE - 1)
"""Added to a number it leaves each digit + HALF in a byte of its own."""


@inner
def fixed_point(words, x, group_size, bands):  # type: ignore[no-untyped-def]
    """For `own_fixed_point`: digits of the rows of x [rows, k], with inputs in groups of `group_size`, int8 [copies,
    rows and `amx.TILE` rows of digits more, DIGITS, step], and scales, powers of two, float32 [copies, rows].

    With several bands of rows they are there afterwards, one copy; else there is room for each thread's own.
    """
    (rows, k), copies = x.shape, thread_count(words) if bands == 1 else 1
    shape = (
        copies,
        rows + TILE // DIGITS,
        DIGITS,
        digit_step(k, group_size),
    )  # a tile may begin at the last one
    codes = aligned(shape[0] * shape[1] * shape[2] * shape[3]).reshape(shape)
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
    flat = codes.reshape(codes.size)
    for t in range(rows * part // parts, rows * (part + 1) // parts):
        row, largest = bits[t], np.int32(0)
        for j in range(k):
            largest = max(largest, np.int32(row[j] & MAGNITUDE))
        exponent = np.int32(largest + TOO_NEAR) >> np.int32(23)
        if not SMALLEST <= exponent <= LARGEST:
            scales[t] = np.float32(0)
            continue
        scale_bits[t] = (exponent - np.int32(22)) << np.int32(23)
        write_digits(flat, t * DIGITS * step, step, values, t * k, k, np.float32(1) / scales[t], group_size)


@intrinsic
def write_digits(
    typingctx: Any,
    codes: Any,
    at: Any,
    step: Any,
    x: Any,
    x_at: Any,
    count: Any,
    factor: Any,
    group_size: Any,
) -> Any:
    """codes[at + d * step + j] = digit d of x[x_at + j] * factor, rounded to the nearest (ties to even), for j < count;
    and what comes after them in each row of digits, inputs in groups of `group_size`, a multiple of `WIDE` or all.

    codes is int8 and flat, x float32 and flat; the products are of less than `DIGITS` digits' magnitude.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays, (_, at, step, _, x_at, count, factor, group_size) = (
            pointers(context, b, signature, args),
            args,
        )
        word, four = count.type, ir.VectorType(_I32, WIDE // QUAD)
        rows = [b.gep(arrays[0], [b.add(at, b.mul(step, word(d)))]) for d in range(DIGITS)]
        end = b.and_(b.add(count, word(QUAD - 1)), word(-QUAD))
        for row in rows:
            b.store(_I32(0), b.bitcast(b.gep(row, [b.sub(end, word(QUAD))]), _I32.as_pointer()), align=1)
        sums = [cgutils.alloca_once(b, four) for _ in rows]
        totals = [cgutils.alloca_once(b, _I32) for _ in rows]
        groups = b.udiv(b.sub(b.add(count, group_size), word(1)), group_size)

        def write(j: Any, lanes: int) -> list[Any]:
            """The digits of `lanes` numbers from j on."""
            value = widened(b, arrays[3], b.add(x_at, j), types.float32, lanes)
            kind = ir.VectorType(_I32, lanes) if lanes > 1 else _I32
            rounded = b.fptosi(nearest(b, b.fmul(value, spread(b, factor, lanes))), kind)
            bits, digits = b.add(rounded, constant(kind, _ZEROS)), []
            for d, row in enumerate(rows):
                digit = b.xor(b.lshr(bits, constant(kind, 8 * (DIGITS - 1 - d))), constant(kind, HALF))
                digits.append(b.trunc(digit, ir.VectorType(_I8, lanes) if lanes > 1 else _I8))
                b.store(digits[d], b.bitcast(b.gep(row, [j]), digits[d].type.as_pointer()), align=1)
            return digits

        with cgutils.for_range(b, groups) as loop:
            begin = b.mul(loop.index, group_size)
            stop = b.add(begin, group_size)
            stop = b.select(b.icmp_signed("<", stop, count), stop, count)
            whole = b.add(begin, b.and_(b.sub(stop, begin), word(-WIDE)))
            for slot in sums:
                b.store(constant(four, 0), slot)
            with cgutils.for_range_slice(b, begin, whole, word(WIDE), word) as (j, _):
                for slot, digit in zip(sums, write(j, WIDE), strict=True):
                    b.store(
                        add_products(b, b.load(slot), constant(four, _ONES), b.bitcast(digit, four)), slot
                    )
            for slot, total in zip(sums, totals, strict=True):
                lanes = [b.extract_element(b.load(slot), _I32(i)) for i in range(four.count)]
                b.store(reduce(b.add, lanes), total)
            with cgutils.for_range_slice(b, whole, stop, word(1), word) as (j, _):
                for total, digit in zip(totals, write(j, 1), strict=True):
                    b.store(b.add(b.load(total), b.sext(digit, _I32)), total)
            for row, total in zip(rows, totals, strict=True):
                place = b.gep(row, [b.add(end, b.mul(loop.index, word(SUM_BYTES)))])
                b.store(b.load(total), b.bitcast(place, _I32.as_pointer()), align=1)
        return context.get_dummy_value()

    word = types.int64
    return types.void(codes, word, word, x, word, word, types.float32, word), generate
