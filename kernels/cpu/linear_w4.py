"""Linear layers with packed 4 and 8 bit weights: codes become floats in registers, once for all rows of a tile.

Within a group of inputs the products x * (code - zero) are summed in the order of k by fused multiply-adds, and each
group's sum times its scale is added to the groups before it, fused too. That is the only order there is, so a row's
bits do not depend on the tile it is computed in.

In GOP/s, codes of 4 bits in groups of 64, all 30 layers of the demo base after each other, on an AMD EPYC (Zen 4) with
one core and with two; beside it, in the same hour, pairs of inputs in bytes with (code - zero) * scale for each weight:

    rows            1     2     4     6    16    64   256
    one core       29    48    70    79    79    96    97
    before         19    30    53    57    82    96    97
    two cores      52    92   131   140   153   186   197
    before         26    50    92   104   157   194   170

There a float is made of a code in three instructions: shift, and with or, subtraction. A look-up in a table of 16
floats (AVX-512) took longer, as did converting a strip's codes into memory first where there are many rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..dense_weight import PANEL
from ..packed_weight import WORD_BITS, PackedWeight
from .arrays import KINDS, address, array_at, dense
from .compiled import compiled, inner
from .linears import CACHED_VALUES, PART_VALUES, STRIP, part_of_product, row_bands, scaled
from .panels import ROWS, Tile
from .recording import empty, launch
from .team import share
from .vector_ir import call_tiles, fused, pointers, prefetch, splat, widened

PART_PRODUCTS = 150_000
"""Products in one part of the work: about 3 microseconds of one core."""
UNPACKING = 2
"""What making a float of a code costs, in products."""
AHEAD = 32
"""Words of codes that are fetched before their turn."""
_UNIT_STEP, _UNIT_STEP_BITS = 1 << 23, 0x4B000000
"""The float32 from which on neighbours are 1 apart, and its bits."""

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_OCTETS, _WORDS = ir.VectorType(_I8, PANEL), ir.VectorType(_I32, PANEL)
_REALS = ir.VectorType(_F32, PANEL)


class _Codes:
    """float32 times codes of so many bits, less their zeros: one vector a panel, a word of each output's codes."""

    panels_at_once: ClassVar = {1: 6, 2: 6, 3: 4, 4: 3, 5: 2, 6: 2}
    """By rows of the tile."""
    vectors = 1
    zero = ir.Constant(_REALS, [0.0] * PANEL)

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.inputs = WORD_BITS // bits

    def offsets(self, b: Any, zeros: Any) -> Any:
        """Of eight uint8 zeros: what `values` subtracts."""
        return b.fadd(b.uitofp(zeros, _REALS), ir.Constant(_REALS, [float(_UNIT_STEP)] * PANEL))

    def values(self, b: Any, words: Any, offsets: Any, number: int) -> Any:
        """Code `number` of each word less its zero, as float32: exact, from the bits of a float whose last is 1."""
        shifted = b.lshr(words, ir.Constant(_WORDS, [number * self.bits] * PANEL))
        code = b.and_(shifted, ir.Constant(_WORDS, [2**self.bits - 1] * PANEL))
        real = b.or_(code, ir.Constant(_WORDS, [_UNIT_STEP_BITS] * PANEL))
        return b.fsub(b.bitcast(real, _REALS), offsets)

    def factor(self, b: Any, x: Any, k: Any) -> Any:
        return splat(b, b.load(b.gep(x, [k])))

    def add(self, b: Any, total: Any, x: Any, w: Any) -> Any:
        return fused(b, x, w, total)

    def outputs(self, b: Any, sums: list[Any]) -> Any:
        return sums[0]


class _PackedTile(Tile):
    """Also takes the panels' scales and zeros, the group size and the number of groups."""

    def __init__(self, rows: int, bits: int, scale_type: Any) -> None:
        super().__init__(rows, _Codes(bits))
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
def _packed_products(
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


@inner
def _columns(part, parts, bands, out, x, rows, codes, scales, zeros, bits, group_size, size, bias, k):  # type: ignore[no-untyped-def]
    """One part of out [rows, size] = x [rows, k] @ weight [size, k] transposed + bias."""
    panels, groups = (size + PANEL - 1) // PANEL, (k + group_size - 1) // group_size
    top, bottom, begin, end = part_of_product(part, parts, bands, rows, panels)
    block = max(1, CACHED_VALUES // (k * ROWS)) * ROWS
    step, none = STRIP * PANEL, np.empty(0, np.float32)
    sums = np.empty(ROWS * step, np.float32)
    for first in range(top, bottom, block):
        last = min(first + block, bottom)
        for q in range(begin, end, STRIP):
            count, n = min(STRIP, end - q), q * PANEL
            width, t = min(count * PANEL, size - n), first
            for left in range((last - first + ROWS - 1) // ROWS, 0, -1):
                height = (last - t + left - 1) // left  # tiles of like height
                if bits == 4:
                    _packed_products(
                        sums, step, x, t * k, k, height, codes, scales, zeros, q, count, k, group_size, groups, 4
                    )  # fmt: skip
                else:
                    _packed_products(
                        sums, step, x, t * k, k, height, codes, scales, zeros, q, count, k, group_size, groups, 8
                    )  # fmt: skip
                for m in range(height):
                    scaled(out, (t + m) * size + n, sums, m * step, none, bias, n, width)
                t += height


@inner
def _ordered_rows(part, parts, out, x, order):  # type: ignore[no-untyped-def]
    rows, k = out.shape
    for t in range(rows * part // parts, rows * (part + 1) // parts):
        for j in range(k):
            out[t, j] = x[t, order[j]]


@compiled
def _in_order(words, parts, out, x, rows, order, k):  # type: ignore[no-untyped-def]
    """out[t, j] = x[t, order[j]]"""
    real = np.float32(0)
    arrays = array_at(out, real, (rows, k)), array_at(x, real, (rows, k)), array_at(order, np.int64(0), (k,))
    share(words, parts, _ordered_rows, arrays)


@compiled
def _product(  # type: ignore[no-untyped-def]
    words, parts, out, x, rows, codes, scales, kind, zeros, bits, group_size, size, bias, k
):  # fmt: skip
    real, octet, word = np.float32(0), np.uint8(0), np.int32(0)
    full, groups = (size + PANEL - 1) // PANEL * PANEL, (k + group_size - 1) // group_size
    bands = row_bands(words, rows)
    share(
        words, bands * max(1, parts // bands), _columns,
        (
            bands, array_at(out, real, (rows * size,)), array_at(x, real, (rows * k,)), rows,
            array_at(codes, word, (full * k * bits // WORD_BITS,)), array_at(scales, kind, (full * groups,)),
            array_at(zeros, octet, (full * groups,)), bits, group_size, size,
            array_at(bias, real, (size if bias else 0,)), k,
        ),
    )  # fmt: skip


def linear_w4(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """y[t, n] = sum_j x[t, order[j]] * (codes[n, j] - zeros[n, g]) * scales[n, g] + bias[n]"""
    rows, k = x.shape
    size = weight.out_features
    assert weight.panels_of is not None
    out = empty(rows, size)
    if rows and size:
        values = dense(x)
        if weight.order is not None:
            given, values = values, empty(rows, k)
            parts = max(1, min(rows, rows * k // PART_VALUES))
            launch(_in_order, parts, values.data_ptr(), given.data_ptr(), rows, weight.order.data_ptr(), k)
        bias = None if bias is None else dense(bias)
        parts = max(1, min((rows + UNPACKING) * size * k // PART_PRODUCTS, size // (STRIP * PANEL)))
        launch(
            _product, parts, out.data_ptr(), values.data_ptr(), rows, weight.codes.data_ptr(),
            weight.scales.data_ptr(), KINDS[weight.scales.dtype], weight.zeros.data_ptr(), weight.bits,
            weight.group_size, size, address(bias), k,
        )  # fmt: skip
    return out if x.dtype is torch.float32 else out.to(x.dtype)
