"""Products of digits with int8 weights, 16 rows by 16 outputs by 64 inputs in one instruction (AMX).

Eight registers hold tiles of 16 rows of 64 bytes. One instruction adds to a tile of sums [row, output], int32, the
products of a tile of digits [row, input], int8, with a tile of weights [input // 4, output, input % 4], int8: rows of
digits and panels of weights as they lie (`digits`). All sums are integers, exact in any order, so which of the two
computes a row never shows in its bits.

One core of an Intel Xeon (Granite Rapids) reaches 7,600 GOP/s with nothing but these instructions and 6,600 with what
loads tiles beside them, where AVX512-VNNI reaches 500 and fused multiply-adds of float32 200. Vector instructions hide
behind none of it: with weights in another order, shuffled into tiles meanwhile, 16 rows took twice as long.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..dense_weight import PANEL
from .digits import QUAD, TILE_INPUTS, X86_DIGITS
from .vector_ir import L2, call_tiles, lines_from, pointers, prefetch

TILE = 16
"""Rows of a tile; outputs of a tile of weights."""
ROW_BYTES = TILE * QUAD
"""Of any tile."""
ROW_TILES, COLUMN_TILES = 3, 2
"""Tiles of sums that are computed together: with one of digits and one of weights they fill the registers."""
ROWS = ROW_TILES * TILE
"""Rows of digits multiplied together, at most."""
AHEAD = 16384
"""Bytes of panels that are fetched before their turn where all rows are multiplied at once. 1,024 to 8,192 make 16 rows
of weights that come from the third level 5 to 15 % slower; of weights in the second one, fetching costs a quarter."""

_DIGITS, _WEIGHTS = ROW_TILES * COLUMN_TILES, ROW_TILES * COLUMN_TILES + 1
"""Registers; the sums' come first."""
_I8, _I32 = ir.IntType(8), ir.IntType(32)
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def _permitted() -> bool:
    """Whether Linux lets this process use the tiles: it must be asked, since their contents are 8 KiB a thread."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


_FEATURES = binding.get_host_cpu_features()
AMX = bool(X86_DIGITS and _FEATURES.get("amx-tile") and _FEATURES.get("amx-int8")) and _permitted()
"""Whether this process may multiply tiles."""


@intrinsic
def use_tiles(typingctx: Any) -> Any:
    """Make the calling thread's registers tiles of full size, until `leave_tiles`."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        palette = [1, *[0] * 15]
        widths = [byte for _ in range(8) for byte in (ROW_BYTES, 0)]
        setting = [*palette, *widths, *[0] * 16, *[TILE] * 8, *[0] * 8]
        kind = ir.ArrayType(_I8, len(setting))
        place = cgutils.alloca_once_value(b, ir.Constant(kind, setting))
        _instruction(b, "ldtilecfg", b.bitcast(place, _I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def leave_tiles(typingctx: Any) -> Any:
    """Give the registers up: a thread that is interrupted has nothing of them to save."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _instruction(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def tile_products(
    typingctx: Any, out: Any, out_step: Any, codes: Any, at: Any, step: Any, rows: Any, w: Any, w_at: Any, panels: Any,
    k: Any, soon: Any, lines: Any,
) -> Any:  # fmt: skip
    """out[m * out_step + 8 q + i] = sum_k codes[at + m * step + k] * weight[8 q + i, k], int32, exact modulo 2^32

    for m < `rows` (1 to `ROWS`) rounded up to a multiple of 16, q < `panels` (even), i < 8. The panels of the weight,
    tiled, begin at w[w_at]; codes and out are flat, codes int8 and read up to a multiple of 64 inputs. Beside each tile
    of weights `lines` cache lines are fetched, from w[soon] on.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays = pointers(context, b, signature, args)
        _, out_step, _, at, step, rows, _, w_at, panels, k, soon, lines = args
        operands = [
            arrays[0], out_step, b.gep(arrays[2], [at]), step, b.gep(arrays[6], [w_at]), panels, k,
            b.gep(arrays[6], [soon]), lines,
        ]  # fmt: skip
        count = b.sdiv(b.add(rows, rows.type(TILE - 1)), rows.type(TILE))
        call_tiles(b, count, "heddle.amx.products", operands, _Tiles, ROW_TILES)
        return context.get_dummy_value()

    word = types.int64
    return types.void(out, word, codes, word, word, word, w, word, word, word, word, word), generate


class _Tiles:
    """The code for so many tiles of rows, and any even number of panels."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def define(self, function: Any) -> None:
        """`function` takes out, out_step, codes, step, w, panels, k, what is fetched and lines."""
        b = ir.IRBuilder(function.append_basic_block("entry"))
        out, out_step, codes, step, w, panels, k, soon, lines = function.args
        word = step.type
        columns, first = b.sdiv(panels, word(TILE // PANEL)), word(0)
        tiles = b.sdiv(b.add(k, word(TILE_INPUTS - 1)), word(TILE_INPUTS))
        rows = [b.gep(codes, [b.mul(step, word(r * TILE))]) for r in range(self._rows)]
        outs = [b.gep(out, [b.mul(out_step, word(r * TILE))]) for r in range(self._rows)]
        size = b.mul(tiles, word(TILE * ROW_BYTES))
        for count in (COLUMN_TILES, 1):
            last = b.sub(columns, b.srem(b.sub(columns, first), word(count)))
            with cgutils.for_range_slice(b, first, last, word(count), word) as (column, _):
                begins = [b.gep(w, [b.mul(size, b.add(column, word(c)))]) for c in range(count)]
                places = [b.gep(row, [b.mul(column, word(TILE))]) for row in outs]
                near = lines_from(b, soon, b.mul(b.mul(column, tiles), lines))
                self._products(
                    b, places, out_step, rows, step, begins, tiles, near, b.mul(lines, word(count))
                )
            first = last
        b.ret_void()

    def _products(
        self,
        b: Any,
        outs: list[Any],
        out_step: Any,
        rows: list[Any],
        step: Any,
        columns: list[Any],
        tiles: Any,
        soon: Any,
        lines: Any,
    ) -> None:
        """Those of tiles of rows and of outputs that begin at these pointers."""
        word, count = step.type, len(columns)
        for register in range(len(rows) * count):
            _instruction(b, "tilezero", _I8(register))
        with cgutils.for_range(b, tiles) as loop:
            at, inputs = b.mul(loop.index, word(TILE * ROW_BYTES)), b.mul(loop.index, word(ROW_BYTES))
            near = lines_from(b, soon, b.mul(loop.index, lines))
            with cgutils.for_range(b, lines) as line:
                prefetch(b, lines_from(b, near, line.index), L2)
            for c, column in enumerate(columns):
                _instruction(b, "tileloadd64", _I8(_WEIGHTS), b.gep(column, [at]), word(ROW_BYTES))
                order = list(range(len(rows)))
                order = order[-1:] + order[:-1] if c else order  # the tile loaded last is still there
                for r in order:
                    if c == 0 or r != order[0]:
                        _instruction(b, "tileloadd64", _I8(_DIGITS), b.gep(rows[r], [inputs]), step)
                    _instruction(b, "tdpbssd", _I8(r * count + c), _I8(_DIGITS), _I8(_WEIGHTS))
        stride = b.mul(out_step, word(_I32.width // 8))
        for r, out in enumerate(outs):
            for c in range(count):
                place = b.bitcast(b.gep(out, [word(c * TILE)]), _I8.as_pointer())
                _instruction(b, "tilestored64", _I8(r * count + c), place, stride)


def _instruction(b: Any, name: str, *operands: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), list(operands))
