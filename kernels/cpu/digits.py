"""Products of numbers in base 256 with int8 weights in panels, four inputs in one instruction (AVX512-VNNI).

Where there is this instruction an int8 weight lies in panels of 16 outputs by 4 inputs, filled up with zeros to whole
tiles of 64 inputs (`amx`). A row comes as rows of signed digits, the most significant first; its products with a weight
are those of its digits, weighed by powers of 256. A row of digits is k of them, zeros up to a multiple of `QUAD`, and
for each group of inputs (here there is one) their sum in four bytes. The instruction takes one factor unsigned, so a
weight enters as itself + 128 and a digit's products are added to -128 times its sum. All sums are integers, exact in
any order: an element's bits depend on its row and its weights alone.

One core of an AMD EPYC (Zen 4) reaches 460 GOP/s a digit here, all that the instruction can, where
fused multiply-adds of float32 can reach 116.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..dense_weight import PANEL
from .compiled import inner
from .vector_ir import (
    CACHE_LINE,
    L2,
    call_tiles,
    constant,
    fused,
    lines_from,
    pointers,
    prefetch,
    splat,
)

_FEATURES = binding.get_host_cpu_features()
X86_DIGITS = bool(_FEATURES.get("avx512vnni") and _FEATURES.get("avx512vl") and _FEATURES.get("avx512bw"))
"""Whether this machine multiplies four uint8 by four int8 and adds the four, in one instruction."""
QUAD = 4
"""Inputs multiplied at once."""
TILE_OUTPUTS, TILE_INPUTS = 16, 64
"""Outputs of a panel of an int8 weight, and what the inputs of its panels are a multiple of."""
BASE = 256
HALF = BASE // 2
"""Digits are from -HALF to HALF - 1."""
DIGITS = 3
"""Of a fixed-point number."""
SUM_BYTES = 4
"""Of the sum of a group of digits, at the end of their row."""
TILE_ROWS = 6
"""Rows of digits in a tile, at most."""
PANELS_AT_ONCE = {1: 12, 2: 12, 3: 6, 4: 6, 5: 4, 6: 4}
"""By rows of digits, in panels of `PANEL` outputs: sums enough to hide how long an addition takes, few enough for the
registers."""
AHEAD = 256
"""Bytes of a panel that are fetched before their turn."""

_F32, _I32 = ir.FloatType(), ir.IntType(32)
_SIGNS = 0x80808080


@intrinsic
def fixed_point_products(
    typingctx: Any, out: Any, out_step: Any, codes: Any, row: Any, step: Any, rows: Any, w: Any, w_at: Any,
    panels: Any, k: Any, soon: Any,
) -> Any:  # fmt: skip
    """out[m * out_step + 8 q + i] = sum_k x[row + m, k] * weight[8 q + i, k], rounded to float32

    for m < `rows` (1 to `TILE_ROWS` // `DIGITS`), q < `panels`, even, i < 8. The digits of row t of x are the rows
    DIGITS * t, DIGITS * t + 1, … of `codes`, int8 and flat, `step` apart. The panels of the weight, int8, begin at
    w[w_at]; what is read soon after, at w[soon], is fetched meanwhile.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays = pointers(context, b, signature, args)
        _, out_step, _, row, step, rows, _, w_at, panels, k, soon = args
        begin = b.gep(arrays[2], [b.mul(b.mul(row, row.type(DIGITS)), step)])
        places = [b.gep(arrays[6], [at]) for at in (w_at, soon)]
        operands = [arrays[0], out_step, begin, step, places[0], panels, k, places[1]]
        tiles = TILE_ROWS // DIGITS
        call_tiles(b, rows, "heddle.fixed_point", operands, lambda count: Tile(count, DIGITS), tiles)
        return context.get_dummy_value()

    word = types.int64
    return types.void(out, word, codes, word, word, word, w, word, word, word, word), generate


@inner
def digit_step(k, group_size):  # type: ignore[no-untyped-def]
    """Bytes of a row of k digits, in groups of so many: whole cache lines."""
    count = (k + QUAD - 1) // QUAD * QUAD + (k + group_size - 1) // group_size * SUM_BYTES
    return (count + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@inner
def finish_row(row, k, total):  # type: ignore[no-untyped-def]
    """Write what comes after a row's k digits (int8), all in one group, whose sum is `total`."""
    end = (k + QUAD - 1) // QUAD * QUAD
    row[k:end] = np.int8(0)
    row[end : end + SUM_BYTES].view(np.int32)[0] = total


class Tile:
    """The code for so many rows of so many digits, and any even number of panels."""

    def __init__(self, rows: int, digits: int) -> None:
        self._digits = digits
        self._all = rows * digits

    def define(self, function: Any) -> None:
        """`function` takes out, out_step, codes, step, w, panels, k and soon as the intrinsics tell."""
        b = ir.IRBuilder(function.append_basic_block("entry"))
        out, out_step, codes, step, w, panels, size, soon = function.args
        word = size.type
        rows = [b.gep(codes, [b.mul(step, word(r))]) for r in range(self._all)]
        quads = b.sdiv(b.add(size, word(QUAD - 1)), word(QUAD))
        end = b.mul(quads, word(QUAD))
        totals = [b.load(b.bitcast(b.gep(row, [end]), _I32.as_pointer()), align=1) for row in rows]
        begins = [b.mul(total, _I32(-HALF)) for total in totals]
        outs = [b.gep(out, [b.mul(out_step, word(m))]) for m in range(self._all // self._digits)]
        together = TILE_OUTPUTS // PANEL
        tiles = b.sdiv(b.add(size, word(TILE_INPUTS - 1)), word(TILE_INPUTS))
        panel_size, first = b.mul(tiles, word(TILE_INPUTS * PANEL)), word(0)
        for count in sorted({PANELS_AT_ONCE[self._all], together}, reverse=True):
            last = b.sub(panels, b.srem(b.sub(panels, first), word(count)))
            with cgutils.for_range_slice(b, first, last, word(count), word) as (q, _):
                ws = [b.gep(w, [b.mul(panel_size, b.add(q, word(i)))]) for i in range(0, count, together)]
                places = [b.gep(row, [b.mul(q, word(PANEL))]) for row in outs]
                near = lines_from(b, soon, b.mul(quads, b.sdiv(q, word(count))))
                self._products(b, places, rows, begins, ws, quads, near)
            first = last
        b.ret_void()

    def _products(
        self,
        b: Any,
        outs: list[Any],
        rows: list[Any],
        begins: list[Any],
        ws: list[Any],
        quads: Any,
        soon: Any,
    ) -> None:
        """Those of the digits `rows` with the weights of 16 outputs each that begin at `ws`."""
        word, kind = quads.type, ir.VectorType(_I32, TILE_OUTPUTS)
        slots = [[cgutils.alloca_once(b, kind) for _ in ws] for _ in rows]
        for begin, own in zip(begins, slots, strict=True):
            for slot in own:
                b.store(splat(b, begin, TILE_OUTPUTS), slot)
        with cgutils.for_range(b, quads) as loop:
            at = b.mul(loop.index, word(TILE_OUTPUTS * QUAD))
            values = []
            for panel in ws:
                prefetch(b, b.gep(panel, [b.add(at, word(AHEAD))]))
                value = b.load(b.bitcast(b.gep(panel, [at]), kind.as_pointer()), align=1)
                values.append(b.xor(value, constant(kind, _SIGNS)))
            prefetch(b, lines_from(b, soon, loop.index), L2)
            for row, own in zip(rows, slots, strict=True):
                place = b.bitcast(b.gep(row, [b.mul(loop.index, word(QUAD))]), _I32.as_pointer())
                four = splat(b, b.load(place, align=1), TILE_OUTPUTS)
                for slot, value in zip(own, values, strict=True):
                    b.store(add_products(b, b.load(slot), value, four), slot)
        for m, out in enumerate(outs):
            digits = slots[m * self._digits : (m + 1) * self._digits]
            for v, sums in enumerate(zip(*digits, strict=True)):
                value = in_base(b, [b.load(slot) for slot in sums])
                place = b.gep(out, [word(v * TILE_OUTPUTS)])
                b.store(value, b.bitcast(place, value.type.as_pointer()), align=4)


def add_products(b: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """int32 lanes: total + the sum of the four products of uint8 times int8."""
    kind = ir.FunctionType(total.type, [total.type] * 3)
    name = f"llvm.x86.avx512.vpdpbusd.{32 * total.type.count}"
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), [total, unsigned, signed])


def in_base(b: Any, sums: list[Any]) -> Any:
    """The number whose digits these vectors, or integers, are, the most significant first, as float32."""
    reals = [b.sitofp(value, _reals(value.type)) for value in sums]
    value = reals.pop()
    weight = 1.0
    for real in reversed(reals):
        weight *= BASE
        value = fused(b, real, constant(real.type, weight), value)
    return value


def _reals(kind: Any) -> Any:
    return ir.VectorType(_F32, kind.count) if isinstance(kind, ir.VectorType) else _F32
