"""The adapters' deltas: shrink (rank sums over K) and expand (into the columns), over segments of rows by adapter.

Where a module is small and pairs are few, one launch does both: each program makes the rank sums for itself, at most
FUSED_TILES times over, which costs second-level cache reads and saves a launch and the sums' way through memory.

A and B are read where they lie, row by row through the tables: nothing is gathered or padded in memory. A program
covers up to BLOCK_M rows of one segment for one module and walks that module's true rank in tiles of BLOCK_R. Rows
without an adapter are in no segment; an adapter that leaves the module alone ends its programs before any load.

**Order of sums.** Along K in steps of BLOCK_K within parts of PART values, each from zero; then the parts in order;
then along the rank in steps of BLOCK_R: all fixed by K and the rank. With few pairs each part is a program of its own
and expand adds the parts; with many one program walks all parts and adds them itself. A row with several adapters is in
one segment of each *round*, and rounds are launches of their own: deltas are added in the request's order, without
atomics.

Sources: Punica (Chen et al. 2023, arXiv 2310.18547) and S-LoRA (Sheng et al. 2023, arXiv 2311.03285).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl

from ..ops import LoraBatch
from ..pool import ROW_ALIGN, Pool
from .launch import REGISTERS, cdiv, launch

BLOCK_M = 16
BLOCK_R = 16
BLOCK_K = 128
BLOCK_N = 64
PART = 512
"""Values of K that are summed together."""
FEW_PAIRS = 128
"""Up to so many pairs, parts are programs of their own: 8 tiles of rows alone would leave a large chip idle."""
FUSED_K, FUSED_COLUMNS, FUSED_TILES = 4096, 512, 8
"""A module of up to so many in-features, and out-features for so many programs, takes one launch instead of two. By
arithmetic, not measured: at 4096 x 4096 and rank 16 eight programs read 128 KiB of A each, once from memory."""
WARPS, FUSED_WARPS, STAGES = 4, 8, 4


@triton.jit
def _entry(slots, segment, layer, num_layers, which, MODULES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the tables [slots, layers, 7] speak of the segment's adapter in the which-th of MODULES."""
    module = tl.full((), MODULES[0], tl.int32)
    for i in tl.static_range(1, len(MODULES)):
        module = tl.where(which == i, MODULES[i], module)
    return (tl.load(slots + segment) * num_layers + layer) * 7 + module


@triton.jit
def _rank_sums(  # type: ignore[no-untyped-def]
    lefts, rights, live, in_rank, begin, finish, K,
    PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of x times rows of A, from k = `begin` to `finish`: each part of PART values from zero, then the parts."""
    total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for p0 in range(begin, finish, PART):
        part_sum = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for k0 in range(p0, p0 + PART, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            left = tl.load(lefts + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
            right = tl.load(rights + k[:, None], mask=in_rank[None, :] & (k < K)[:, None], other=0.0)
            part_sum = tl.dot(left, right.to(left.dtype), part_sum, input_precision=PRECISION)
        total += part_sum
    return total


@triton.jit
def _module_of(tile, OFFSETS: tl.constexpr, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which module a tile of columns is of, where that begins and ends in the output, and which is its first tile."""
    which = tl.full((), 0, tl.int32)
    begin = tl.full((), OFFSETS[0], tl.int32)
    finish = tl.full((), OFFSETS[1], tl.int32)
    first_tile = tl.full((), 0, tl.int32)
    for i in tl.static_range(1, len(TILES) - 1):
        which = tl.where(tile >= TILES[i], i, which)
        begin = tl.where(tile >= TILES[i], OFFSETS[i], begin)
        finish = tl.where(tile >= TILES[i], OFFSETS[i + 1], finish)
        first_tile = tl.where(tile >= TILES[i], TILES[i], first_tile)
    return which, begin, finish, first_tile


@triton.jit
def _pairs(pair_rows, pair_weights, scale, first_pair, end, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """BLOCK_M pairs from `first_pair` on, which of them lie before `end`, their rows, and what their sums count."""
    pair = first_pair + tl.arange(0, BLOCK_M)
    live = pair < end
    row = tl.load(pair_rows + pair, mask=live, other=0).to(tl.int64)
    return pair, live, row, tl.load(pair_weights + pair, mask=live, other=0.0) * scale


@triton.jit
def _values_of_b(pool, rows, column, in_rank, n, inside, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values n of some columns of B, float32 [columns, n]; zeros beyond the rank and the module."""
    start = tl.load(rows + column, mask=in_rank, other=0).to(tl.int64) * ALIGN
    mask = in_rank[:, None] & inside[None, :]
    return tl.load(pool + start[:, None] + n[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _add(out, delta, row, column, mask, out_stride):  # type: ignore[no-untyped-def]
    target = out + row[:, None] * out_stride + column[None, :]
    tl.store(target, tl.load(target, mask=mask, other=0.0).to(tl.float32) + delta, mask=mask)


@triton.jit(do_not_specialize=["first_segment", "layer", "num_pairs"])
def _shrink(  # type: ignore[no-untyped-def]
    x, pool, ranks, first_rows, rows, pair_rows, starts, slots, sums,
    x_stride, K, first_segment, layer, num_layers, num_pairs, width,
    SPLIT: tl.constexpr, MODULES: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, PART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """sums[part, module, pair, r] = sum over the part's k of x[row of pair, k] * A[r, k]; not split, over all k."""
    segment = first_segment + tl.program_id(1)
    end = tl.load(starts + segment + 1)
    first_pair = tl.load(starts + segment) + tl.program_id(0) * BLOCK_M
    if first_pair >= end:
        return
    which = tl.program_id(2) % len(MODULES)
    part = tl.program_id(2) // len(MODULES)
    entry = _entry(slots, segment, layer, num_layers, which, MODULES)
    rank = tl.load(ranks + entry)
    if rank == 0:
        return
    first_row = tl.load(first_rows + entry)
    pair = first_pair + tl.arange(0, BLOCK_M)
    live = pair < end
    lefts = x + tl.load(pair_rows + pair, mask=live, other=0).to(tl.int64)[:, None] * x_stride
    begin = part * PART
    finish = tl.minimum(begin + PART, K) if SPLIT else K
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        in_rank = r < rank
        rights = pool + tl.load(rows + first_row + r, mask=in_rank, other=0).to(tl.int64)[None, :] * ALIGN
        total = _rank_sums(
            lefts, rights, live, in_rank, begin, finish, K, PART, BLOCK_M, BLOCK_R, BLOCK_K, PRECISION
        )
        place = ((part * len(MODULES) + which) * num_pairs + pair).to(tl.int64) * width
        tl.store(sums + place[:, None] + r[None, :], total, mask=live[:, None] & in_rank[None, :])


@triton.jit(do_not_specialize=["first_segment", "layer", "num_pairs"])
def _expand(  # type: ignore[no-untyped-def]
    out, pool, ranks, first_rows, scales, rows, pair_rows, pair_weights, starts, slots, sums,
    out_stride, first_segment, layer, num_layers, num_pairs, width, parts,
    MODULES: tl.constexpr, OFFSETS: tl.constexpr, TILES: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[row of pair, n] += sum over r of weight * scale * (sum of parts of sums[r]) * B[n, r]

    Module i's columns are OFFSETS[i] to OFFSETS[i + 1], its tiles of them TILES[i] to TILES[i + 1].
    """
    segment = first_segment + tl.program_id(1)
    end = tl.load(starts + segment + 1)
    first_pair = tl.load(starts + segment) + tl.program_id(0) * BLOCK_M
    if first_pair >= end:
        return
    tile = tl.program_id(2)
    which, begin, finish, first_tile = _module_of(tile, OFFSETS, TILES)
    entry = _entry(slots, segment, layer, num_layers, which, MODULES)
    rank = tl.load(ranks + entry)
    if rank == 0:
        return
    first_row = tl.load(first_rows + entry) + rank  # the columns of B follow the rows of A
    pair, live, row, factor = _pairs(
        pair_rows, pair_weights, tl.load(scales + entry), first_pair, end, BLOCK_M
    )
    n = (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < finish - begin
    delta = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        in_rank = r < rank
        right = _values_of_b(pool, rows, first_row + r, in_rank, n, inside, ALIGN)
        left = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        place = (which * num_pairs + pair).to(tl.int64) * width
        for part in range(parts):
            at = (part * len(MODULES) * num_pairs).to(tl.int64) * width
            left += tl.load(
                sums + at + place[:, None] + r[None, :], mask=live[:, None] & in_rank[None, :], other=0.0
            )
        delta = tl.dot(left * factor[:, None], right, delta, input_precision=PRECISION)
    _add(out, delta, row, begin + n, live[:, None] & inside[None, :], out_stride)


@triton.jit(do_not_specialize=["first_segment", "layer"])
def _add_deltas(  # type: ignore[no-untyped-def]
    out, x, pool, ranks, first_rows, scales, rows, pair_rows, pair_weights, starts, slots,
    out_stride, x_stride, K, first_segment, layer, num_layers,
    MODULES: tl.constexpr, OFFSETS: tl.constexpr, TILES: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
    PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`_shrink` and `_expand` in one program for each tile of columns, by the same arithmetic in the same order."""
    segment = first_segment + tl.program_id(1)
    end = tl.load(starts + segment + 1)
    first_pair = tl.load(starts + segment) + tl.program_id(0) * BLOCK_M
    if first_pair >= end:
        return
    tile = tl.program_id(2)
    which, begin, finish, first_tile = _module_of(tile, OFFSETS, TILES)
    entry = _entry(slots, segment, layer, num_layers, which, MODULES)
    rank = tl.load(ranks + entry)
    if rank == 0:
        return
    first_row = tl.load(first_rows + entry)
    _, live, row, factor = _pairs(pair_rows, pair_weights, tl.load(scales + entry), first_pair, end, BLOCK_M)
    lefts = x + row[:, None] * x_stride
    n = (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < finish - begin
    delta = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        in_rank = r < rank
        rights = pool + tl.load(rows + first_row + r, mask=in_rank, other=0).to(tl.int64)[None, :] * ALIGN
        sums = _rank_sums(lefts, rights, live, in_rank, 0, K, K, PART, BLOCK_M, BLOCK_R, BLOCK_K, PRECISION)
        right = _values_of_b(pool, rows, first_row + rank + r, in_rank, n, inside, ALIGN)
        delta = tl.dot(sums * factor[:, None], right, delta, input_precision=PRECISION)
    _add(out, delta, row, begin + n, live[:, None] & inside[None, :], out_stride)


def takes_one_launch(pairs: int, k: int, offsets: Sequence[int]) -> bool:
    """Whether shrink and expand are one launch, for modules of `k` in-features that end at `offsets`."""
    widest = max(finish - begin for begin, finish in pairwise(offsets))
    return pairs <= FEW_PAIRS and k <= FUSED_K and widest <= FUSED_COLUMNS * FUSED_TILES


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    pool: Pool,
    layer: int,
    modules: Sequence[int],
    offsets: Sequence[int],
    lora: LoraBatch,
    *,
    one_launch: bool | None = None,
) -> None:
    """out[row, module's columns] += weight * scale * (x[row] @ A.T) @ B.T: one or two launches a round.

    `one_launch`: None as `takes_one_launch` says; to measure the other way, which is right for few pairs too.
    """
    tables = lora.tables
    pairs, segments = lora.pair_rows.shape[0], lora.slots.shape[0]
    if not pairs:
        return
    k, count = x.shape[1], len(modules)
    split = pairs <= FEW_PAIRS
    fused = takes_one_launch(pairs, k, offsets) if one_launch is None else one_launch
    parts = cdiv(k, PART) if split else 1
    width = cdiv(tables.max_rank, BLOCK_R) * BLOCK_R
    columns = FUSED_COLUMNS if fused else BLOCK_N
    tiles = [0]
    for begin, finish in pairwise(offsets):
        tiles.append(tiles[-1] + cdiv(finish - begin, columns))
    elements = pool.elements(tables.dtype)
    common = {
        "MODULES": tuple(modules),
        "ALIGN": ROW_ALIGN // tables.dtype.itemsize,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "BLOCK_M": BLOCK_M,
        "BLOCK_R": BLOCK_R,
        "num_stages": STAGES,
    }
    rounds = range(segments + 1) if lora.rounds is None else lora.rounds
    row_tiles = cdiv(pairs, BLOCK_M)
    if fused:
        for first, last in pairwise(rounds):
            launch(
                _add_deltas, (row_tiles, last - first, tiles[-1]),
                out, x, elements, tables.ranks, tables.first_row, tables.scales, tables.rows,
                lora.pair_rows, lora.pair_weights, lora.starts, lora.slots,
                out.stride(0), x.stride(0), k, first, layer, tables.ranks.shape[1],
                OFFSETS=tuple(offsets), TILES=tuple(tiles), PART=PART, BLOCK_K=BLOCK_K, BLOCK_N=columns,
                num_warps=FUSED_WARPS, **common,
            )  # fmt: skip
        return
    sums = torch.empty((parts, count, pairs, width), dtype=torch.float32, device=x.device)
    for first, last in pairwise(rounds):
        launch(
            _shrink, (row_tiles, last - first, count * parts),
            x, elements, tables.ranks, tables.first_row, tables.rows, lora.pair_rows, lora.starts, lora.slots, sums,
            x.stride(0), k, first, layer, tables.ranks.shape[1], pairs, width,
            SPLIT=split, PART=PART, BLOCK_K=BLOCK_K, num_warps=WARPS, **common,
        )  # fmt: skip
        launch(
            _expand, (row_tiles, last - first, tiles[-1]),
            out, elements, tables.ranks, tables.first_row, tables.scales, tables.rows,
            lora.pair_rows, lora.pair_weights, lora.starts, lora.slots, sums,
            out.stride(0), first, layer, tables.ranks.shape[1], pairs, width, parts,
            OFFSETS=tuple(offsets), TILES=tuple(tiles), BLOCK_N=BLOCK_N, num_warps=WARPS, maxnreg=REGISTERS, **common,
        )  # fmt: skip
