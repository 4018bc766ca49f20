"""Products of fixed-point numbers with packed weights of 4 bits, by way of tiles (AMX).

A strip of panels is unpacked once for all rows: codes less their zeros, int8, group by group as tiles lie (`amx`). A
group's sums of integers are then those of `packed_digits`, and what they stand for is added to the groups before it in
the same operations: which of the two computes a row never shows in its bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..dense_weight import PANEL
from ..packed_weight import WORD_BITS
from .amx import ROW_BYTES, TILE
from .compiled import inner
from .digits import DIGITS, TILE_INPUTS, in_base
from .packed_digits import joined
from .vector_ir import L2, call_tile, constant, fused, pointers, prefetch, splat, widened

BITS = 4
CODES = WORD_BITS // BITS
"""Of a word: two rows of a tile, of four inputs each."""

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_OCTETS, _WORDS = ir.VectorType(_I8, PANEL), ir.VectorType(_I32, PANEL)
_LANES = ir.VectorType(_I32, TILE)
_BYTES = ir.VectorType(_I8, ROW_BYTES)
_MASK, _EACH_BYTE = 0x0F0F0F0F, 0x01010101


@inner
def group_bytes(panels, group_size):  # type: ignore[no-untyped-def]
    """Of so many panels' tiles for a group of inputs."""
    return (panels + 1) // 2 * ((group_size + TILE_INPUTS - 1) // TILE_INPUTS) * (TILE * ROW_BYTES)


@intrinsic
def unpack_group(
    typingctx: Any, out: Any, out_at: Any, words: Any, zeros: Any, q: Any, panels: Any, k: Any, group: Any,
    group_size: Any, groups: Any,
) -> Any:  # fmt: skip
    """One group's codes less zeros of `panels` panels from q on, as tiles from out[out_at] on: `group_bytes` of them.

    Arrays hold the whole weight, flat; out is int8. An odd number of panels leaves outputs that stand for nothing.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays = pointers(context, b, signature, args)
        _, out_at, _, _, q, panels, k, group, group_size, groups = args
        word = k.type
        first, last = b.mul(group, group_size), b.mul(b.add(group, word(1)), group_size)
        last = b.select(b.icmp_signed("<", last, k), last, k)
        length, begin = b.udiv(k, word(CODES)), b.udiv(first, word(CODES))
        count = b.udiv(b.sub(last, first), word(CODES))
        tiles = b.udiv(b.add(b.sub(last, first), word(TILE_INPUTS - 1)), word(TILE_INPUTS))
        with cgutils.for_range_slice(b, word(0), panels, word(2), word) as (panel, column):
            both = []
            for number in _pair(b, panel, panels):
                at = b.add(q, number)
                place = b.mul(b.add(b.mul(at, length), begin), word(PANEL))
                zero = b.mul(b.add(b.mul(at, groups), group), word(PANEL))
                both.append((b.gep(arrays[2], [place]), b.gep(arrays[3], [zero])))
            target = b.gep(arrays[0], [b.add(out_at, b.mul(b.mul(column, tiles), word(TILE * ROW_BYTES)))])
            operands = [target, both[0][0], both[1][0], both[0][1], both[1][1], count, tiles]
            call_tile(b, "heddle.packed_tiles.unpack", operands, _define_unpack)
        return context.get_dummy_value()

    word = types.int64
    return types.void(out, word, words, zeros, word, word, word, word, word, word), generate


def _define_unpack(function: Any) -> None:
    """`function` takes out, two panels' words and zeros, how many words, and how many tiles are to be filled."""
    b = ir.IRBuilder(function.append_basic_block("entry"))
    out, left, right, left_zeros, right_zeros, count, tiles = function.args
    word = count.type
    octets = [b.load(b.bitcast(place, _OCTETS.as_pointer()), align=1) for place in (left_zeros, right_zeros)]
    zeros = b.mul(b.zext(joined(b, octets), _LANES), constant(_LANES, _EACH_BYTE))

    def put(row: Any, value: Any) -> None:
        b.store(
            value, b.bitcast(b.gep(out, [b.mul(row, word(ROW_BYTES))]), value.type.as_pointer()), align=64
        )

    with cgutils.for_range(b, count) as loop:
        at = b.mul(loop.index, word(PANEL))
        parts = [b.load(b.bitcast(b.gep(w, [at]), _WORDS.as_pointer()), align=4) for w in (left, right)]
        codes = joined(b, parts)
        for half in range(2):
            part = b.and_(b.lshr(codes, constant(_LANES, half * BITS)), constant(_LANES, _MASK))
            put(
                b.add(b.mul(loop.index, word(2)), word(half)),
                b.sub(b.bitcast(part, _BYTES), b.bitcast(zeros, _BYTES)),
            )
    with cgutils.for_range_slice(b, b.mul(count, word(2)), b.mul(tiles, word(TILE)), word(1), word) as (
        row,
        _,
    ):
        put(row, constant(_LANES, 0))
    b.ret_void()


@intrinsic
def add_group(
    typingctx: Any, out: Any, sums: Any, step: Any, factors: Any, row: Any, rows: Any, scales: Any, q: Any,
    panels: Any, group: Any, groups: Any,
) -> Any:  # fmt: skip
    """out[m * step + 8 p + i] = number * factors[row + m] * scale + (what is there, unless it is the first group)

    for m < `rows`, p < `panels`, i < 8, of the numbers whose digits are sums[(DIGITS * m + d) * step + 8 p + i], int32.
    Arrays are flat; the scales are the whole weight's.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays, scale_type = pointers(context, b, signature, args), signature.args[6].dtype
        _, _, step, _, row, rows, _, q, panels, group, groups = args
        word = panels.type
        first = b.icmp_signed("==", group, word(0))
        zero = ir.Constant(ir.VectorType(_F32, TILE), [0.0] * TILE)
        with cgutils.for_range_slice(b, word(0), panels, word(2), word) as (panel, _):
            column = b.mul(panel, word(PANEL))
            places = [
                b.mul(b.add(b.mul(b.add(q, number), groups), group), word(PANEL))
                for number in _pair(b, panel, panels)
            ]
            scale = joined(b, [widened(b, arrays[6], place, scale_type, PANEL) for place in places])
            with cgutils.for_range(b, rows) as loop:
                at = b.mul(loop.index, word(DIGITS))
                places_of_digits = [b.add(b.mul(b.add(at, word(d)), step), column) for d in range(DIGITS)]
                number = in_base(
                    b,
                    [
                        b.load(b.bitcast(b.gep(arrays[1], [row]), _LANES.as_pointer()), align=4)
                        for row in places_of_digits
                    ],
                )
                place = b.gep(arrays[0], [b.add(b.mul(loop.index, step), column)])
                place = b.bitcast(place, zero.type.as_pointer())
                before = b.select(first, zero, b.load(place, align=4))
                factor = b.load(b.gep(arrays[3], [b.add(row, loop.index)]))
                value = b.fmul(number, splat(b, factor, TILE))
                b.store(fused(b, value, scale, before), place, align=4)
        return context.get_dummy_value()

    word = types.int64
    return types.void(out, sums, word, factors, word, word, scales, word, word, word, word), generate


@intrinsic
def fetch(typingctx: Any, array: Any, at: Any, count: Any) -> Any:
    """Ask for so many elements from array[at] on."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        begin, (_, at, count) = pointers(context, b, signature, args)[0], args
        line = count.type(ROW_BYTES * 8 // signature.args[0].dtype.bitwidth)
        with cgutils.for_range_slice(b, count.type(0), count, line, count.type) as (i, _):
            prefetch(b, b.gep(begin, [b.add(at, i)]), L2)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


def _pair(b: Any, panel: Any, panels: Any) -> list[Any]:
    """A panel's number and the next one's; the same again after the last."""
    following = b.add(panel, panel.type(1))
    return [panel, b.select(b.icmp_signed("<", following, panels), following, panel)]
