"""Tile sizes of the linears and how K is cut: one table, read by the launcher and by the compile report.

Shared memory is bounded by the smallest of the four targets (99 KiB on sm_86 and sm_89), so that one table serves all.
No figure here was measured on a GPU; `docs/kernels.md` has the arithmetic behind each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .launch import cdiv

STEP = 64
"""In-features of one product. Part of the order of sums, hence the same in every kernel."""
FEW_ROWS = 64
"""Up to so many rows the weights are read in their packed form, split along K."""
PROGRAMS = 128
"""Programs wanted at a time: about one for each multiprocessor of a large chip. A constant, for the order of sums."""
MIN_PART = 8 * STEP
MAX_PARTS = 16
STRIP_BYTES = 32 << 20
"""Of dequantised weights at a time: stays in a large chip's second-level cache, and bounds the memory taken."""
FINISH_COLUMNS = 1024
DEQUANTISE_OCTETS = 2048


@dataclass(frozen=True)
class Tile:
    """One program's part of the output, its warps, and how many loads run ahead."""

    rows: int
    columns: int
    warps: int
    stages: int


FEW = (Tile(16, 32, 4, 6), Tile(32, 32, 4, 6), Tile(64, 32, 4, 5))
"""The smallest that holds all rows is taken: every program then reads its weights once."""
MANY = {2: Tile(128, 128, 8, 3), 4: Tile(64, 64, 8, 2)}
"""By bytes of an activation."""


def few(rows: int) -> Tile:
    return next(tile for tile in FEW if rows <= tile.rows)


def many(dtype: torch.dtype) -> Tile:
    return MANY[dtype.itemsize]


def part_size(n: int, k: int, step: int = STEP) -> int:
    """In-features that are summed together, fixed by the weight's shape: a multiple of `step`.

    As many parts as give the chip enough programs, none shorter than `MIN_PART`.
    """
    wanted = PROGRAMS // cdiv(n, FEW[0].columns)
    parts = max(1, min(wanted, k // MIN_PART, MAX_PARTS))
    return cdiv(cdiv(k, parts), step) * step


def strip(n: int, k: int, itemsize: int) -> int:
    """Out-features that are dequantised at a time: a multiple of the many-rows tile."""
    columns = MANY[itemsize].columns
    return min(n, max(1, STRIP_BYTES // (k * itemsize) // columns) * columns)
