"""Products of rows with weights in panels (`dense_weight`): tiles whose sums stay in registers.

A vector of a panel holds the weights of several outputs for one pair of inputs; it is multiplied by that pair of a
row's values, broadcast. Floats are widened to float32 and summed by fused multiply-adds, the even and the odd k each
from the first to the last, and then the two sums are added; integers are exact in any order. So an element's bits
depend on its row and its weights alone, whichever tile it is computed in.

Tiles fill 16 vector registers, all that AVX2 has, for up to `ROWS` rows together: a weight is fetched and widened once
for all of them. One core of an AMD EPYC (Zen 3, float32 peak 97 GFLOP/s) reaches, in GOP/s over 1536 x 576:

    rows                    1     2     4     6    16    64
    float32 x int8         49    65    83    95    93    96
    float32 x float16      47    87    95    93    98    95
    int16 x int8           81   128    99   146   149   153

and of a Zen 4, where `torch.matmul` reaches 95 (through `linear_scaled`, all it does):

    float32 x int8         40    67    87    95   101   103

Vectors of 16 floats (AVX-512) gain nothing there: 94 where eight reach 103. On a Zen 5, whose registers are that wide,
they do, two threads together, all 30 layers of the demo base in float32 and its head in 16 bits; of sums for more than
16 registers the compiler spills some, and 16 rows take longer than with vectors of 8:

    rows                    1     4    16    64   256
    vectors of 8           30    92   190   233   249
    vectors of 16          30   100   244   357   390
    head, of 8             98   219   249   242   219
    head, of 16            98   290   400   400   336

What integers reach, `digits` tells.
While a strip of panels is multiplied the next one is fetched into the second level: with all layers' weights in turn
one core of the Zen 4 takes 35.4 ms for 16 rows (float32 x int8, 106 MB) where it took 37.6, and 34.2 with them cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..dense_weight import PAIR, PANEL
from . import digits
from .vector_ir import L2, TILED_INT8, WIDE, call_tiles, fused, lines_from, pointers, prefetch, splat, widened

ROWS = 6
"""Rows of a tile, at most."""
_FEATURES = binding.get_host_cpu_features()
X86_PAIRS = bool(_FEATURES.get("avx2"))
"""Whether this machine multiplies pairs of int16 and adds the two in one instruction."""
AHEAD = 256
"""Elements of a panel that are fetched before their turn."""

_ELEMENTS = PANEL * PAIR
"""Of a panel, for one pair of inputs."""
_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_SUMS = ir.VectorType(_I32, PANEL)
_CODES = ir.VectorType(_I16, _ELEMENTS)


@intrinsic
def panel_products(
    typingctx: Any,
    out: Any,
    out_step: Any,
    x: Any,
    x_at: Any,
    x_step: Any,
    rows: Any,
    w: Any,
    w_at: Any,
    panels: Any,
    k: Any,
    soon: Any,
) -> Any:
    """out[m * out_step + 8 q + i] = sum_k x[x_at + m * x_step + k] * weight[8 q + i, k]

    for m < `rows` (1 to `ROWS`), q < `panels`, i < 8. The panels of the weight begin at w[w_at]; what is read soon
    after, at w[soon], is fetched meanwhile. Arrays are read as flat: out float32; x float32 and w float32, float16,
    bfloat16 or int8 (as `vector_ir` calls them); or w int8 and x int16; or w tiled and x int8, in rows as `digits`
    tells. The sums of integers are exact modulo 2^32 and then rounded to float32. Of a tiled weight `panels` are even.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays = pointers(context, b, signature, args)
        x_type, w_type = signature.args[2].dtype, signature.args[6].dtype
        _, out_step, _, x_at, x_step, rows, _, w_at, panels, k, soon = args
        places = [b.gep(arrays[6], [at]) for at in (w_at, soon)]
        operands = [arrays[0], out_step, b.gep(arrays[2], [x_at]), x_step, places[0], panels, k, places[1]]
        name = f"heddle.panels.{x_type}.{w_type}.{X86_PAIRS}.{WIDE}"

        def tile(count: int) -> Any:
            if x_type == types.int8:
                return digits.Tile(count, 1)
            if x_type == types.int16:
                return Tile(count, Integers())
            if w_type == TILED_INT8:
                return Tile(count, Floats(w_type, WIDE, digits.TILE_OUTPUTS, digits.QUAD, digits.TILE_INPUTS))
            return Tile(count, Floats(w_type, WIDE))

        call_tiles(b, rows, name, operands, tile, ROWS)
        return context.get_dummy_value()

    return types.void(out, out_step, x, x_at, x_step, rows, w, w_at, panels, k, soon), generate


class Floats:
    """float32 times weights of `dtype` in panels of `outputs` by `inputs`, inputs filled up to a multiple of `whole`.

    Lanes are (output, place among the inputs).
    """

    def __init__(
        self, dtype: Any, wide: bool, outputs: int = PANEL, inputs: int = PAIR, whole: int = PAIR
    ) -> None:
        self._dtype = dtype
        self._lanes = 16 if wide else 8
        self.outputs_at_once, self.inputs, self.whole = outputs, inputs, whole
        self.vectors = outputs * inputs // self._lanes
        """Of sums, a panel."""
        at_once = {1: 6, 2: 6, 3: 4, 4: 3, 5: 2, 6: 2} if wide else {1: 6, 2: 3, 3: 2, 4: 1, 5: 1, 6: 1}
        share = outputs * inputs // _ELEMENTS
        self.panels_at_once = {rows: max(1, count // share) for rows, count in at_once.items()}
        """By rows of the tile."""
        self.zero = ir.Constant(ir.VectorType(_F32, self._lanes), [0.0] * self._lanes)

    def weights(self, b: Any, panel: Any, at: Any, vector: int) -> Any:
        return widened(b, panel, b.add(at, at.type(vector * self._lanes)), self._dtype, self._lanes)

    def factor(self, b: Any, x: Any, k: Any) -> Any:
        """x[k], x[k + 1], …, as many as are multiplied at once, over and over."""
        kind = ir.IntType(32 * self.inputs)
        few = b.load(b.bitcast(b.gep(x, [k]), kind.as_pointer()), align=4)
        return b.bitcast(splat(b, few, self._lanes // self.inputs), self.zero.type)

    def add(self, b: Any, total: Any, x: Any, w: Any) -> Any:
        return fused(b, x, w, total)

    def outputs(self, b: Any, sums: list[Any]) -> list[Any]:
        """The sums of a panel's outputs, as float32: neighbours are added until each output has one."""
        left = self.inputs
        while left > 1:
            pairs = list(zip(sums[::2], sums[1::2], strict=True)) if len(sums) > 1 else [(sums[0], sums[0])]
            count = self._lanes if len(sums) > 1 else self._lanes // 2
            sums = [
                b.fadd(*(_shuffled(b, low, high, range(start, 2 * count, 2)) for start in (0, 1)))
                for low, high in pairs
            ]
            left //= 2
        return sums


class Integers:
    """int16 times int8: one vector a panel, pairs added up as they are multiplied."""

    outputs_at_once, inputs, whole = PANEL, PAIR, PAIR
    panels_at_once: ClassVar = {1: 8, 2: 5, 3: 3, 4: 2, 5: 2, 6: 2}
    vectors = 1
    zero = ir.Constant(_SUMS, [0] * PANEL)

    def weights(self, b: Any, panel: Any, at: Any, vector: int) -> Any:
        place = b.bitcast(b.gep(panel, [at]), ir.VectorType(_I8, _ELEMENTS).as_pointer())
        return b.sext(b.load(place, align=1), _CODES)

    def factor(self, b: Any, x: Any, k: Any) -> Any:
        two = b.load(b.bitcast(b.gep(x, [k]), _I32.as_pointer()), align=2)
        return b.bitcast(splat(b, two, PANEL), _CODES)

    def add(self, b: Any, total: Any, x: Any, w: Any) -> Any:
        if X86_PAIRS:
            kind = ir.FunctionType(_SUMS, [_CODES, _CODES])
            function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx2.pmadd.wd")
            return b.add(total, b.call(function, [x, w]))
        for start in (0, 1):
            every_other = ir.Constant(_SUMS, list(range(start, _ELEMENTS, 2)))
            left, right = (b.sext(b.shuffle_vector(v, v, every_other), _SUMS) for v in (x, w))
            total = b.add(total, b.mul(left, right))
        return total

    def outputs(self, b: Any, sums: list[Any]) -> list[Any]:
        return [b.sitofp(sums[0], ir.VectorType(_F32, PANEL))]


class Tile:
    """The code for so many rows and any number of panels, in an arithmetic such as `Floats`."""

    def __init__(self, rows: int, arithmetic: Any) -> None:
        self.rows = rows
        self.arithmetic = arithmetic

    def define(self, function: Any) -> None:
        """`function` takes out, out_step, x, x_step, w, panels, k and `more`."""
        b = ir.IRBuilder(function.append_basic_block("entry"))
        out, out_step, x, x_step, w, panels, size, *more = function.args
        word = size.type
        xs = [b.gep(x, [b.mul(x_step, word(m))]) for m in range(self.rows)]
        outs = [b.gep(out, [b.mul(out_step, word(m))]) for m in range(self.rows)]
        math, first = self.arithmetic, word(0)
        panel_size, wide = self.panel_size(b, size), math.outputs_at_once // PANEL
        for count in sorted({math.panels_at_once[self.rows] * wide, wide}, reverse=True):
            last = b.sub(panels, b.srem(b.sub(panels, first), word(count)))
            with cgutils.for_range_slice(b, first, last, word(count), word) as (q, _):
                begin, column = b.mul(q, panel_size), b.mul(q, word(PANEL))
                ws = [b.gep(w, [b.add(begin, b.mul(panel_size, word(i)))]) for i in range(0, count, wide)]
                self.products(b, [b.gep(row, [column]) for row in outs], xs, ws, q, size, more)
            first = last
        b.ret_void()

    def panel_size(self, b: Any, size: Any) -> Any:
        """Elements of `PANEL` outputs."""
        whole = size.type(self.arithmetic.whole)
        return b.mul(b.sdiv(b.add(size, b.sub(whole, size.type(1))), whole), b.mul(whole, size.type(PANEL)))

    def products(
        self, b: Any, outs: list[Any], xs: list[Any], ws: list[Any], q: Any, size: Any, more: list[Any]
    ) -> None:
        """Those of the rows `xs` with the panels `ws`, of which the first has the number `q`, into `outs`.

        `more`: what is fetched meanwhile; in a subclass what it needs.
        """
        math, word = self.arithmetic, size.type
        slots = self.zeros(b, len(ws))
        inputs = word(math.inputs)
        whole = b.mul(b.sdiv(size, inputs), inputs)
        turns = b.mul(b.sdiv(q, word(len(ws) * math.outputs_at_once // PANEL)), b.sdiv(size, inputs))
        soon = lines_from(b, more[0], turns)

        def read(k: Any) -> Any:
            at = b.mul(k, word(math.outputs_at_once))
            return lambda panel, part: math.weights(b, ws[panel], at, part)

        with cgutils.for_range_slice(b, word(0), whole, inputs, word) as (k, _):
            for panel in ws:
                prefetch(b, b.gep(panel, [b.add(b.mul(k, word(math.outputs_at_once)), word(AHEAD))]))
            prefetch(b, lines_from(b, soon, b.sdiv(k, inputs)), L2)
            self.add(b, slots, [partial(math.factor, b, x, k) for x in xs], read(k))
        with b.if_then(b.icmp_signed("<", whole, size)):
            rest = [_filled_up(b, b.gep(x, [whole]), b.sub(size, whole), math.inputs) for x in xs]
            self.add(b, slots, [partial(math.factor, b, x, word(0)) for x in rest], read(whole))
        self.finish(b, slots, outs)

    def zeros(self, b: Any, panels: int) -> list[Any]:
        """Sums of every row and every vector of the panels."""
        math = self.arithmetic
        slots = [cgutils.alloca_once(b, math.zero.type) for _ in range(self.rows * panels * math.vectors)]
        for slot in slots:
            b.store(math.zero, slot)
        return slots

    def add(self, b: Any, slots: list[Any], factors: list[Any], weights: Any) -> None:
        """Add the products of the inputs at hand: `factors[row]()` times `weights(panel, part)`."""
        math, vectors = self.arithmetic, len(slots) // self.rows

        def add(row: int, vector: int, factor: Any, value: Any) -> None:
            slot = slots[row * vectors + vector]
            b.store(math.add(b, b.load(slot), factor, value), slot)

        if self.rows <= vectors:  # the fewer stay in registers, the others come one by one
            held = [factor() for factor in factors]
            for vector in range(vectors):
                value = weights(*divmod(vector, math.vectors))
                for row, factor in enumerate(held):
                    add(row, vector, factor, value)
        else:
            values = [weights(*divmod(vector, math.vectors)) for vector in range(vectors)]
            for row, factor in enumerate(factors):
                broadcast = factor()
                for vector, value in enumerate(values):
                    add(row, vector, broadcast, value)

    def finish(self, b: Any, slots: list[Any], outs: list[Any]) -> None:
        """Store the sums of each row's outputs."""
        math, vectors = self.arithmetic, len(slots) // self.rows
        sums = [b.load(slot) for slot in slots]
        for row, out in enumerate(outs):
            for first in range(0, vectors, math.vectors):
                begin = row * vectors + first
                place = b.gep(out, [_I64(first // math.vectors * math.outputs_at_once)])
                for values in math.outputs(b, sums[begin : begin + math.vectors]):
                    b.store(values, b.bitcast(place, values.type.as_pointer()), align=4)
                    place = b.gep(place, [_I64(values.type.count)])


def _filled_up(b: Any, x: Any, count: Any, length: int) -> Any:
    """A pointer to the first `count` of x and zeros, `length` in all."""
    kind = x.type.pointee
    buffer = cgutils.alloca_once(b, ir.ArrayType(kind, length))
    b.store(ir.Constant(buffer.type.pointee, [0] * length), buffer)
    values = b.bitcast(buffer, x.type)
    with cgutils.for_range(b, count) as loop:
        b.store(b.load(b.gep(x, [loop.index])), b.gep(values, [loop.index]))
    return values


def _shuffled(b: Any, left: Any, right: Any, lanes: Sequence[int]) -> Any:
    """Those lanes of left, then right."""
    return b.shuffle_vector(left, right, ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes)))
