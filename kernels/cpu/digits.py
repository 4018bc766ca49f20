"""Products of numbers in base 256 with int8 weights in panels, four inputs in one instruction (AVX512-VNNI).

A row comes as rows of signed digits, the most significant first; its products with a weight are those of its digits,
weighed by powers of 256. A row of digits is k of them, zeros up to a multiple of `QUAD`, and for each group of inputs
(here there is one) their sum in four bytes. The instruction takes one factor unsigned, so a weight enters as itself +
128 and a digit's products are added to -128 times its sum. All sums are integers, exact in any order: an element's bits
depend on its row and its weights alone.

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

from ..dense_weight import PAIR, PANEL
from .compiled import inner
from .vector_ir import (
    L2,
    call_tiles,
    fused,
    lines_from,
    pointers,
    prefetch,
    splat,
)

_FEATURES = binding.get_host_cpu_features()
X86_DIGITS = bool(_FEATURES.get("avx512vnni") and _FEATURES.get("avx512vl") and _FEATURES.get("avx512bw"))
"""Whether this machine multiplies four uint8 by four int8 and adds the four, in one instruction."""
QUAD = 2 * PAIR
"""Inputs multiplied at once."""
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
"""By rows of digits: sums enough to hide how long an addition takes, few enough for the registers."""
AHEAD = 256
"""Bytes of a panel that are fetched before their turn."""

_F32, _I16, _I32 = ir.FloatType(), ir.IntType(16), ir.IntType(32)
_SIGNS = 0x80808080


@intrinsic
def fixed_point_products(
    typingctx: Any, out: Any, out_step: Any, codes: Any, row: Any, step: Any, rows: Any, w: Any, w_at: Any,
    panels: Any, k: Any, soon: Any,
) -> Any:  # fmt: skip
    """out[m * out_step + 8 q + i] = sum_k x[row + m, k] * weight[8 q + i, k], rounded to float32

    for m < `rows` (1 to `TILE_ROWS` // `DIGITS`), q < `panels`, i < 8, where the digits of row t of x are the rows
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
    """Bytes of a row of k digits, in groups of so many."""
    return (k + QUAD - 1) // QUAD * QUAD + (k + group_size - 1) // group_size * SUM_BYTES


@inner
def finish_row(row, k):  # type: ignore[no-untyped-def]
    """Write what comes after a row's k digits (int8), all in one group."""
    total = np.int32(0)
    for j in range(k):
        total += np.int32(row[j])
    row[k:] = np.int8(0)
    row[row.size - SUM_BYTES :].view(np.int32)[0] = total


class Tile:
    """The code for so many rows of so many digits, and any number of panels."""

    def __init__(self, rows: int, digits: int) -> None:
        self._digits = digits
        self._all = rows * digits

    def define(self, function: Any) -> None:
        """`function` takes out, out_step, codes, step, w, panels, k and soon as the intrinsics tell."""
        b = ir.IRBuilder(function.append_basic_block("entry"))
        out, out_step, codes, step, w, panels, size, soon = function.args
        word = size.type
        rows = [b.gep(codes, [b.mul(step, word(r))]) for r in range(self._all)]
        end = b.sub(step, word(SUM_BYTES))
        totals = [b.load(b.bitcast(b.gep(row, [end]), _I32.as_pointer()), align=1) for row in rows]
        begins = [b.mul(total, _I32(-HALF)) for total in totals]
        outs = [b.gep(out, [b.mul(out_step, word(m))]) for m in range(self._all // self._digits)]
        pairs = b.sdiv(b.add(size, word(PAIR - 1)), word(PAIR))
        panel_size, first = b.mul(pairs, word(PANEL * PAIR)), word(0)
        for count in (PANELS_AT_ONCE[self._all], 1):
            last = b.sub(panels, b.srem(b.sub(panels, first), word(count)))
            with cgutils.for_range_slice(b, first, last, word(count), word) as (q, _):
                ws = [b.gep(w, [b.mul(panel_size, b.add(q, word(i)))]) for i in range(count)]
                places = [b.gep(row, [b.mul(q, word(PANEL))]) for row in outs]
                near = lines_from(b, soon, b.mul(b.sdiv(pairs, word(2)), b.sdiv(q, word(count))))
                self._products(b, places, rows, begins, ws, pairs, near)
            first = last
        b.ret_void()

    def _products(
        self,
        b: Any,
        outs: list[Any],
        rows: list[Any],
        begins: list[Any],
        ws: list[Any],
        pairs: Any,
        soon: Any,
    ) -> None:
        """Those of the digits `rows` with the panels `ws`, two in a vector where there are several."""
        word, together = pairs.type, min(2, len(ws))
        vectors = [ws[i : i + together] for i in range(0, len(ws), together)]
        slots = [
            [cgutils.alloca_once(b, ir.VectorType(_I32, PANEL * together)) for _ in vectors] for _ in rows
        ]
        for begin, own in zip(begins, slots, strict=True):
            for slot in own:
                b.store(splat(b, begin, PANEL * together), slot)

        def add(pair: Any, width: int) -> None:
            """Add the products of `width` pairs of inputs."""
            at = b.mul(pair, word(PANEL * PAIR))
            values = [_weights(b, [b.gep(panel, [at]) for panel in vector], width) for vector in vectors]
            for row, own in zip(rows, slots, strict=True):
                place = b.bitcast(b.gep(row, [b.mul(pair, word(PAIR))]), _I32.as_pointer())
                four = splat(b, b.load(place, align=1), PANEL * together)
                for slot, value in zip(own, values, strict=True):
                    b.store(add_products(b, b.load(slot), value, four), slot)

        whole = b.and_(pairs, word(-2))
        with cgutils.for_range_slice(b, word(0), whole, word(2), word) as (pair, _):
            for panel in ws:
                prefetch(b, b.gep(panel, [b.add(b.mul(pair, word(PANEL * PAIR)), word(AHEAD))]))
            prefetch(b, lines_from(b, soon, b.sdiv(pair, word(2))), L2)
            add(pair, 2)
        with b.if_then(b.icmp_signed("<", whole, pairs)):
            add(whole, 1)
        for m, out in enumerate(outs):
            digits = slots[m * self._digits : (m + 1) * self._digits]
            for v, sums in enumerate(zip(*digits, strict=True)):
                value = in_base(b, [b.load(slot) for slot in sums])
                place = b.gep(out, [word(v * together * PANEL)])
                b.store(value, b.bitcast(place, value.type.as_pointer()), align=4)


def _weights(b: Any, panels: list[Any], width: int) -> Any:
    """The weights of two pairs of inputs (or one, and zeros) in one or two panels, for each output four, + 128."""
    kind = ir.VectorType(_I16, width * PANEL)
    parts = [b.load(b.bitcast(panel, kind.as_pointer()), align=1) for panel in panels]
    zeros = ir.Constant(kind, [0] * kind.count)
    left, right = parts if len(parts) == 2 else (parts[0], zeros)
    if width == 1:
        lanes = list(range(2 * PANEL))
        both = b.shuffle_vector(left, right, ir.Constant(ir.VectorType(_I32, 2 * PANEL), lanes))
        left, right = both, ir.Constant(both.type, [0] * 2 * PANEL)
        lanes = [
            p * PANEL + i if half == 0 else 2 * PANEL
            for p in range(len(parts))
            for i in range(PANEL)
            for half in (0, 1)
        ]
    else:
        lanes = [
            p * 2 * PANEL + half * PANEL + i
            for p in range(len(parts))
            for i in range(PANEL)
            for half in (0, 1)
        ]
    turned = b.shuffle_vector(left, right, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))
    quads = ir.VectorType(_I32, len(parts) * PANEL)
    return b.xor(b.bitcast(turned, quads), ir.Constant(quads, [_SIGNS] * quads.count))


def add_products(b: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """int32 lanes: total + the sum of the four products of uint8 times int8."""
    kind = ir.FunctionType(total.type, [total.type] * 3)
    name = f"llvm.x86.avx512.vpdpbusd.{32 * total.type.count}"
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), [total, unsigned, signed])


def in_base(b: Any, sums: list[Any]) -> Any:
    """The number whose digits these vectors are, the most significant first, as float32."""
    reals = [b.sitofp(value, ir.VectorType(_F32, value.type.count)) for value in sums]
    value = reals.pop()
    weight = 1.0
    for real in reversed(reals):
        weight *= BASE
        value = fused(b, real, ir.Constant(real.type, [weight] * real.type.count), value)
    return value
