"""Dot products of integers, which are exact, so that no order of sums has to be kept.

Sixteen pairs of int16 at a time are multiplied and added up by twos into eight int32: x86 has one instruction for it,
which LLVM does not find by itself once it has seen that one side was widened from int8.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .vector_ir import call_tile, pointers, prefetch

LANES = 16
"""Elements multiplied at once."""
X86_PAIRS = bool(binding.get_host_cpu_features().get("avx2"))
"""Whether this machine has the instruction."""

_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_WORDS, _SUMS = ir.VectorType(_I16, LANES), ir.VectorType(_I32, LANES // 2)


@intrinsic
def integer_dots(
    typingctx: Any, out: Any, out_rows: Any, x: Any, x_rows: Any, w: Any, w_rows: Any, k: Any
) -> Any:
    """out[out_rows[m] + n] = sum_k x[x_rows[m] + k] * w[w_rows[n] + k], modulo 2^32

    out int32, x int16, w int8, all read as flat. `out_rows` and `x_rows` are tuples of M offsets, `w_rows` of N: the
    lengths fix the tile, and M * N vectors of sums stay in registers (16 of them on AVX2: M * N up to 9).
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x86 = X86_PAIRS
        arrays = pointers(context, b, signature, args)
        outs, xs, ws = (
            [b.gep(arrays[i], [offset]) for offset in cgutils.unpack_tuple(b, args[i + 1])] for i in (0, 2, 4)
        )

        def define(function: Any) -> None:
            _define(function, len(xs), len(ws), x86)

        name = f"heddle.integer_dots.{len(xs)}.{len(ws)}.{'x86' if x86 else 'any'}"
        call_tile(b, name, [*outs, *xs, *ws, args[6]], define)
        return context.get_dummy_value()

    return types.void(out, out_rows, x, x_rows, w, w_rows, k), generate


def _define(function: Any, rows: int, columns: int, x86: bool) -> None:
    """The body for one tile, taking pointers to its `rows` outputs and x rows and `columns` w rows, and k."""
    b = ir.IRBuilder(function.append_basic_block("entry"))
    outs, xs = function.args[:rows], function.args[rows : 2 * rows]
    ws, size = function.args[2 * rows : -1], function.args[-1]
    whole = b.and_(size, size.type(-LANES))
    lanes = [cgutils.alloca_once_value(b, _constant(_SUMS, 0)) for _ in range(rows * columns)]
    with cgutils.for_range_slice(b, size.type(0), whole, size.type(LANES), size.type) as (k, _):
        prefetch(b, b.gep(ws[-1], [b.add(size, b.mul(k, size.type(columns)))]))  # the next tile, most likely
        values = [b.sext(_load(b, w, k, _I8), _WORDS) for w in ws]
        for m, x in enumerate(xs):
            factor = _load(b, x, k, _I16)
            for n, value in enumerate(values):
                slot = lanes[m * columns + n]
                b.store(b.add(b.load(slot), _pair_sums(b, factor, value, x86)), slot)
    sums = [cgutils.alloca_once_value(b, _add_up(b, b.load(slot))) for slot in lanes]
    with cgutils.for_range_slice(b, whole, size, size.type(1), size.type) as (k, _):
        for i, slot in enumerate(sums):
            m, n = divmod(i, columns)
            factor, value = (b.sext(b.load(b.gep(row, [k])), _I32) for row in (xs[m], ws[n]))
            b.store(b.add(b.load(slot), b.mul(factor, value)), slot)
    for i, slot in enumerate(sums):
        m, n = divmod(i, columns)
        b.store(b.load(slot), b.gep(outs[m], [size.type(n)]))
    b.ret_void()


def _constant(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _load(b: Any, pointer: Any, offset: Any, element: Any) -> Any:
    place = b.bitcast(b.gep(pointer, [offset]), ir.VectorType(element, LANES).as_pointer())
    return b.load(place, align=element.width // 8)


def _pair_sums(b: Any, x: Any, w: Any, x86: bool) -> Any:
    """x[2 i] * w[2 i] + x[2 i + 1] * w[2 i + 1] as int32, for 16 int16 of each."""
    if x86:
        kind = ir.FunctionType(_SUMS, [_WORDS, _WORDS])
        return b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx2.pmadd.wd"), [x, w])
    return b.add(*(b.mul(_every_other(b, x, start), _every_other(b, w, start)) for start in (0, 1)))


def _every_other(b: Any, vector: Any, start: int) -> Any:
    """The even (`start` 0) or odd (1) ones of 16 int16, as int32."""
    index = ir.Constant(_SUMS, list(range(start, LANES, 2)))
    return b.sext(b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), index), _SUMS)


def _add_up(b: Any, vector: Any) -> Any:
    """The sum of a vector's lanes."""
    width = vector.type.count
    while width > 1:
        width //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        low, high = (
            ir.Constant(ir.VectorType(_I32, width), list(range(start, start + width))) for start in (0, width)
        )
        vector = b.add(b.shuffle_vector(vector, undefined, low), b.shuffle_vector(vector, undefined, high))
    return b.extract_element(vector, _I32(0))
