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

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_FEATURES = binding.get_host_cpu_features()
WIDE = bool(_FEATURES.get("avx512f")) and binding.get_host_cpu_name() != "znver4"
"""Whether vectors of 16 floats are multiplied as fast as those of eight; and there are 32 registers."""
LANES = 8
WIDEST = 8 if WIDE else 4
"""Groups of `LANES` columns that `add_weighted_rows` adds to three rows at once without running out of registers."""
CACHE_LINE = 64
L1, L2 = 3, 2
"""The nearest cache that `prefetch` fills, as LLVM calls it."""
FLOAT16, BFLOAT16 = types.uint16, types.int16
"""What the 16-bit floats are called in numba's types."""
TILED_INT8 = types.uint8
"""And int8 in the order that `digits` tells."""

_F32, _I8, _I16, _I32 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)


@intrinsic(prefer_literal=True)
def add_weighted_rows(
    typingctx: Any, out: Any, out_rows: Any, p: Any, p_rows: Any, v: Any, v_rows: Any, v_at: Any, count: Any,
    column: Any, groups: Any, soon: Any,
) -> Any:  # fmt: skip
    """out[out_rows[m] + c] += sum_j p[p_rows[m] + j] * v[v_rows[j] + v_at + c], for 8 * `groups` columns from `column`

    j runs from 0 to count; each sum starts at zero and is then added to `out`. `v_rows` is an int64 array; `out_rows`
    and `p_rows` are tuples, `groups` is a literal: they fix the tile. What lies `soon` elements after the values at
    hand is fetched meanwhile.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays = pointers(context, b, signature, args)
        v_type, width = signature.args[4].dtype, groups.literal_value
        column = args[8]
        outs = [b.gep(arrays[0], [b.add(at, column)]) for at in cgutils.unpack_tuple(b, args[1])]
        weights = [b.gep(arrays[2], [at]) for at in cgutils.unpack_tuple(b, args[3])]
        values = b.gep(arrays[4], [b.add(args[6], column)])
        operands = [*outs, *weights, values, arrays[5], args[7], args[10]]
        vectors = _vectors(width, WIDE)

        def define(function: Any) -> None:
            _define_weighted_rows(function, len(outs), vectors, v_type)

        call_tile(b, f"heddle.weighted.{len(outs)}.{width}.{v_type}.{WIDE}", operands, define)
        return context.get_dummy_value()

    word = types.int64
    return types.void(out, out_rows, p, p_rows, v, v_rows, word, word, word, groups, word), generate


def _vectors(groups: int, wide: bool) -> list[tuple[int, int]]:
    """(first column, lanes) of the vectors that hold 8 * `groups` columns."""
    lanes = 2 * LANES if wide else LANES
    whole = groups * LANES // lanes * lanes
    rest = [(whole, LANES)] if whole < groups * LANES else []
    return [(column, lanes) for column in range(0, whole, lanes)] + rest


def _define_weighted_rows(function: Any, rows: int, vectors: list[tuple[int, int]], v_type: Any) -> None:
    """The body of `add_weighted_rows` for one tile: `rows` outputs and weights."""
    b = ir.IRBuilder(function.append_basic_block("entry"))
    outs, weights = function.args[:rows], function.args[rows : 2 * rows]
    values, v_rows, count, soon = function.args[2 * rows :]
    word, columns = count.type, vectors[-1][0] + vectors[-1][1]
    sums = [[cgutils.alloca_once_value(b, splat(b, _F32(0.0), lanes)) for _, lanes in vectors] for _ in outs]
    with cgutils.for_range_slice(b, word(0), count, word(1), word) as (j, _):
        row = b.gep(values, [b.load(b.gep(v_rows, [j]))])
        for line in range(0, columns * v_type.bitwidth // 8, CACHE_LINE):
            prefetch(b, b.gep(row, [b.add(soon, word(line * 8 // v_type.bitwidth))]), L2)
        factors = [b.load(b.gep(weight, [j])) for weight in weights]
        for n, (column, lanes) in enumerate(vectors):  # one value at a time, or there are too few registers
            value = widened(b, row, word(column), v_type, lanes)
            for own, factor in zip(sums, factors, strict=True):
                b.store(fused(b, splat(b, factor, lanes), value, b.load(own[n])), own[n])
    for out, own in zip(outs, sums, strict=True):
        for slot, (column, lanes) in zip(own, vectors, strict=True):
            target = b.bitcast(b.gep(out, [word(column)]), ir.VectorType(_F32, lanes).as_pointer())
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


def call_tiles(
    b: Any, rows: Any, name: str, operands: list[Any], tile_of: Callable[[int], Any], most: int
) -> None:
    """Call the tile of `rows` rows, 1 to `most`, known only when it runs: `tile_of(count).define` writes it."""
    done = b.append_basic_block("done")
    choice = b.switch(rows, done)
    for count in range(1, most + 1):
        with b.goto_block(b.append_basic_block(f"rows{count}")):
            choice.add_case(rows.type(count), b.block)
            call_tile(b, f"{name}.{count}", operands, tile_of(count).define)
            b.branch(done)
    b.position_at_end(done)


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
        pointer = pointers(context, b, signature, args)[0]
        _narrowed(b, args[2], pointer, args[1], signature.args[0].dtype)
        return context.get_dummy_value()

    return types.void(array, index, types.float32), generate


@intrinsic
def rotate(
    typingctx: Any,
    out: Any,
    out_at: Any,
    x: Any,
    x_at: Any,
    cos: Any,
    sin: Any,
    angle_at: Any,
    half: Any,
) -> Any:
    """The halves (a, b) of x[x_at : x_at + 2 * half] -> (a * cos - b * sin, b * cos + a * sin), to out[out_at:].

    Angles are cos[angle_at:] and sin[angle_at:]. `out` is none of the others.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays = pointers(context, b, signature, args)
        out, x, cos, sin = (arrays[i] for i in (0, 2, 4, 5))
        out_at, x_at, angle_at, half = (args[i] for i in (1, 3, 6, 7))
        out_type, x_type = signature.args[0].dtype, signature.args[2].dtype
        whole = b.and_(half, half.type(-LANES))
        for first, last, lanes in ((half.type(0), whole, LANES), (whole, half, 1)):
            with cgutils.for_range_slice(b, first, last, half.type(lanes), half.type) as (i, _):
                c, s = (widened(b, angles, b.add(angle_at, i), types.float32, lanes) for angles in (cos, sin))
                low, high = i, b.add(half, i)
                left, right = (widened(b, x, b.add(x_at, place), x_type, lanes) for place in (low, high))
                for place, value in (
                    (low, b.fsub(b.fmul(left, c), b.fmul(right, s))),
                    (high, b.fadd(b.fmul(right, c), b.fmul(left, s))),
                ):
                    _narrowed(b, value, out, b.add(out_at, place), out_type)
        return context.get_dummy_value()

    return types.void(out, out_at, x, x_at, cos, sin, angle_at, half), generate


@intrinsic
def copy(typingctx: Any, out: Any, out_at: Any, x: Any, x_at: Any, count: Any) -> Any:
    """out[out_at + i] = x[x_at + i] for i < count, rounded as by `store`. `out` is not x."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out, _, x, _, _ = pointers(context, b, signature, args)
        _, out_at, _, x_at, count = args
        out_type, x_type = signature.args[0].dtype, signature.args[2].dtype
        whole = b.and_(count, count.type(-LANES))
        for first, last, lanes in ((count.type(0), whole, LANES), (whole, count, 1)):
            with cgutils.for_range_slice(b, first, last, count.type(lanes), count.type) as (i, _):
                value = widened(b, x, b.add(x_at, i), x_type, lanes)
                _narrowed(b, value, out, b.add(out_at, i), out_type)
        return context.get_dummy_value()

    return types.void(out, out_at, x, x_at, count), generate


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
        return run(whole, count, tree(b, lanes, lambda left, right: combine(b, left, right)), 1)

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
    if dtype in (types.int8, TILED_INT8):
        return b.sitofp(read(_I8, 1), shaped(_F32))
    if dtype == FLOAT16:
        return b.fpext(read(ir.HalfType(), 2), shaped(_F32))
    assert dtype == BFLOAT16, dtype
    sixteen = _I32(16) if lanes == 1 else ir.Constant(shaped(_I32), [16] * lanes)
    return b.bitcast(b.shl(b.zext(read(_I16, 2), shaped(_I32)), sixteen), shaped(_F32))


def _narrowed(b: Any, value: Any, pointer: Any, offset: Any, dtype: Any) -> None:
    """Store float32, one or a vector, at `pointer` + offset: the counterpart of `widened`."""

    def bits(count: int) -> Any:
        element = ir.IntType(count)
        return element if value.type == _F32 else ir.VectorType(element, value.type.count)

    def constant(number: int) -> Any:
        kind = bits(32)
        return ir.Constant(kind, number if kind == _I32 else [number] * kind.count)

    if dtype == FLOAT16:
        half = ir.HalfType() if value.type == _F32 else ir.VectorType(ir.HalfType(), value.type.count)
        value = b.bitcast(b.fptrunc(value, half), bits(16))
    elif dtype == BFLOAT16:
        whole = b.bitcast(value, bits(32))
        odd = b.and_(b.lshr(whole, constant(16)), constant(1))
        rounded = b.add(whole, b.add(constant(0x7FFF), odd))
        quiet_nan = b.or_(whole, constant(0x400000))
        is_nan = b.fcmp_unordered("uno", value, value)
        value = b.trunc(b.lshr(b.select(is_nan, quiet_nan, rounded), constant(16)), bits(16))
    place = b.bitcast(b.gep(pointer, [offset]), value.type.as_pointer())
    b.store(value, place, align=dtype.bitwidth // 8)


def splat(b: Any, value: Any, lanes: int = LANES) -> Any:
    """A vector with `value` in all lanes."""
    kind = ir.VectorType(value.type, lanes)
    if isinstance(value, ir.Constant):
        return ir.Constant(kind, [value.constant] * lanes)
    vector = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(vector, value, _I32(0))
    return b.shuffle_vector(first, vector, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def spread(b: Any, value: Any, lanes: int) -> Any:
    """`splat`, or the value itself for one lane."""
    return value if lanes == 1 else splat(b, value, lanes)


def constant(kind: Any, number: float) -> Any:
    """The number in a type, or in each lane of a vector's."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def nearest(b: Any, value: Any) -> Any:
    """float32, one or a vector, rounded to the nearest integer, ties to even."""
    suffix = "f32" if value.type == _F32 else f"v{value.type.count}f32"
    kind = ir.FunctionType(value.type, [value.type])
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.rint.{suffix}"), [value])


def tree(b: Any, vector: Any, combine: Any) -> Any:
    """Lanes combined as (first half, second half) until one is left."""
    width = LANES
    while width > 1:
        width //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        low = ir.Constant(ir.VectorType(_I32, width), list(range(width)))
        high = ir.Constant(ir.VectorType(_I32, width), list(range(width, 2 * width)))
        vector = combine(b.shuffle_vector(vector, undefined, low), b.shuffle_vector(vector, undefined, high))
    return b.extract_element(vector, _I32(0))


def fused(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    suffix = "f32" if z.type == _F32 else f"v{z.type.count}f32"
    kind = ir.FunctionType(z.type, [z.type] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.{suffix}"), [x, y, z])


def prefetch(b: Any, pointer: Any, cache: int = L1) -> None:
    """Ask for the cache line at `pointer`; never faults, so what lies past an end is harmless."""
    place = b.bitcast(pointer, _I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [place.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [place, _I32(0), _I32(cache), _I32(1)])  # to read, data


def lines_from(b: Any, pointer: Any, count: Any) -> Any:
    """The pointer `count` cache lines further."""
    return b.gep(b.bitcast(pointer, _I8.as_pointer()), [b.mul(count, count.type(CACHE_LINE))])
