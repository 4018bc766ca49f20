"""Calls that reach every configuration the launchers choose from, at Llama-3-8B's shapes, on the "meta" device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from ..packed_weight import PackedWeight
from . import linears, tiles

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 4096, 32, 8, 128, 14336, 128256
SHAPES = (
    ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    (KV_HEADS * HEAD_DIM, HIDDEN),  # k or v alone, where forms differ: few columns, so K is split
    (HIDDEN, INTERMEDIATE),
)
"""(N, K): one for each way in which K is cut, or alignments differ."""
ROWS = (*(tile.rows for tile in tiles.FEW), tiles.FEW_ROWS + 1)
"""One number of rows for each tile."""
HALF = (torch.float16, torch.bfloat16)

Case = Callable[[], object]


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cases() -> Iterator[Case]:
    yield from _float_and_int8()
    yield from _packed()


def _float_and_int8() -> Iterator[Case]:
    for (n, k), rows in product(SHAPES, ROWS):
        for dtype in (*HALF, torch.float32):
            x, scale = meta(rows, k, dtype=dtype), meta(n, dtype=torch.float32)
            yield partial(linears.linear, x, meta(n, k, dtype=dtype), None)
            yield partial(linears.linear_int8, x, meta(n, k, dtype=torch.int8), scale, None)


def _packed() -> Iterator[Case]:
    for (n, k), rows, bits, group_size in product(SHAPES, ROWS, (4, 8), (128, 32)):
        for dtype in HALF:
            groups = k // group_size
            weight = PackedWeight(
                codes=meta(n, k * bits // 8, dtype=torch.uint8),
                scales=meta(n, groups, dtype=torch.float16),
                zeros=meta(n, groups, dtype=torch.uint8),
                order=None,
                bits=bits,
                group_size=group_size,
            )
            yield partial(linears.linear_w4, meta(rows, k, dtype=dtype), weight, None)
