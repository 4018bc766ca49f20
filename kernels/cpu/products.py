"""Many dot products at once, in tiles that keep the vector units busy: cached keys, adapter rows.

Every pair of rows is summed in the order that `vector_ir` tells, so the choice of tile never shows in the result.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiled import inner
from .vector_ir import CACHE_LINE, L2, LANES, call_tile, fused, pointers, prefetch, splat, tree, widened

TILES = (8, 4, 4, 3)
"""Columns of a tile of dot products of 1, 2, … rows: so many sums, and what they are made of, fit in 16 registers.
What is left is done one column at a time; every further kind of tile takes a quarter of a second to compile."""

_F32, _I32 = ir.FloatType(), ir.IntType(32)


@inner
def row_products(out, out_rows, out_at, x, x_rows, begin, end, w, w_rows, w_at, w_count, k, soon):  # type: ignore[no-untyped-def]
    """out[out_rows[m] + out_at + n] = sum_k x[x_rows[m] + k] * w[w_rows[n] + w_at + k]

    for m from `begin` to `end` and n from 0 to `w_count`. `out_rows`, `x_rows` and `w_rows` are int64 arrays of
    offsets. What lies `soon` elements after a tile's first row of w is fetched meanwhile, as much as the tile reads.
    """
    m, most = np.int64(begin), np.int64(len(TILES))
    while m < end:
        rows, n = min(most, end - m), np.int64(0)
        while n < w_count:
            columns = np.int64(TILES[rows - 1])
            if columns > w_count - n:
                columns = np.int64(1)
            dots_tile(out, out_rows, out_at, x, x_rows, m, rows, w, w_rows, w_at, n, columns, k, soon)
            n += columns
        m += rows


@intrinsic
def dot(typingctx: Any, x: Any, x_at: Any, w: Any, w_at: Any, k: Any) -> Any:
    """sum_k x[x_at + k] * w[w_at + k]"""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, _, w, _, _ = pointers(context, b, signature, args)
        kinds = signature.args[0].dtype, signature.args[2].dtype
        out = cgutils.alloca_once(b, _F32)
        _call_tile(b, [out], [b.gep(x, [args[1]])], [b.gep(w, [args[3]])], args[4], args[4], kinds)
        return b.load(out)

    return types.float32(x, x_at, w, w_at, k), generate


@intrinsic
def dots_tile(
    typingctx: Any,
    out: Any,
    out_rows: Any,
    out_at: Any,
    x: Any,
    x_rows: Any,
    m: Any,
    rows: Any,
    w: Any,
    w_rows: Any,
    w_at: Any,
    n: Any,
    columns: Any,
    k: Any,
    soon: Any,
) -> Any:
    """out[out_rows[i] + out_at + j] = sum_k x[x_rows[i] + k] * w[w_rows[j] + w_at + k]

    for i from m to m + `rows` and j from n to n + `columns`, known only when it runs: 1 to len(TILES) rows, and
    TILES[rows - 1] columns or one.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        arrays = pointers(context, b, signature, args)
        out, out_rows, x, x_rows, w, w_rows = (arrays[i] for i in (0, 1, 3, 4, 7, 8))
        _, _, out_at, _, _, m, height, _, _, w_at, n, width, size, soon = args
        kinds = signature.args[3].dtype, signature.args[7].dtype
        target, source = b.gep(out, [b.add(out_at, n)]), b.gep(w, [w_at])

        def places(base: Any, offsets: Any, first: Any, count: int) -> list[Any]:
            return [
                b.gep(base, [b.load(b.gep(offsets, [b.add(first, first.type(i))]))]) for i in range(count)
            ]

        done = b.append_basic_block("done")
        by_height = b.switch(height, done)
        for rows, most in enumerate(TILES, 1):
            with b.goto_block(b.append_basic_block(f"rows{rows}")):
                by_height.add_case(height.type(rows), b.block)
                outs, xs = places(target, out_rows, m, rows), places(x, x_rows, m, rows)
                by_width = b.switch(width, done)
                for columns in (1, most):
                    with b.goto_block(b.append_basic_block(f"columns{columns}")):
                        by_width.add_case(width.type(columns), b.block)
                        ws = places(source, w_rows, n, columns)
                        _call_tile(b, outs, xs, ws, size, soon, kinds)
                        b.branch(done)
        b.position_at_end(done)
        return context.get_dummy_value()

    integers = (m, rows, w, w_rows, w_at, n, columns, k, soon)
    return types.void(out, out_rows, out_at, x, x_rows, *integers), generate


def _call_tile(
    b: Any, outs: list[Any], xs: list[Any], ws: list[Any], size: Any, soon: Any, kinds: tuple[Any, Any]
) -> None:
    """Each of the rows `xs` times each of `ws`, which begin at these pointers; `outs`: where a row's results go."""
    name = ".".join(map(str, ("heddle.dots", len(xs), len(ws), *kinds)))
    define = partial(_define_tile, rows=len(xs), columns=len(ws), kinds=kinds)
    call_tile(b, name, [*outs, *xs, *ws, size, soon], define)


def _define_tile(function: Any, rows: int, columns: int, kinds: tuple[Any, Any]) -> None:
    """The body of that function."""
    x_type, w_type = kinds
    b = ir.IRBuilder(function.append_basic_block("entry"))
    outs, xs = function.args[:rows], function.args[rows : 2 * rows]
    ws, (size, soon) = function.args[2 * rows : -2], function.args[-2:]
    whole = b.and_(size, size.type(-LANES))

    def add_products(sums: list[Any], start: Any, stop: Any, lanes: int) -> None:
        def add(m: int, n: int, factor: Any, value: Any) -> None:
            slot = sums[m * columns + n]
            b.store(fused(b, factor, value, b.load(slot)), slot)

        with cgutils.for_range_slice(b, start, stop, size.type(lanes), size.type) as (k, _):
            if lanes == LANES:
                ask_for_next(k)
            if rows < columns:  # the fewer stay in registers, the others come one by one
                factors = [widened(b, x, k, x_type, lanes) for x in xs]
                for n, w in enumerate(ws):
                    value = widened(b, w, k, w_type, lanes)
                    for m, factor in enumerate(factors):
                        add(m, n, factor, value)
            else:
                values = [widened(b, w, k, w_type, lanes) for w in ws]
                for m, x in enumerate(xs):
                    factor = widened(b, x, k, x_type, lanes)
                    for n, value in enumerate(values):
                        add(m, n, factor, value)

    def ask_for_next(k: Any) -> None:
        """Fetch what is read after these w rows while they are worked on."""
        step = columns * LANES  # elements of w per round
        behind = b.gep(ws[0], [b.add(soon, b.mul(k, size.type(columns)))])
        for line in range(0, step * w_type.bitwidth // 8, CACHE_LINE):
            prefetch(b, b.gep(behind, [size.type(line * 8 // w_type.bitwidth)]), L2)

    lane_sums = [cgutils.alloca_once_value(b, splat(b, _F32(0.0))) for _ in range(rows * columns)]
    add_products(lane_sums, size.type(0), whole, LANES)
    sums = [
        cgutils.alloca_once_value(b, value) for value in _tree_sums(b, [b.load(slot) for slot in lane_sums])
    ]
    add_products(sums, whole, size, 1)
    for i, slot in enumerate(sums):
        m, n = divmod(i, columns)
        b.store(b.load(slot), b.gep(outs[m], [size.type(n)]))
    b.ret_void()


def _tree_sums(b: Any, vectors: list[Any]) -> list[Any]:
    """The sum of each vector's lanes in the order of `_tree`, four vectors in one go."""
    sums = []
    for i in range(0, len(vectors), 4):
        four = vectors[i : i + 4]
        if len(four) < 4:
            sums += [tree(b, vector, b.fadd) for vector in four]
            continue
        while len(four) > 1:  # two vectors of m parts each -> one of 2 m parts, each half as wide
            width = LANES // (4 // len(four)) // 2
            four = [
                _add_halves(b, left, right, width) for left, right in zip(four[::2], four[1::2], strict=True)
            ]
        undefined = ir.Constant(four[0].type, ir.Undefined)
        even, odd = (ir.Constant(ir.VectorType(_I32, 4), list(range(start, LANES, 2))) for start in (0, 1))
        pair_sums = b.fadd(
            b.shuffle_vector(four[0], undefined, even), b.shuffle_vector(four[0], undefined, odd)
        )
        sums += [b.extract_element(pair_sums, _I32(lane)) for lane in range(4)]
    return sums


def _add_halves(b: Any, left: Any, right: Any, width: int) -> Any:
    """First half plus second half of every part of 2 * `width` lanes in two vectors, side by side."""
    parts = range(0, 2 * LANES, 2 * width)
    low = [start + lane for start in parts for lane in range(width)]
    high = [lane + width for lane in low]
    index = ir.VectorType(_I32, LANES)
    return b.fadd(
        b.shuffle_vector(left, right, ir.Constant(index, low)),
        b.shuffle_vector(left, right, ir.Constant(index, high)),
    )
