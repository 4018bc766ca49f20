"""Vector code that numba's own loops cannot promise: the order of every sum is written down here, in LLVM's terms.

A loop over floats is summed by a compiler either one by one (slow) or in an order of its choice (other bits in
each copy of the loop). So the reductions are spelled out: a sum over k runs in eight lanes, lane i taking k = i,
i + 8, i + 16, … by fused multiply-adds; the lanes are then added as a tree (halves, quarters, pair), and what is
left beyond the last multiple of eight is added one by one. Nothing else enters: whichever tile a pair of rows is
computed in, its bits are the same.

Arrays are read as flat. Elements may be float32, int8, float16 or bfloat16 and are widened to float32 exactly as
they are read; numba has no 16-bit floats, so float16 comes as uint16 and bfloat16 as int16 (`arrays.as_array`).
Offsets are in elements and are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
CACHE_LINE = 64
FLOAT16, BFLOAT16 = types.uint16, types.int16
"""What the 16-bit floats are called in numba's types."""

_F32, _I8, _I16, _I32 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)


@intrinsic
def dots(typingctx: Any, out: Any, out_rows: Any, x: Any, x_rows: Any, w: Any, w_rows: Any, k: Any) -> Any:
    """out[out_rows[m] + n] = sum_k x[x_rows[m] + k] * w[w_rows[n] + k]

    `out_rows` and `x_rows` are tuples of M offsets, `w_rows` of N: the lengths fix the tile, and M * N vectors of sums
    stay in registers (16 of them on AVX2: M * N up to 12).
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays = pointers(context, b, signature, args)
        x_type, w_type = signature.args[2].dtype, signature.args[4].dtype
        outs = [b.gep(arrays[0], [offset]) for offset in cgutils.unpack_tuple(b, args[1])]
        xs = [b.gep(arrays[2], [offset]) for offset in cgutils.unpack_tuple(b, args[3])]
        ws = [b.gep(arrays[4], [offset]) for offset in cgutils.unpack_tuple(b, args[5])]
        operands = [*outs, *xs, *ws, args[6]]

        def define(function: Any) -> None:
            _define_dots(function, len(xs), len(ws), x_type, w_type)

        call_tile(b, f"heddle.dots.{len(xs)}.{len(ws)}.{x_type}.{w_type}", operands, define)
        return context.get_dummy_value()

    return types.void(out, out_rows, x, x_rows, w, w_rows, k), generate


def _define_dots(function: Any, rows: int, columns: int, x_type: Any, w_type: Any) -> None:
    """The body of `dots` for one tile, taking pointers to its `rows` outputs and x rows and `columns` w rows."""
    b = ir.IRBuilder(function.append_basic_block("entry"))
    outs, xs = function.args[:rows], function.args[rows : 2 * rows]
    ws, size = function.args[2 * rows : -1], function.args[-1]
    whole = b.and_(size, size.type(-LANES))

    def add_products(sums: list[Any], start: Any, stop: Any, lanes: int) -> None:
        with cgutils.for_range_slice(b, start, stop, size.type(lanes), size.type) as (k, _):
            if lanes == LANES:
                ask_for_next(k)
            values = [widened(b, w, k, w_type, lanes) for w in ws]
            for m, x in enumerate(xs):
                factor = widened(b, x, k, x_type, lanes)
                for n, value in enumerate(values):
                    slot = sums[m * columns + n]
                    b.store(fused(b, factor, value, b.load(slot)), slot)

    def ask_for_next(k: Any) -> None:
        """Fetch what lies behind these w rows, most likely the next tile, while this one is worked on."""
        step = columns * LANES  # elements of w per round
        behind = b.gep(ws[-1], [b.add(size, b.mul(k, size.type(columns)))])
        for line in range(0, step * w_type.bitwidth // 8, CACHE_LINE):
            prefetch(b, b.gep(behind, [size.type(line * 8 // w_type.bitwidth)]))

    lane_sums = [cgutils.alloca_once_value(b, splat(b, _F32(0.0))) for _ in range(rows * columns)]
    add_products(lane_sums, size.type(0), whole, LANES)
    sums = [
        cgutils.alloca_once_value(b, value) for value in _tree_sums(b, [b.load(slot) for slot in lane_sums])
    ]
    add_products(sums, whole, size, 1)
    for i, slot in enumerate(sums):
        m, n = divmod(i, columns)
        b.store(b.load(slot), b.gep(outs[m], [size.type(n)]))
    b.ret_void()


@intrinsic
def add_weighted_rows(
    typingctx: Any,
    out: Any,
    out_rows: Any,
    p: Any,
    p_rows: Any,
    v: Any,
    v_rows: Any,
    v_at: Any,
    count: Any,
    columns: Any,
) -> Any:
    """out[out_rows[m] + c + i] += sum_j p[p_rows[m] + j] * v[v_rows[j] + v_at + c + i], for i in 0..7, c in columns

    j runs from 0 to count; each sum starts at zero and is then added to `out`. `v_rows` is an int64 array; `out_rows`,
    `p_rows` and `columns` are tuples, whose lengths fix the tile.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays = pointers(context, b, signature, args)
        v_type = signature.args[4].dtype
        outs = [b.gep(arrays[0], [offset]) for offset in cgutils.unpack_tuple(b, args[1])]
        weights = [b.gep(arrays[2], [offset]) for offset in cgutils.unpack_tuple(b, args[3])]
        values = b.gep(arrays[4], [args[6]])
        starts = cgutils.unpack_tuple(b, args[8])
        operands = [*outs, *weights, *starts, values, arrays[5], args[7]]

        def define(function: Any) -> None:
            _define_weighted_rows(function, len(outs), len(starts), v_type)

        call_tile(b, f"heddle.weighted.{len(outs)}.{len(starts)}.{v_type}", operands, define)
        return context.get_dummy_value()

    return types.void(out, out_rows, p, p_rows, v, v_rows, v_at, count, columns), generate


def _define_weighted_rows(function: Any, rows: int, groups: int, v_type: Any) -> None:
    """The body of `add_weighted_rows` for one tile: `rows` outputs and weights, `groups` starts of eight columns."""
    b = ir.IRBuilder(function.append_basic_block("entry"))
    outs, weights = function.args[:rows], function.args[rows : 2 * rows]
    starts, (values, v_rows, count) = function.args[2 * rows : -3], function.args[-3:]
    sums = [cgutils.alloca_once_value(b, splat(b, _F32(0.0))) for _ in range(rows * groups)]
    with cgutils.for_range_slice(b, count.type(0), count, count.type(1), count.type) as (j, _):
        row = b.gep(values, [b.load(b.gep(v_rows, [j]))])
        for line in range(0, groups * LANES * v_type.bitwidth // 8, CACHE_LINE):  # the columns to come
            prefetch(b, b.gep(row, [b.add(starts[-1], count.type(LANES + line * 8 // v_type.bitwidth))]))
        factors = [splat(b, b.load(b.gep(weight, [j]))) for weight in weights]
        for n, start in enumerate(
            starts
        ):  # one value at a time: with 12 sums and 3 factors that fills 16 registers
            value = widened(b, row, start, v_type, LANES)
            for m, factor in enumerate(factors):
                slot = sums[m * groups + n]
                b.store(fused(b, factor, value, b.load(slot)), slot)
    for i, slot in enumerate(sums):
        m, n = divmod(i, groups)
        target = b.bitcast(b.gep(outs[m], [starts[n]]), ir.VectorType(_F32, LANES).as_pointer())
        b.store(b.fadd(b.load(target, align=4), b.load(slot)), target, align=4)
    b.ret_void()


def call_tile(b: Any, name: str, operands: list[Any], define: Callable[[Any], None]) -> None:
    """Call the function of that name, defined once in a module and never inlined: copies only cost compile time."""
    kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    function = cgutils.get_or_insert_function(b.module, kind, name)
    if function.is_declaration:
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        define(function)
    b.call(function, operands)


@intrinsic
def total(typingctx: Any, x: Any, start: Any, count: Any) -> Any:
    """sum of x[start : start + count], in the order of `dots`"""
    return types.float32(x, start, count), _reduction(0.0, lambda b, left, right: b.fadd(left, right))


@intrinsic
def largest(typingctx: Any, x: Any, start: Any, count: Any) -> Any:
    """max of x[start : start + count], NaN ones left out; -inf when there is none"""

    def greater(b: Any, left: Any, right: Any) -> Any:
        return b.select(b.fcmp_ordered(">", right, left), right, left)

    return types.float32(x, start, count), _reduction(float("-inf"), greater)


@intrinsic
def load(typingctx: Any, array: Any, index: Any) -> Any:
    """array[index] as float32"""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        pointer = pointers(context, b, signature, args)[0]
        return widened(b, pointer, args[1], signature.args[0].dtype, 1)

    return types.float32(array, index), generate


@intrinsic
def store(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] = value, rounded to the nearest (ties to even) if the array is of 16 bits"""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        pointer = b.gep(pointers(context, b, signature, args)[0], [args[1]])
        dtype, value = signature.args[0].dtype, args[2]
        if dtype == FLOAT16:
            value = b.bitcast(b.fptrunc(value, ir.HalfType()), _I16)
        elif dtype == BFLOAT16:
            bits = b.bitcast(value, _I32)
            odd = b.and_(b.lshr(bits, _I32(16)), _I32(1))
            rounded = b.add(bits, b.add(_I32(0x7FFF), odd))
            quiet_nan = b.or_(bits, _I32(0x400000))
            is_nan = b.fcmp_unordered("uno", value, value)
            value = b.trunc(b.lshr(b.select(is_nan, quiet_nan, rounded), _I32(16)), _I16)
        b.store(value, pointer)
        return context.get_dummy_value()

    return types.void(array, index, types.float32), generate


@intrinsic
def fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once, in float32"""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return fused(b, *args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def scale_by_power(typingctx: Any, value: Any, shifted: Any) -> Any:
    """value * 2^n, for the integer n in the low bits of the float32 `shifted`; the result must be a normal number."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        bits, power = (b.bitcast(arg, _I32) for arg in args)
        return b.bitcast(b.add(bits, b.shl(power, _I32(23))), _F32)

    return types.float32(types.float32, types.float32), generate


def _reduction(start: float, combine: Any) -> Any:
    """Code for a reduction of (array, start, count) in eight lanes, then a tree, then the rest one by one."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        pointer = b.gep(pointers(context, b, signature, args)[0], [args[1]])
        dtype, count = signature.args[0].dtype, args[2]
        whole = b.and_(count, count.type(-LANES))

        def run(first: Any, last: Any, value: Any, lanes: int) -> Any:
            slot = cgutils.alloca_once_value(b, value)
            with cgutils.for_range_slice(b, first, last, count.type(lanes), count.type) as (k, _):
                b.store(combine(b, b.load(slot), widened(b, pointer, k, dtype, lanes)), slot)
            return b.load(slot)

        lanes = run(count.type(0), whole, splat(b, _F32(start)), LANES)
        return run(whole, count, _tree(b, lanes, lambda left, right: combine(b, left, right)), 1)

    return generate


def pointers(context: Any, b: Any, signature: Any, args: Any) -> list[Any]:
    """The data pointer of each argument that is an array; None for the others."""
    return [
        context.make_array(kind)(context, b, value).data if isinstance(kind, types.Array) else None
        for kind, value in zip(signature.args, args, strict=True)
    ]


def widened(b: Any, pointer: Any, offset: Any, dtype: Any, lanes: int) -> Any:
    """`lanes` elements from `pointer` + offset, as float32: a vector, or a scalar for one lane."""

    def shaped(element: Any) -> Any:
        return element if lanes == 1 else ir.VectorType(element, lanes)

    def read(element: Any, size: int) -> Any:
        place = b.bitcast(b.gep(pointer, [offset]), shaped(element).as_pointer())
        return b.load(place, align=size)

    if dtype == types.float32:
        return read(_F32, 4)
    if dtype == types.int8:
        return b.sitofp(read(_I8, 1), shaped(_F32))
    if dtype == FLOAT16:
        return b.fpext(read(ir.HalfType(), 2), shaped(_F32))
    assert dtype == BFLOAT16, dtype
    sixteen = _I32(16) if lanes == 1 else ir.Constant(shaped(_I32), [16] * lanes)
    return b.bitcast(b.shl(b.zext(read(_I16, 2), shaped(_I32)), sixteen), shaped(_F32))


def splat(b: Any, value: Any, lanes: int = LANES) -> Any:
    """A vector with `value` in all lanes."""
    kind = ir.VectorType(value.type, lanes)
    if isinstance(value, ir.Constant):
        return ir.Constant(kind, [value.constant] * lanes)
    vector = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(vector, value, _I32(0))
    return b.shuffle_vector(first, vector, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def _tree(b: Any, vector: Any, combine: Any) -> Any:
    """Lanes combined as (first half, second half) until one is left."""
    width = LANES
    while width > 1:
        width //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        low = ir.Constant(ir.VectorType(_I32, width), list(range(width)))
        high = ir.Constant(ir.VectorType(_I32, width), list(range(width, 2 * width)))
        vector = combine(b.shuffle_vector(vector, undefined, low), b.shuffle_vector(vector, undefined, high))
    return b.extract_element(vector, _I32(0))


def _tree_sums(b: Any, vectors: list[Any]) -> list[Any]:
    """The sum of each vector's lanes in the order of `_tree`, four vectors in one go."""
    sums = []
    for i in range(0, len(vectors), 4):
        four = vectors[i : i + 4]
        if len(four) < 4:
            sums += [_tree(b, vector, b.fadd) for vector in four]
            continue
        while len(four) > 1:  # two vectors of m parts each -> one of 2 m parts, each half as wide
            width = LANES // (4 // len(four)) // 2
            four = [
                _add_halves(b, left, right, width) for left, right in zip(four[::2], four[1::2], strict=True)
            ]
        undefined = ir.Constant(four[0].type, ir.Undefined)
        even, odd = (ir.Constant(ir.VectorType(_I32, 4), list(range(start, LANES, 2))) for start in (0, 1))
        pair_sums = b.fadd(
            b.shuffle_vector(four[0], undefined, even), b.shuffle_vector(four[0], undefined, odd)
        )
        sums += [b.extract_element(pair_sums, _I32(lane)) for lane in range(4)]
    return sums


def _add_halves(b: Any, left: Any, right: Any, width: int) -> Any:
    """First half plus second half of every part of 2 * `width` lanes in two vectors, side by side."""
    parts = range(0, 2 * LANES, 2 * width)
    low = [start + lane for start in parts for lane in range(width)]
    high = [lane + width for lane in low]
    index = ir.VectorType(_I32, LANES)
    return b.fadd(
        b.shuffle_vector(left, right, ir.Constant(index, low)),
        b.shuffle_vector(left, right, ir.Constant(index, high)),
    )


def fused(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    suffix = "f32" if z.type == _F32 else f"v{z.type.count}f32"
    kind = ir.FunctionType(z.type, [z.type] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.{suffix}"), [x, y, z])


def prefetch(b: Any, pointer: Any) -> None:
    """Ask for the cache line at `pointer`; never faults, so what lies past an end is harmless."""
    place = b.bitcast(pointer, _I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [place.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [place, _I32(0), _I32(3), _I32(1)])  # to read, into all levels, data
