"""Rows of float32 as int8 codes, a scale each, and the outliers that stay as they are.

Sixteen numbers at a time; no row's codes depend on another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..ops import W8A8_SMALLEST
from .compiled import inner
from .digits import finish_row
from .vector_ir import constant, nearest, pointers, spread, widened

WIDE = 16
"""Numbers at once."""
MAGNITUDE = 0x7FFFFFFF
"""A float32's bits but the sign: as integers in the order of the magnitudes, then infinity, then NaN."""

_I32 = ir.IntType(32)
_MASK = ir.IntType(WIDE)


@inner
def quantise_rows(part, parts, codes, scales, values, places, counts, x, limit):  # type: ignore[no-untyped-def]
    """One part of the rows of x [rows, k] as codes, scales and outliers: what is not below `limit`, a magnitude's bits.

    The first counts[t] of values[t] and places[t] are row t's outliers and their columns, in order. Codes are int8,
    rows as `digits` tells, or int16.
    """
    (rows, k), step = x.shape, codes.shape[1]
    flat, numbers, scale_bits = codes.reshape(codes.size), x.reshape(x.size), scales.view(np.int32)
    for t in range(rows * part // parts, rows * (part + 1) // parts):
        scale_bits[t] = _largest_below(numbers, t * k, k, limit)
        factor = np.float32(127) / scales[t] if scales[t] > W8A8_SMALLEST else np.float32(0)
        scales[t] /= np.float32(127)
        total = _write_codes(flat, t * step, numbers, t * k, k, factor, limit)
        if codes.itemsize == 1:
            finish_row(codes[t], k, total)
        found, j = 0, _next_outlier(numbers, t * k, 0, k, limit)
        while j < k:
            values[t, found], places[t, found] = x[t, j], j
            found, j = found + 1, _next_outlier(numbers, t * k, j + 1, k, limit)
        counts[t] = found


@intrinsic
def _largest_below(typingctx: Any, x: Any, at: Any, k: Any, limit: Any) -> Any:
    """The largest magnitude's bits, of those below `limit`, in x[at : at + k]; 0 if there is none."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        row, (_, _, k, limit) = b.gep(pointers(context, b, signature, args)[0], [args[1]]), args
        wide = ir.VectorType(_I32, WIDE)
        most = {
            lanes: cgutils.alloca_once_value(b, constant(kind, 0))
            for lanes, kind in ((WIDE, wide), (1, _I32))
        }
        for begin, end, lanes in _pieces(b, k):
            with cgutils.for_range_slice(b, begin, end, k.type(lanes), k.type) as (j, _):
                bits = _magnitudes(b, row, j, lanes)
                below = b.select(
                    b.icmp_signed("<", bits, spread(b, limit, lanes)), bits, constant(bits.type, 0)
                )
                b.store(_larger(b, below, b.load(most[lanes])), most[lanes])
        return _larger(b, _reduced(b, "smax", b.load(most[WIDE])), b.load(most[1]))

    return types.int32(x, types.int64, types.int64, types.int32), generate


@intrinsic
def _write_codes(
    typingctx: Any, codes: Any, at: Any, x: Any, x_at: Any, k: Any, factor: Any, limit: Any
) -> Any:
    """codes[at + j] = x[x_at + j] * factor rounded to the nearest (ties to even), 0 for outliers; their sum."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out, _, row, *_ = pointers(context, b, signature, args)
        _, at, _, x_at, k, factor, limit = args
        out, row, element = b.gep(out, [at]), b.gep(row, [x_at]), out.type.pointee
        wide = ir.VectorType(_I32, WIDE)
        sums = {
            lanes: cgutils.alloca_once_value(b, constant(kind, 0))
            for lanes, kind in ((WIDE, wide), (1, _I32))
        }
        for begin, end, lanes in _pieces(b, k):
            with cgutils.for_range_slice(b, begin, end, k.type(lanes), k.type) as (j, _):
                bits = _magnitudes(b, row, j, lanes)
                scaled = b.fmul(widened(b, row, j, types.float32, lanes), spread(b, factor, lanes))
                inside = b.icmp_signed("<", bits, spread(b, limit, lanes))
                code = b.select(inside, b.fptosi(nearest(b, scaled), bits.type), constant(bits.type, 0))
                b.store(b.add(b.load(sums[lanes]), code), sums[lanes])
                code = b.trunc(code, ir.VectorType(element, lanes) if lanes > 1 else element)
                b.store(code, b.bitcast(b.gep(out, [j]), code.type.as_pointer()), align=element.width // 8)
        return b.add(_reduced(b, "add", b.load(sums[WIDE])), b.load(sums[1]))

    word = types.int64
    return types.int32(codes, word, x, word, word, types.float32, types.int32), generate


@intrinsic
def _next_outlier(typingctx: Any, x: Any, at: Any, j: Any, k: Any, limit: Any) -> Any:
    """The first place from j on whose magnitude in x[at : at + k] is not below `limit`; k if there is none."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        row, (*_, k, limit) = b.gep(pointers(context, b, signature, args)[0], [args[1]]), args
        word, place, found = k.type, cgutils.alloca_once_value(b, args[2]), cgutils.alloca_once_value(b, k)
        check, look, hit, past, done = (
            b.append_basic_block(name) for name in ("check", "look", "hit", "past", "done")
        )
        b.branch(check)
        with b.goto_block(check):
            b.cbranch(b.icmp_signed("<=", b.add(b.load(place), word(WIDE)), k), look, past)
        with b.goto_block(look):
            j = b.load(place)
            mask = b.bitcast(b.icmp_signed(">=", _magnitudes(b, row, j, WIDE), spread(b, limit, WIDE)), _MASK)
            b.store(b.add(j, word(WIDE)), place)
            b.cbranch(b.icmp_unsigned("!=", mask, _MASK(0)), hit, check)
        with b.goto_block(hit):
            kind = ir.FunctionType(_MASK, [_MASK, ir.IntType(1)])
            function = cgutils.get_or_insert_function(b.module, kind, f"llvm.cttz.i{WIDE}")
            b.store(b.add(j, b.zext(b.call(function, [mask, ir.IntType(1)(1)]), word)), found)
            b.branch(done)
        b.position_at_end(past)
        with cgutils.for_range_slice(b, b.load(place), k, word(1), word) as (i, _):
            outlier = b.icmp_signed(">=", _magnitudes(b, row, i, 1), limit)
            with b.if_then(b.and_(outlier, b.icmp_signed("==", b.load(found), k))):
                b.store(i, found)
        b.branch(done)
        b.position_at_end(done)
        return b.load(found)

    word = types.int64
    return types.int64(x, word, word, word, types.int32), generate


def _pieces(b: Any, k: Any) -> list[tuple[Any, Any, int]]:
    """Begin, end and lanes: what is done `WIDE` at a time, and the rest."""
    whole = b.and_(k, k.type(-WIDE))
    return [(k.type(0), whole, WIDE), (whole, k, 1)]


def _magnitudes(b: Any, row: Any, at: Any, lanes: int) -> Any:
    kind = ir.VectorType(_I32, lanes) if lanes > 1 else _I32
    bits = b.load(b.bitcast(b.gep(row, [at]), kind.as_pointer()), align=4)
    return b.and_(bits, constant(kind, MAGNITUDE))


def _larger(b: Any, left: Any, right: Any) -> Any:
    return b.select(b.icmp_signed(">", left, right), left, right)


def _reduced(b: Any, how: str, vector: Any) -> Any:
    kind = ir.FunctionType(_I32, [vector.type])
    name = f"llvm.vector.reduce.{how}.v{vector.type.count}i32"
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), [vector])
