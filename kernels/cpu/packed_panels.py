"""Products of rows with packed weights in panels (`packed_weight`): codes become floats in registers, once for all rows
of a tile (`panels`).

Within a group of inputs the products x * (code - zero) are summed in the order of k by fused multiply-adds, and each
group's sum times its scale is added to the groups before it, fused too. That is the only order there is, so a row's
bits do not depend on the tile it is computed in.

A float is made of a code in three instructions: shift, and with or, subtraction. A look-up in a table of 16 floats
(AVX-512) took longer, as did converting a strip's codes into memory first where there are many rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..dense_weight import PANEL
from ..packed_weight import PLACES, WORD_BITS
from .panels import ROWS, Tile
from .vector_ir import call_tiles, fused, pointers, prefetch, splat, widened

AHEAD = 32
"""Words of codes that are fetched before their turn."""
_UNIT_STEP, _UNIT_STEP_BITS = 1 << 23, 0x4B000000
"""The float32 from which on neighbours are 1 apart, and its bits."""

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_OCTETS, _WORDS = ir.VectorType(_I8, PANEL), ir.VectorType(_I32, PANEL)
_REALS = ir.VectorType(_F32, PANEL)


class Codes:
    """float32 times codes of so many bits, less their zeros: one vector a panel, a word of each output's codes."""

    panels_at_once: ClassVar = {1: 6, 2: 6, 3: 4, 4: 3, 5: 2, 6: 2}
    """By rows of the tile."""
    outputs_at_once, vectors = PANEL, 1
    zero = ir.Constant(_REALS, [0.0] * PANEL)

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.inputs = WORD_BITS // bits

    def offsets(self, b: Any, zeros: Any) -> Any:
        """Of eight uint8 zeros: what `values` subtracts."""
        return b.fadd(b.uitofp(zeros, _REALS), ir.Constant(_REALS, [float(_UNIT_STEP)] * PANEL))

    def values(self, b: Any, words: Any, offsets: Any, number: int) -> Any:
        """Code `number` of each word less its zero, as float32: exact, from the bits of a float whose last is 1."""
        shifted = b.lshr(words, ir.Constant(_WORDS, [PLACES[self.bits][number]] * PANEL))
        code = b.and_(shifted, ir.Constant(_WORDS, [2**self.bits - 1] * PANEL))
        real = b.or_(code, ir.Constant(_WORDS, [_UNIT_STEP_BITS] * PANEL))
        return b.fsub(b.bitcast(real, _REALS), offsets)

    def factor(self, b: Any, x: Any, k: Any) -> Any:
        return splat(b, b.load(b.gep(x, [k])))

    def add(self, b: Any, total: Any, x: Any, w: Any) -> Any:
        return fused(b, x, w, total)

    def outputs(self, b: Any, sums: list[Any]) -> list[Any]:
        return sums


class _PackedTile(Tile):
    """Also takes the panels' scales and zeros, the group size and the number of groups."""

    def __init__(self, rows: int, bits: int, scale_type: Any) -> None:
        super().__init__(rows, Codes(bits))
        self._scale_type = scale_type

    def panel_size(self, b: Any, size: Any) -> Any:
        """Words of a panel."""
        return b.mul(b.udiv(size, size.type(self.arithmetic.inputs)), size.type(PANEL))

    def products(
        self, b: Any, outs: list[Any], xs: list[Any], ws: list[Any], q: Any, size: Any, more: list[Any]
    ) -> None:
        scales, zeros, group_size, groups = more
        word = size.type
        totals = self.zeros(b, len(ws))
        with cgutils.for_range(b, groups) as loop:
            places = [
                b.mul(b.add(b.mul(b.add(q, word(i)), groups), loop.index), word(PANEL))
                for i in range(len(ws))
            ]
            begin = b.mul(loop.index, group_size)
            end = b.add(begin, group_size)
            end = b.select(b.icmp_signed("<", end, size), end, size)
            sums = self._group(b, xs, ws, [b.gep(zeros, [place]) for place in places], begin, end)
            for i, place in enumerate(places):
                scale = widened(b, scales, place, self._scale_type, PANEL)
                for slot, total in zip(sums[i :: len(ws)], totals[i :: len(ws)], strict=True):
                    b.store(fused(b, b.load(slot), scale, b.load(total)), total)
        self.finish(b, totals, outs)

    def _group(
        self, b: Any, xs: list[Any], ws: list[Any], zeros: list[Any], begin: Any, end: Any
    ) -> list[Any]:
        """The sums of one group of inputs; `zeros` point to each panel's."""
        math, word = self.arithmetic, begin.type
        octets = [b.load(b.bitcast(place, _OCTETS.as_pointer()), align=1) for place in zeros]
        offsets = [math.offsets(b, octet) for octet in octets]
        sums = self.zeros(b, len(ws))
        with cgutils.for_range_slice(b, begin, end, word(math.inputs), word) as (k, _):
            at = b.mul(b.udiv(k, word(math.inputs)), word(PANEL))
            words = []
            for panel in ws:
                place = b.gep(panel, [at])
                prefetch(b, b.gep(place, [word(AHEAD)]))
                words.append(b.load(b.bitcast(place, _WORDS.as_pointer()), align=4))
            for number in range(math.inputs):
                values = [math.values(b, *panel, number) for panel in zip(words, offsets, strict=True)]
                factors = [partial(math.factor, b, x, b.add(k, word(number))) for x in xs]
                self.add(b, sums, factors, partial(_of_panel, values))
        return sums


def _of_panel(values: list[Any], panel: int, part: int) -> Any:
    return values[panel]


@intrinsic(prefer_literal=True)
def packed_products(
    typingctx: Any, out: Any, out_step: Any, x: Any, x_at: Any, x_step: Any, rows: Any, codes: Any, scales: Any,
    zeros: Any, q: Any, panels: Any, k: Any, group_size: Any, groups: Any, bits: Any,
) -> Any:  # fmt: skip
    """out[m * out_step + 8 i + j] = sum_k x[x_at + m * x_step + k] * weight[8 (q + i) + j, k]

    for m < `rows` (1 to `ROWS`), i < `panels`, j < 8. Arrays are read as flat and hold the whole weight; `bits` is a
    literal 4 or 8.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays = pointers(context, b, signature, args)
        scale_type, width = signature.args[7].dtype, bits.literal_value
        _, out_step, _, x_at, x_step, rows, _, _, _, q, panels, k, group_size, groups, _ = args
        at, column = (
            b.mul(b.mul(q, b.udiv(k, k.type(WORD_BITS // width))), k.type(PANEL)),
            b.mul(b.mul(q, groups), k.type(PANEL)),
        )
        operands = [
            arrays[0], out_step, b.gep(arrays[2], [x_at]), x_step, b.gep(arrays[6], [at]), panels, k,
            b.gep(arrays[7], [column]), b.gep(arrays[8], [column]), group_size, groups,
        ]  # fmt: skip
        name = f"heddle.packed.{width}.{scale_type}"
        call_tiles(b, rows, name, operands, lambda count: _PackedTile(count, width, scale_type), ROWS)
        return context.get_dummy_value()

    word = types.int64
    return types.void(
        out, word, x, word, word, word, codes, scales, zeros, word, word, word, word, word, bits
    ), generate
