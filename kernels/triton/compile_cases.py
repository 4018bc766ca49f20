"""Calls that reach every configuration the launchers choose from, at Llama-3-8B's shapes, on the "meta" device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch

from ..ops import AdapterTables, AttentionBatch, Choices, LoraBatch
from ..packed_weight import PackedWeight
from ..pool import Pool, PoolLayout
from ..reference import hold
from . import attention, elementwise, linears, lora, sampling, tiles
from .linear_w8a8 import linear_w8a8

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, LAYERS = 4096, 32, 8, 128, 14336, 128256, 32
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
SHAPES = (
    (QKV, HIDDEN),
    (KV_HEADS * HEAD_DIM, HIDDEN),  # k or v alone, where forms differ: few columns, so K is split
)
"""(N, K): one for each way in which K is cut."""
ROWS = (*(tile.rows for tile in tiles.FEW), tiles.FEW_ROWS + 1)
"""One number of rows for each tile."""
PAIRS = (lora.FEW_PAIRS, lora.FEW_PAIRS + 1)
HEAD_DIMS = (64, HEAD_DIM, 256)
"""One for each tile of attention, up to the widest heads that are served."""
BATCHES = ((16, 16, 8), (16, 16, 512), (4, 515, 512))
"""(sequences, rows, blocks in a table): decodes of short and of long contexts; a prefill beside decodes."""
PROJECTIONS = (
    (HIDDEN, (0, 1, 2), (0, HEADS * HEAD_DIM, (HEADS + KV_HEADS) * HEAD_DIM, QKV)),
    (HIDDEN, (3,), (0, HIDDEN)),
    (HIDDEN, (4, 5), (0, INTERMEDIATE, 2 * INTERMEDIATE)),
    (INTERMEDIATE, (6,), (0, HIDDEN)),
)
"""(K, modules, offsets) of the four linears of a layer that adapters add to."""

Case = Callable[[], object]


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cases(
    dtypes: Sequence[torch.dtype],
    rows: Sequence[int] = ROWS,
    pairs: Sequence[int] = PAIRS,
    batches: Sequence[tuple[int, int, int]] = BATCHES,
) -> Iterator[Case]:
    """Every operation, for activations (and KV, adapters, norms) of each dtype; as given, what reaches every tile."""
    for dtype in dtypes:
        yield from _linears(dtype, rows)
        for kv_dtype, head_dim in product((dtype, torch.int8), HEAD_DIMS):
            yield from _attention(dtype, kv_dtype, head_dim, batches)
        yield from _lora(dtype, pairs)
        yield from _rows(dtype, rows)
    yield from _sampling(rows)


def _linears(dtype: torch.dtype, numbers: Sequence[int]) -> Iterator[Case]:
    for (n, k), rows in product(SHAPES, numbers):
        x = meta(rows, k, dtype=dtype)
        scale = meta(n, dtype=torch.float32)
        yield partial(linears.linear, x, hold(meta(n, k, dtype=dtype)), None)
        yield partial(linears.linear_int8, x, hold(meta(n, k, dtype=torch.int8)), scale, None)
        yield partial(linear_w8a8, x, hold(meta(n, k, dtype=torch.int8)), scale, None, 6.0)
        for bits, group_size in product((4, 8), (128, 32)):
            groups = k // group_size
            weight = PackedWeight(
                codes=meta(n, k * bits // 8, dtype=torch.uint8),
                scales=meta(n, groups, dtype=torch.float16),
                zeros=meta(n, groups, dtype=torch.uint8),
                order=None,
                bits=bits,
                group_size=group_size,
            )
            yield partial(linears.linear_w4, x, weight, None)


def _pool(dtype: torch.dtype, head_dim: int = HEAD_DIM) -> Pool:
    return Pool(PoolLayout(LAYERS, KV_HEADS, head_dim, 16, dtype), 4096, "meta")


def _attention(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, batches: Sequence[tuple[int, int, int]]
) -> Iterator[Case]:
    pool, heads = _pool(kv_dtype, head_dim), [HEADS, KV_HEADS, KV_HEADS]
    for sequences, rows, blocks in batches:
        batch = AttentionBatch(
            block_tables=meta(sequences, blocks, dtype=torch.int32),
            cu_seqlens_q=meta(sequences + 1, dtype=torch.int32),
            context_lens=meta(sequences, dtype=torch.int32),
            slot_mapping=meta(rows, dtype=torch.int64),
            max_query_len=1 if rows == sequences else rows - sequences + 1,
        )
        q = meta(rows, HEADS, head_dim, dtype=dtype)
        yield partial(attention.paged_attention, q, pool, 1, batch, head_dim**-0.5)
        q, k, v = meta(rows, sum(heads) * head_dim, dtype=dtype).unflatten(1, (-1, head_dim)).split(heads, 1)
        positions, angles = meta(rows, dtype=torch.int64), meta(8192, head_dim // 2, dtype=torch.float32)
        yield partial(
            elementwise.rope_and_write_kv, q, k, v, positions, angles, angles, pool, 1, batch.slot_mapping
        )


def _lora(dtype: torch.dtype, numbers: Sequence[int]) -> Iterator[Case]:
    pool, slots = _pool(dtype), 64
    shape = (slots, LAYERS, 7)
    tables = AdapterTables(
        ranks=meta(*shape, dtype=torch.int32),
        first_row=meta(*shape, dtype=torch.int32),
        scales=meta(*shape, dtype=torch.float32),
        rows=meta(1 << 20, dtype=torch.int32),
        dtype=dtype,
    )
    for (k, modules, offsets), pairs in product(PROJECTIONS, numbers):
        batch = LoraBatch(
            tables=tables,
            pair_rows=meta(pairs, dtype=torch.int32),
            pair_weights=meta(pairs, dtype=torch.float32),
            starts=meta(9, dtype=torch.int32),
            slots=meta(8, dtype=torch.int32),
            rounds=(0, 8),
        )
        out, x = meta(pairs, offsets[-1], dtype=dtype), meta(pairs, k, dtype=dtype)
        yield partial(lora.add_lora, out, x, pool, 1, modules, offsets, batch)


def _rows(dtype: torch.dtype, numbers: Sequence[int]) -> Iterator[Case]:
    weight, table = meta(HIDDEN, dtype=dtype), hold(meta(VOCAB, HIDDEN, dtype=dtype))
    for rows in numbers:
        x = meta(rows, HIDDEN, dtype=dtype)
        yield partial(elementwise.rms_norm, x, weight, 1e-5)
        yield partial(elementwise.add_rms_norm, x, x, weight, 1e-5)
        yield partial(elementwise.silu_mul, meta(rows, 2 * INTERMEDIATE, dtype=dtype))
        yield partial(elementwise.embedding, meta(rows, dtype=torch.int64), table, None, dtype)


def _sampling(numbers: Sequence[int]) -> Iterator[Case]:
    """Logits are float32 whatever the activations are."""
    for rows in numbers:
        choices = Choices(
            temperatures=meta(rows, dtype=torch.float32),
            top_ks=meta(rows, dtype=torch.int32),
            top_ps=meta(rows, dtype=torch.float64),
            min_ps=meta(rows, dtype=torch.float32),
            points=meta(rows, dtype=torch.float64),
            draws=True,
        )
        yield partial(sampling.choose_tokens, meta(rows, VOCAB, dtype=torch.float32), choices)
