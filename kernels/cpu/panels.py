"""Products of rows with weights in panels (`dense_weight`): tiles whose sums stay in registers.

A vector of a panel holds the weights of several outputs for one pair of inputs; it is multiplied by that pair of a
row's values, broadcast. Floats are widened to float32 and summed by fused multiply-adds, the even and the odd k each
from the first to the last, and then the two sums are added; integers are exact in any order. So an element's bits
depend on its row and its weights alone, whichever tile it is computed in.

Tiles fill the 16 vector registers of AVX2, for up to `ROWS` rows together: a weight is fetched and widened once for all
of them. One core of an AMD EPYC (Zen 3, float32 peak 97 GFLOP/s) reaches, in GOP/s over 1536 x 576:

    rows                    1     2     4     6    16    64
    float32 x int8         49    65    83    95    93    96
    float32 x float16      47    87    95    93    98    95
    int16 x int8           81   128    99   146   149   153

and of a Zen 4, where `torch.matmul` reaches 95 (through `linear_int8` and `linear_w8a8`, all they do):

    float32 x int8         40    67    87    95   101   103
    uint8 x int8           67   135   220   260   307   342

Vectors of 16 floats gain nothing there: 94 where eight reach 103.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..dense_weight import PAIR, PANEL
from .vector_ir import call_tile, fused, pointers, prefetch, splat, widened

ROWS = 6
"""Rows of a tile, at most."""
QUAD = 2 * PAIR
_FEATURES = binding.get_host_cpu_features()
X86_PAIRS = bool(_FEATURES.get("avx2"))
"""Whether this machine multiplies pairs of int16 and adds the two in one instruction."""
X86_QUADS = bool(_FEATURES.get("avx512vnni") and _FEATURES.get("avx512vl"))
"""Whether it multiplies four uint8 by four int8 and adds the four, in one instruction and with 32 registers."""
AHEAD = 256
"""Elements of a panel that are fetched before their turn."""

_ELEMENTS = PANEL * PAIR
"""Of a panel, for one pair of inputs."""
_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _SUMS = ir.VectorType(_F32, PANEL), ir.VectorType(_I32, PANEL)
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
) -> Any:
    """out[m * out_step + 8 q + i] = sum_k x[x_at + m * x_step + k] * weight[8 q + i, k]

    for m < `rows` (1 to `ROWS`), q < `panels`, i < 8. The panels of the weight begin at w[w_at]. Arrays are read as
    flat: out and x float32 and w float32, float16, bfloat16 (as `vector_ir` calls them) or int8; or out int32, x int16
    and w int8; or, with `X86_QUADS`, out int32, w int8 and x uint8, of which each element stands for itself - 128 and
    rows lie k rounded up to `QUAD` apart. The sums of integers are modulo 2^32.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays = pointers(context, b, signature, args)
        x_type, w_type = signature.args[2].dtype, signature.args[6].dtype
        arithmetic = Floats(w_type) if x_type == types.float32 else INTEGERS[x_type]()
        _, out_step, _, x_at, x_step, rows, _, w_at, panels, k = args
        x_begin, w_begin = b.gep(arrays[2], [x_at]), b.gep(arrays[6], [w_at])
        operands = [arrays[0], out_step, x_begin, x_step, w_begin, panels, k]
        name = f"heddle.panels.{x_type}.{w_type}.{X86_PAIRS}"
        call_tiles(b, rows, name, operands, lambda count: Tile(count, arithmetic))
        return context.get_dummy_value()

    return types.void(out, out_step, x, x_at, x_step, rows, w, w_at, panels, k), generate


class Floats:
    """float32 times weights of `dtype`: two vectors a panel, lanes (output, even or odd k)."""

    panels_at_once: ClassVar = {1: 6, 2: 3, 3: 2, 4: 1, 5: 1, 6: 1}
    """By rows of the tile."""
    vectors = 2
    """Of sums, a panel."""
    inputs = PAIR
    """Of a row, at once."""
    constants: ClassVar[list[Any]] = []
    """What a tile multiplies weights with besides its rows."""
    zero = ir.Constant(_FLOATS, [0.0] * PANEL)

    def __init__(self, dtype: Any) -> None:
        self._dtype = dtype

    def weights(self, b: Any, panel: Any, at: Any, vector: int) -> Any:
        return widened(b, panel, b.add(at, at.type(vector * PANEL)), self._dtype, PANEL)

    last_weights = weights

    def factor(self, b: Any, x: Any, k: Any) -> Any:
        """x[k], x[k + 1], x[k], …"""
        two = b.load(b.bitcast(b.gep(x, [k]), _I64.as_pointer()), align=4)
        return b.bitcast(splat(b, two, PANEL // 2), _FLOATS)

    def last(self, b: Any, x: Any, k: Any) -> Any:
        """x[k], 0, x[k], …: of a row of odd length the last."""
        lanes = [lane if lane % 2 == 0 else PANEL for lane in range(PANEL)]
        one = splat(b, b.load(b.gep(x, [k])), PANEL)
        return b.shuffle_vector(one, self.zero, ir.Constant(_SUMS, lanes))

    def add(self, b: Any, total: Any, x: Any, w: Any) -> Any:
        return fused(b, x, w, total)

    def outputs(self, b: Any, sums: list[Any], constant: list[Any]) -> Any:
        """The sums of a panel's outputs; `constant`: those of the constant, if there is one."""
        low, high = sums
        even, odd = (ir.Constant(_SUMS, list(range(start, 2 * PANEL, 2))) for start in (0, 1))
        return b.fadd(b.shuffle_vector(low, high, even), b.shuffle_vector(low, high, odd))


class Integers:
    """int16 times int8: one vector a panel, pairs added up as they are multiplied."""

    panels_at_once: ClassVar = {1: 8, 2: 5, 3: 3, 4: 2, 5: 2, 6: 2}
    vectors = 1
    inputs = PAIR
    constants: ClassVar[list[Any]] = []
    zero = ir.Constant(_SUMS, [0] * PANEL)

    def weights(self, b: Any, panel: Any, at: Any, vector: int) -> Any:
        place = b.bitcast(b.gep(panel, [at]), ir.VectorType(_I8, _ELEMENTS).as_pointer())
        return b.sext(b.load(place, align=1), _CODES)

    last_weights = weights

    def factor(self, b: Any, x: Any, k: Any) -> Any:
        two = b.load(b.bitcast(b.gep(x, [k]), _I32.as_pointer()), align=2)
        return b.bitcast(splat(b, two, PANEL), _CODES)

    def last(self, b: Any, x: Any, k: Any) -> Any:
        one = b.zext(b.load(b.gep(x, [k])), _I32)
        return b.bitcast(splat(b, one, PANEL), _CODES)

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

    def outputs(self, b: Any, sums: list[Any], constant: list[Any]) -> Any:
        return sums[0]


class Quads:
    """uint8 that stand for themselves - 128 times int8: one vector a panel, four products added up at once.

    What is too much, 128 a factor, are the products of a constant row.
    """

    panels_at_once: ClassVar = {1: 12, 2: 6, 3: 6, 4: 4, 5: 4, 6: 3}
    vectors = 1
    inputs = QUAD
    constants: ClassVar = [ir.Constant(_SUMS, [-0x7F7F7F80] * PANEL)]  # 128 in every byte
    zero = Integers.zero

    def weights(self, b: Any, panel: Any, at: Any, vector: int) -> Any:
        """Those of two pairs of inputs, for each output the four together."""
        place = b.bitcast(b.gep(panel, [at]), ir.VectorType(_I16, 2 * PANEL).as_pointer())
        return self._by_output(b, b.load(place, align=1))

    def last_weights(self, b: Any, panel: Any, at: Any, vector: int) -> Any:
        """Those of one pair, and zeros."""
        place = b.bitcast(b.gep(panel, [at]), ir.VectorType(_I16, PANEL).as_pointer())
        lanes = ir.Constant(ir.VectorType(_I32, 2 * PANEL), list(range(2 * PANEL)))
        zeros = ir.Constant(ir.VectorType(_I16, PANEL), [0] * PANEL)
        return self._by_output(b, b.shuffle_vector(b.load(place, align=1), zeros, lanes))

    def _by_output(self, b: Any, pairs: Any) -> Any:
        lanes = [half * PANEL + output for output in range(PANEL) for half in (0, 1)]
        turned = b.shuffle_vector(pairs, pairs, ir.Constant(ir.VectorType(_I32, 2 * PANEL), lanes))
        return b.bitcast(turned, _SUMS)

    def factor(self, b: Any, x: Any, k: Any) -> Any:
        return splat(b, b.load(b.bitcast(b.gep(x, [k]), _I32.as_pointer()), align=1), PANEL)

    last = factor

    def add(self, b: Any, total: Any, x: Any, w: Any) -> Any:
        kind = ir.FunctionType(_SUMS, [_SUMS] * 3)
        function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.vpdpbusd.256")
        return b.call(function, [total, x, w])

    def outputs(self, b: Any, sums: list[Any], constant: list[Any]) -> Any:
        return b.sub(sums[0], constant[0])


INTEGERS: dict[Any, type[Integers | Quads]] = {types.int16: Integers, types.uint8: Quads}
"""By the type of the rows' values."""


class Tile:
    """The code for so many rows and any number of panels, in an arithmetic such as `Floats`."""

    def __init__(self, rows: int, arithmetic: Any) -> None:
        self.rows = rows
        self._factors = rows + len(arithmetic.constants)
        self.arithmetic = arithmetic

    def define(self, function: Any) -> None:
        """`function` takes out, out_step, x, x_step, w, panels, k and what a subclass needs besides."""
        b = ir.IRBuilder(function.append_basic_block("entry"))
        out, out_step, x, x_step, w, panels, size, *more = function.args
        word = size.type
        xs = [b.gep(x, [b.mul(x_step, word(m))]) for m in range(self.rows)]
        outs = [b.gep(out, [b.mul(out_step, word(m))]) for m in range(self.rows)]
        panel_size, first = self.panel_size(b, size), word(0)
        for count in sorted({self.arithmetic.panels_at_once[self.rows], 1}, reverse=True):
            last = b.sub(panels, b.srem(b.sub(panels, first), word(count)))
            with cgutils.for_range_slice(b, first, last, word(count), word) as (q, _):
                begin, column = b.mul(q, panel_size), b.mul(q, word(PANEL))
                ws = [b.gep(w, [b.add(begin, b.mul(panel_size, word(i)))]) for i in range(count)]
                self.products(b, [b.gep(row, [column]) for row in outs], xs, ws, q, size, more)
            first = last
        b.ret_void()

    def panel_size(self, b: Any, size: Any) -> Any:
        """Elements of a panel."""
        return b.mul(b.ashr(b.add(size, size.type(1)), size.type(1)), size.type(_ELEMENTS))

    def products(
        self, b: Any, outs: list[Any], xs: list[Any], ws: list[Any], q: Any, size: Any, more: list[Any]
    ) -> None:
        """Those of the rows `xs` with the panels `ws`, of which the first has the number `q`, into `outs`."""
        math, word = self.arithmetic, size.type
        slots = self.zeros(b, len(ws))
        whole = b.and_(b.add(size, word(math.inputs // PAIR - 1)), word(-math.inputs))
        constants = [partial(_itself, value) for value in math.constants]

        def read(weights: Any, k: Any) -> Any:
            at = b.mul(k, word(PANEL))
            return lambda panel, part: weights(b, ws[panel], at, part)

        with cgutils.for_range_slice(b, word(0), whole, word(math.inputs), word) as (k, _):
            for panel in ws:
                prefetch(b, b.gep(panel, [b.add(b.mul(k, word(PANEL)), word(AHEAD))]))
            factors = [partial(math.factor, b, x, k) for x in xs]
            self.add(b, slots, [*factors, *constants], read(math.weights, k))
        with b.if_then(b.icmp_signed("<", whole, size)):
            factors = [partial(math.last, b, x, whole) for x in xs]
            self.add(b, slots, [*factors, *constants], read(math.last_weights, whole))
        self.finish(b, slots, outs)

    def zeros(self, b: Any, panels: int) -> list[Any]:
        """Sums of every row and every vector of the panels."""
        math = self.arithmetic
        slots = [cgutils.alloca_once(b, math.zero.type) for _ in range(self._factors * panels * math.vectors)]
        for slot in slots:
            b.store(math.zero, slot)
        return slots

    def add(self, b: Any, slots: list[Any], factors: list[Any], weights: Any) -> None:
        """Add the products of the inputs at hand: `factors[row]()` times `weights(panel, part)`."""
        math, vectors = self.arithmetic, len(slots) // self._factors

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
        math, vectors = self.arithmetic, len(slots) // self._factors
        sums = [b.load(slot) for slot in slots]
        constant = sums[self.rows * vectors :]
        for row, out in enumerate(outs):
            for first in range(0, vectors, math.vectors):
                own = slice(first, first + math.vectors)
                values = math.outputs(b, sums[row * vectors :][own], constant[own])
                place = b.gep(out, [_I64(first // math.vectors * PANEL)])
                b.store(values, b.bitcast(place, math.zero.type.as_pointer()), align=4)


def _itself(value: Any) -> Any:
    return value


def call_tiles(b: Any, rows: Any, name: str, operands: list[Any], tile_of: Callable[[int], Tile]) -> None:
    """Call the tile of `rows` rows, 1 to `ROWS`, known only when it runs."""
    done = b.append_basic_block("done")
    choice = b.switch(rows, done)
    for count in range(1, ROWS + 1):
        with b.goto_block(b.append_basic_block(f"rows{count}")):
            choice.add_case(rows.type(count), b.block)
            call_tile(b, f"{name}.{count}", operands, tile_of(count).define)
            b.branch(done)
    b.position_at_end(done)
