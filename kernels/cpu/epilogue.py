"""What a product's sums become before they are written: scaled, with a bias. Written once for all linears.

Sixteen outputs at a time, in the order of operations that each function tells: LLVM keeps loops over slices of arrays
from vectors of that width, which cost more than the products do in tiles (`amx`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiled import inner
from .digits import DIGITS, in_base
from .vector_ir import load, pointers, spread, store, widened

WIDE = 16
"""Outputs at once."""

_I32, _F32 = ir.IntType(32), ir.FloatType()


@inner
def scaled(out, at, sums, sums_at, factor, scale, bias, n, width):  # type: ignore[no-untyped-def]
    """out[at + i] = sums[sums_at + i] * factor * scale[n + i] + bias[n + i] for i < width; arrays may be empty."""
    if scale.size and bias.size:
        for i in range(width):
            store(out, at + i, load(sums, sums_at + i) * factor * load(scale, n + i) + load(bias, n + i))
    elif scale.size:
        for i in range(width):
            store(out, at + i, load(sums, sums_at + i) * factor * load(scale, n + i))
    elif bias.size:
        for i in range(width):
            store(out, at + i, load(sums, sums_at + i) * factor + load(bias, n + i))
    else:
        for i in range(width):
            store(out, at + i, load(sums, sums_at + i) * factor)


@intrinsic
def scaled_numbers(
    typingctx: Any, out: Any, at: Any, sums: Any, sums_at: Any, step: Any, factor: Any, scale: Any, bias: Any, n: Any,
    width: Any,
) -> Any:  # fmt: skip
    """out[at + i] = number[i] * factor * scale[n + i] + bias[n + i] for i < width; bias may be empty

    of the numbers whose digits are sums[sums_at + d * step + i], int32. Arrays are flat.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays = pointers(context, b, signature, args)
        _, at, _, sums_at, step, factor, _, _, n, width = args
        word = width.type
        digits = [b.gep(arrays[2], [b.add(sums_at, b.mul(step, word(d)))]) for d in range(DIGITS)]

        def value(i: Any, lanes: int) -> Any:
            number = in_base(b, [_integers(b, row, i, lanes) for row in digits])
            scales = widened(b, arrays[6], b.add(n, i), types.float32, lanes)
            return b.fmul(b.fmul(number, spread(b, factor, lanes)), scales)

        _write(context, b, signature.args[7], args[7], b.gep(arrays[0], [at]), arrays[7], n, width, value)
        return context.get_dummy_value()

    word = types.int64
    return types.void(out, word, sums, word, word, types.float32, scale, bias, word, word), generate


@intrinsic
def scaled_sums(
    typingctx: Any, out: Any, at: Any, sums: Any, sums_at: Any, factor: Any, deltas: Any, scale: Any, bias: Any,
    n: Any, width: Any,
) -> Any:  # fmt: skip
    """out[at + i] = (sums[sums_at + i] * factor + deltas[i]) * scale[n + i] + bias[n + i] for i < width

    for sums in float32 or int32; bias may be empty. Arrays are flat.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays = pointers(context, b, signature, args)
        _, at, _, sums_at, factor, _, _, _, n, width = args
        first = b.gep(arrays[2], [sums_at])

        def value(i: Any, lanes: int) -> Any:
            if signature.args[2].dtype == types.int32:
                whole = _integers(b, first, i, lanes)
                total = b.sitofp(whole, ir.VectorType(_F32, lanes) if lanes > 1 else _F32)
            else:
                total = widened(b, first, i, types.float32, lanes)
            delta = widened(b, arrays[5], i, types.float32, lanes)
            scales = widened(b, arrays[6], b.add(n, i), types.float32, lanes)
            return b.fmul(b.fadd(b.fmul(total, spread(b, factor, lanes)), delta), scales)

        _write(context, b, signature.args[7], args[7], b.gep(arrays[0], [at]), arrays[7], n, width, value)
        return context.get_dummy_value()

    word = types.int64
    return types.void(out, word, sums, word, types.float32, deltas, scale, bias, word, word), generate


def _write(
    context: Any, b: Any, bias_type: Any, bias: Any, out: Any, biases: Any, n: Any, width: Any,
    value: Callable[[Any, int], Any],
) -> None:  # fmt: skip
    """out[i] = value(i) (+ biases[n + i], unless `bias` is empty) for i < width."""
    word = width.type
    given = b.icmp_signed(">", context.make_array(bias_type)(context, b, bias).nitems, word(0))
    whole = b.and_(width, word(-WIDE))
    with b.if_else(given) as branches:
        for branch, biased in zip(branches, (True, False), strict=True):
            with branch:
                for begin, end, lanes in ((word(0), whole, WIDE), (whole, width, 1)):
                    with cgutils.for_range_slice(b, begin, end, word(lanes), word) as (i, _):
                        result = value(i, lanes)
                        if biased:
                            result = b.fadd(result, widened(b, biases, b.add(n, i), types.float32, lanes))
                        b.store(result, b.bitcast(b.gep(out, [i]), result.type.as_pointer()), align=4)


def _integers(b: Any, row: Any, at: Any, lanes: int) -> Any:
    kind = ir.VectorType(_I32, lanes) if lanes > 1 else _I32
    return b.load(b.bitcast(b.gep(row, [at]), kind.as_pointer()), align=4)
