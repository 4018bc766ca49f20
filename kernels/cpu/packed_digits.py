"""Products of fixed-point numbers with packed weights in panels, four inputs in one instruction (AVX512-VNNI).

A word of `packed_weight` becomes four codes a lane with one mask, which are the unsigned factor as they are; a group's
products of a digit are added to -zero times the sum of its digits. So within a group all is exact; the three sums are
put together, rounded once, and the group's value times its scale is added to the groups before it, fused. An element's
bits depend on its row and its weights alone.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..dense_weight import PANEL
from ..packed_weight import WORD_BITS
from .digits import DIGITS, QUAD, TILE_ROWS, add_products, in_base
from .vector_ir import L2, call_tiles, constant, fused, lines_from, pointers, prefetch, splat, widened

PANELS_AT_ONCE = {1: 6, 2: 4}
"""By rows of the tile. Half or one and a half times as many at two rows: 20 to 25 % slower on a Zen 5."""
AHEAD = 32
"""Words of codes that are fetched before their turn."""

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_MASKS = {4: 0x0F0F0F0F, 8: 0xFFFFFFFF}
"""What leaves the codes of a word that begin where its bytes do."""


@intrinsic(prefer_literal=True)
def packed_fixed_point_products(
    typingctx: Any, out: Any, out_step: Any, codes: Any, row: Any, step: Any, factors: Any, rows: Any, words: Any,
    scales: Any, zeros: Any, q: Any, panels: Any, k: Any, group_size: Any, groups: Any, soon: Any, bits: Any,
) -> Any:  # fmt: skip
    """out[m * out_step + 8 i + j] = factors[row + m] * sum_k x[row + m, k] * weight[8 (q + i) + j, k]

    for m < `rows` (1 to `TILE_ROWS` // `DIGITS`), i < `panels`, j < 8, where the digits of row t of x are the rows
    DIGITS * t, DIGITS * t + 1, … of `codes`, int8 and flat, `step` apart, and the factors are float32. Arrays hold the
    whole weight, flat; what is read soon after, at words[soon], is fetched meanwhile; `bits` is a literal 4 or 8.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays = pointers(context, b, signature, args)
        scale_type, width = signature.args[8].dtype, bits.literal_value
        _, out_step, _, row, step, _, rows, _, _, _, q, panels, k, group_size, groups, soon, _ = args
        word = k.type
        begin = b.mul(b.mul(q, b.udiv(k, word(WORD_BITS // width))), word(PANEL))
        column = b.mul(b.mul(q, groups), word(PANEL))
        operands = [
            arrays[0], out_step, b.gep(arrays[2], [b.mul(b.mul(row, word(DIGITS)), step)]), step,
            b.gep(arrays[5], [row]), b.gep(arrays[7], [begin]), b.gep(arrays[8], [column]),
            b.gep(arrays[9], [column]), panels, k, group_size, groups, b.gep(arrays[7], [soon]),
        ]  # fmt: skip
        name = f"heddle.packed_fixed_point.{width}.{scale_type}"
        call_tiles(
            b, rows, name, operands, lambda count: _Tile(count, width, scale_type), TILE_ROWS // DIGITS
        )
        return context.get_dummy_value()

    word = types.int64
    return types.void(
        out, word, codes, word, word, factors, word, words, scales, zeros, word, word, word, word, word, word, bits
    ), generate  # fmt: skip


class _Tile:
    """The code for so many rows and any number of panels."""

    def __init__(self, rows: int, bits: int, scale_type: Any) -> None:
        self._rows = rows
        self._bits = bits
        self._inputs = WORD_BITS // bits
        self._scale_type = scale_type

    def define(self, function: Any) -> None:
        """`function` takes out, out_step, codes, step, factors, words, scales, zeros, panels, k, group_size, groups
        and soon as the intrinsic tells."""
        b = ir.IRBuilder(function.append_basic_block("entry"))
        out, out_step, codes, step, factors, words, scales, zeros, panels, size, group_size, groups, soon = (
            function.args
        )
        word = size.type
        digits = [b.gep(codes, [b.mul(step, word(r))]) for r in range(self._rows * DIGITS)]
        sums_at = b.and_(b.add(size, word(QUAD - 1)), word(-QUAD))
        totals = [b.bitcast(b.gep(row, [sums_at]), _I32.as_pointer()) for row in digits]
        values = [b.load(b.gep(factors, [word(m)])) for m in range(self._rows)]
        outs = [b.gep(out, [b.mul(out_step, word(m))]) for m in range(self._rows)]
        length, first = b.udiv(size, word(self._inputs)), word(0)
        for count in (PANELS_AT_ONCE[self._rows], 1):
            last = b.sub(panels, b.srem(b.sub(panels, first), word(count)))
            with cgutils.for_range_slice(b, first, last, word(count), word) as (q, _):
                numbers = [b.add(q, word(i)) for i in range(count)]
                ws = [b.gep(words, [b.mul(b.mul(length, number), word(PANEL))]) for number in numbers]
                near = lines_from(b, soon, b.mul(length, b.sdiv(q, word(count))))
                slots = [
                    [cgutils.alloca_once(b, ir.VectorType(_F32, lanes)) for lanes in _lanes(count)]
                    for _ in outs
                ]
                for slot in (slot for own in slots for slot in own):
                    b.store(ir.Constant(slot.type.pointee, [0.0] * slot.type.pointee.count), slot)
                with cgutils.for_range(b, groups) as loop:
                    g = loop.index
                    begin = b.mul(g, group_size)
                    end = b.add(begin, group_size)
                    end = b.select(b.icmp_signed("<", end, size), end, size)
                    places = [b.mul(b.add(b.mul(n, groups), g), word(PANEL)) for n in numbers]
                    starts = [b.load(b.gep(total, [g])) for total in totals]
                    sums = self._group(b, digits, starts, ws, zeros, places, begin, end, near)
                    self._add(b, slots, sums, values, scales, places)
                for place, own in zip(outs, slots, strict=True):
                    for v, slot in enumerate(own):
                        value = b.load(slot)
                        at = b.gep(place, [b.add(b.mul(q, word(PANEL)), word(2 * v * PANEL))])
                        b.store(value, b.bitcast(at, value.type.as_pointer()), align=4)
            first = last
        b.ret_void()

    def _group(
        self, b: Any, digits: list[Any], starts: list[Any], ws: list[Any], zeros: Any, places: list[Any], begin: Any,
        end: Any, soon: Any,
    ) -> list[list[Any]]:  # fmt: skip
        """Slots with the sums of one group of inputs, int32, of each row of digits each vector of outputs."""
        word = begin.type
        octets = ir.VectorType(_I8, PANEL)
        sums: list[list[Any]] = [[] for _ in digits]
        for vector in _pairs(places):
            parts = [b.load(b.bitcast(b.gep(zeros, [at]), octets.as_pointer()), align=1) for at in vector]
            lanes = len(vector) * PANEL
            zero = b.zext(joined(b, parts), ir.VectorType(_I32, lanes))
            for own, start in zip(sums, starts, strict=True):
                own.append(cgutils.alloca_once_value(b, b.mul(zero, splat(b, b.sub(_I32(0), start), lanes))))
        with cgutils.for_range_slice(b, begin, end, word(self._inputs), word) as (k, _):
            number = b.udiv(k, word(self._inputs))
            at = b.mul(number, word(PANEL))
            for panel in ws:
                prefetch(b, b.gep(panel, [b.add(at, word(AHEAD))]))
            prefetch(b, lines_from(b, soon, number), L2)
            quads = [self._quads(b, [b.gep(panel, [at]) for panel in vector]) for vector in _pairs(ws)]
            for i in range(self._inputs // QUAD):
                for row, own in zip(digits, sums, strict=True):
                    place = b.bitcast(b.gep(row, [b.add(k, word(i * QUAD))]), _I32.as_pointer())
                    four = b.load(place, align=1)
                    for slot, vector in zip(own, quads, strict=True):
                        value = vector[i]
                        b.store(add_products(b, b.load(slot), value, splat(b, four, value.type.count)), slot)
        return sums

    def _quads(self, b: Any, panels: list[Any]) -> list[Any]:
        """The codes of a word of each output in one or two panels, four in each lane."""
        kind = ir.VectorType(_I32, PANEL)
        word = joined(b, [b.load(b.bitcast(panel, kind.as_pointer()), align=4) for panel in panels])
        mask = constant(word.type, _MASKS[self._bits])
        return [b.and_(b.lshr(word, constant(word.type, place)), mask) for place in range(0, 8, self._bits)]

    def _add(
        self, b: Any, slots: list[list[Any]], sums: list[list[Any]], factors: list[Any], scales: Any, places: list[Any]
    ) -> None:  # fmt: skip
        """Add what a group's sums stand for."""
        for v, vector in enumerate(_pairs(places)):
            scale = joined(b, [widened(b, scales, at, self._scale_type, PANEL) for at in vector])
            for m, factor in enumerate(factors):
                value = in_base(b, [b.load(own[v]) for own in sums[m * DIGITS : (m + 1) * DIGITS]])
                value = b.fmul(value, splat(b, factor, value.type.count))
                b.store(fused(b, value, scale, b.load(slots[m][v])), slots[m][v])


def _pairs(panels: list[Any]) -> list[list[Any]]:
    """What lies in one vector: two panels, or the last alone."""
    return [panels[i : i + 2] for i in range(0, len(panels), 2)]


def _lanes(panels: int) -> list[int]:
    return [PANEL * len(vector) for vector in _pairs([None] * panels)]


def joined(b: Any, parts: list[Any]) -> Any:
    """One vector of one or two."""
    if len(parts) == 1:
        return parts[0]
    lanes = list(range(2 * PANEL))
    return b.shuffle_vector(*parts, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))
