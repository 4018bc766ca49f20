"""Linear layers with packed 4 and 8 bit weights: codes become floats in registers, once for all rows of a tile.

Where there are more rows than in a tile, a strip of the weight becomes float32 once for all of them. Values and order
of sums are the same on either way: (code - zero) * scale, rounded once, and then summed as `panels` does it.

In GOP/s of one core (AMD EPYC, Zen 3), 4 bits in groups of 64, 576 x 3072; beside it, in the same run, rows of codes
one after another with eight sums over k, which this replaced:

    rows        1     2     3     4     6    16    64
    panels     14    23    31    37    44    66    80
    rows       10    17    15    27    27    44    57
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..dense_weight import PAIR, PANEL
from ..packed_weight import PackedWeight
from .arrays import KINDS, address, array_at, dense
from .compiled import compiled, inner
from .linears import CACHED_VALUES, scaled
from .panels import ROWS, Floats, Tile, call_tiles, panel_products
from .recording import empty, launch
from .team import share
from .vector_ir import pointers, prefetch, widened

STRIP = 6
"""Panels worked on together: a multiple of those in each tile; in float32 a share of the second-level cache."""
PART_PRODUCTS = 150_000
"""Products in one part of the work: about 3 microseconds of one core."""
PART_VALUES = 16384
"""Activations put in order in one part of the work: about as long."""
UNPACKING = 2
"""What making a float of a code costs, in products."""
AHEAD = 256
"""Bytes of codes that are fetched before their turn."""

_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_LANES = PANEL * PAIR
_OCTETS, _WORDS = ir.VectorType(_I8, PANEL), ir.VectorType(_I16, PANEL)
_CODES, _LONG = ir.VectorType(_I8, _LANES), ir.VectorType(_I32, PANEL)
_REALS = ir.VectorType(_F32, PANEL)


class _Group:
    """One panel within one group of inputs: its zeros and scales, and what its codes stand for."""

    def __init__(self, b: Any, bits: int, codes: Any, zeros: Any, scales: Any, scale_type: Any) -> None:
        """`codes` point to the panel's first, `zeros` and `scales` to the group's."""
        self._bits = bits
        self._codes = codes
        octets = _twice(b, b.load(b.bitcast(zeros, _OCTETS.as_pointer()), align=1))
        self._zeros = [octets] if bits == 4 else [b.zext(half, _LONG) for half in _halves(b, octets)]
        self._scales = _halves(b, _twice(b, widened(b, scales, _I32(0), scale_type, PANEL)))

    def values(self, b: Any, k: Any) -> list[Any]:
        """Two vectors: those of the pair of inputs at `k`, as `Floats` takes them."""
        place = b.gep(self._codes, [b.mul(k, k.type(PANEL * self._bits // 8))])
        prefetch(b, b.gep(place, [k.type(AHEAD)]))
        if self._bits == 8:
            halves = _halves(b, b.load(b.bitcast(place, _CODES.as_pointer()), align=1))
            codes = [b.sub(b.zext(half, _LONG), zero) for half, zero in zip(halves, self._zeros, strict=True)]
        else:
            words = b.zext(b.load(b.bitcast(place, _OCTETS.as_pointer()), align=1), _WORDS)
            words = b.or_(
                words, b.shl(words, ir.Constant(_WORDS, [4] * PANEL))
            )  # each half in a byte of its own
            octets = b.and_(b.bitcast(words, _CODES), ir.Constant(_CODES, [15] * _LANES))
            codes = [b.sext(half, _LONG) for half in _halves(b, b.sub(octets, self._zeros[0]))]
        return [b.fmul(b.sitofp(c, _REALS), scale) for c, scale in zip(codes, self._scales, strict=True)]


def _twice(b: Any, vector: Any) -> Any:
    """Each lane of 8 two times in a row: what both inputs of a pair share."""
    lanes = [lane // PAIR for lane in range(_LANES)]
    return b.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, _LANES), lanes))


def _halves(b: Any, vector: Any) -> list[Any]:
    """The first eight lanes of 16 and the last."""
    return [
        b.shuffle_vector(vector, vector, ir.Constant(_LONG, list(range(start, start + PANEL))))
        for start in (0, PANEL)
    ]


def _group_of(b: Any, bits: int, scale_type: Any, weight: list[Any], panel: Any, group: Any) -> _Group:
    """`weight`: codes, scales, zeros, from the panel with number 0 on, k, groups."""
    codes, scales, zeros, k, groups = weight
    place = b.mul(b.add(b.mul(panel, groups), group), k.type(PANEL))
    first = b.mul(b.mul(panel, k), k.type(PANEL * bits // 8))
    codes, zeros, scales = (
        b.gep(array, [at]) for array, at in ((codes, first), (zeros, place), (scales, place))
    )
    return _Group(b, bits, codes, zeros, scales, scale_type)


def _bounds(b: Any, group: Any, group_size: Any, k: Any) -> tuple[Any, Any]:
    """Where a group's inputs begin and end."""
    begin = b.mul(group, group_size)
    end = b.add(begin, group_size)
    return begin, b.select(b.icmp_signed("<", end, k), end, k)


class _PackedTile(Tile):
    """Also takes the panels' scales and zeros, the group size and the number of groups."""

    def __init__(self, rows: int, bits: int, scale_type: Any) -> None:
        super().__init__(rows, Floats(types.float32))
        self._bits = bits
        self._scale_type = scale_type

    def panel_size(self, b: Any, size: Any) -> Any:
        """Bytes of a panel."""
        return b.mul(size, size.type(PANEL * self._bits // 8))

    def products(
        self, b: Any, outs: list[Any], xs: list[Any], ws: list[Any], q: Any, size: Any, more: list[Any]
    ) -> None:
        math, word = self.arithmetic, size.type
        scales, zeros, group_size, groups = more
        codes = b.gep(ws[0], [b.mul(b.mul(q, self.panel_size(b, size)), word(-1))])  # of panel number 0
        weight = [codes, scales, zeros, size, groups]
        slots = self.zeros(b, len(ws))
        with cgutils.for_range(b, groups) as loop:
            panels = [
                _group_of(b, self._bits, self._scale_type, weight, b.add(q, word(i)), loop.index)
                for i in range(len(ws))
            ]
            begin, end = _bounds(b, loop.index, group_size, size)
            with cgutils.for_range_slice(b, begin, end, word(PAIR), word) as (k, _):
                made: dict[int, list[Any]] = {}

                def weights(panel: int, part: int) -> Any:
                    if part == 0:
                        made[panel] = panels[panel].values(b, k)
                    return made[panel][part]

                self.add(b, slots, [partial(math.factor, b, x, k) for x in xs], weights)
        self.finish(b, slots, outs)


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
        at, column = b.mul(b.mul(q, k), k.type(PANEL * width // 8)), b.mul(b.mul(q, groups), k.type(PANEL))
        operands = [
            arrays[0], out_step, b.gep(arrays[2], [x_at]), x_step, b.gep(arrays[6], [at]), panels, k,
            b.gep(arrays[7], [column]), b.gep(arrays[8], [column]), group_size, groups,
        ]  # fmt: skip
        name = f"heddle.packed.{width}.{scale_type}"
        call_tiles(b, rows, name, operands, lambda count: _PackedTile(count, width, scale_type))
        return context.get_dummy_value()

    word = types.int64
    return types.void(
        out, word, x, word, word, word, codes, scales, zeros, word, word, word, word, word, bits
    ), generate


@intrinsic(prefer_literal=True)
def _unpack(
    typingctx: Any, out: Any, codes: Any, scales: Any, zeros: Any, q: Any, panels: Any, k: Any, group_size: Any,
    groups: Any, bits: Any,
) -> Any:  # fmt: skip
    """`out`: the panels from number `q` on in float32. Arrays are read as flat; `bits` is a literal 4 or 8."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out, codes, scales, zeros = pointers(context, b, signature, args)[:4]
        _, _, _, _, q, panels, k, group_size, groups, _ = args
        scale_type, weight, word = signature.args[2].dtype, [codes, scales, zeros, k, groups], k.type
        with cgutils.for_range(b, panels) as panel, cgutils.for_range(b, groups) as group:
            number = b.add(q, panel.index)
            values = _group_of(b, bits.literal_value, scale_type, weight, number, group.index)
            begin, end = _bounds(b, group.index, group_size, k)
            with cgutils.for_range_slice(b, begin, end, word(PAIR), word) as (at, _):
                place = b.mul(b.add(b.mul(panel.index, k), at), word(PANEL))
                for half, vector in enumerate(values.values(b, at)):
                    target = b.gep(out, [b.add(place, word(half * PANEL))])
                    b.store(vector, b.bitcast(target, _REALS.as_pointer()), align=4)
        return context.get_dummy_value()

    word = types.int64
    return types.void(out, codes, scales, zeros, word, word, word, word, word, bits), generate


@inner
def _columns(part, parts, out, x, rows, codes, scales, zeros, bits, group_size, size, bias, k):  # type: ignore[no-untyped-def]
    """One part of the columns of out [rows, size] = x [rows, k] @ weight [size, k] transposed + bias."""
    panels, groups = (size + PANEL - 1) // PANEL, (k + group_size - 1) // group_size
    begin, end = panels * part // parts, panels * (part + 1) // parts
    block = max(1, CACHED_VALUES // (k * ROWS)) * ROWS
    step, none = STRIP * PANEL, np.empty(0, np.float32)
    sums, wide = np.empty(ROWS * step, np.float32), np.empty(step * k if rows > ROWS else 0, np.float32)
    for q in range(begin, end, STRIP):
        count, n = min(STRIP, end - q), q * PANEL
        width = min(count * PANEL, size - n)
        if wide.size and bits == 4:
            _unpack(wide, codes, scales, zeros, q, count, k, group_size, groups, 4)
        elif wide.size:
            _unpack(wide, codes, scales, zeros, q, count, k, group_size, groups, 8)
        for first in range(0, rows, block):
            last, t = min(first + block, rows), first
            for left in range((last - first + ROWS - 1) // ROWS, 0, -1):
                height = (last - t + left - 1) // left  # tiles of like height
                if wide.size:
                    panel_products(sums, step, x, t * k, k, height, wide, 0, count, k)
                elif bits == 4:
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
    real, octet = np.float32(0), np.uint8(0)
    full, groups = (size + PANEL - 1) // PANEL * PANEL, (k + group_size - 1) // group_size
    share(
        words, parts, _columns,
        (
            array_at(out, real, (rows * size,)), array_at(x, real, (rows * k,)), rows,
            array_at(codes, octet, (full * k * bits // 8,)), array_at(scales, kind, (full * groups,)),
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
