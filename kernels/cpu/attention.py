"""Attention that reads keys and values where they lie in the pool, for decoding rows and prefill chunks alike.

A row's result depends on its own context alone: scores are dot products (`products`), the softmax takes its maximum and
sum over exactly the row's own positions, and values are added in the order of positions, in runs of `KEYS`
counted from the first.

A sequence's blocks lie anywhere in the pool, 4 KiB a head at head_dim 64, too little for a processor's own fetching
ahead: so values are fetched into the second level while keys are scored, and the next head's keys while values are
added. 16 rows of 96 tokens, all layers of the demo base, 71 MB: 4.5 -> 3.4 ms with two threads of a Zen 4. Into the
first level, with its few outstanding misses, they come no faster.
"""

from __future__ import annotations

import numpy as np
import torch

from ..ops import AttentionBatch
from ..pool import SCALE_BYTES, Pool
from .arrays import KINDS, array_at, dense
from .compiled import compiled, inner
from .exponential import exp
from .products import row_products
from .recording import empty, launch
from .team import share
from .vector_ir import LANES, WIDEST, add_weighted_rows, fma, largest, load, store, total

ROWS = 4
"""Rows of one sequence worked on together, so that a key is fetched once for all of them."""
KEYS = 48
"""Keys scored in one go: divisible by the columns of each tile of `row_products`; 12 KiB at head_dim 64."""
PART_KEYS = 256
"""(row, key-value head, key) triples in one part of the work: about 5 microseconds of one core."""


@inner
def _softmax(scores, start, length, scale):  # type: ignore[no-untyped-def]
    """Turn scores into exp(scale * (score - max)) in place; returns their sum."""
    top = largest(scores, start, length)
    for j in range(start, start + length):
        store(scores, j, exp((load(scores, j) - top) * scale))
    return total(scores, start, length)


@inner
def _add_values(out, out_at, heads, weights, at, step, pool, tokens, value_at, length, head_dim, soon):  # type: ignore[no-untyped-def]
    """out[out_at + h * head_dim + d] += sum_j weights[at + h * step + j] * value j [d], for h < `heads`."""
    whole = head_dim // LANES * LANES
    h = 0
    while h < heads:
        o, p = out_at + h * head_dim, at + h * step
        d = 0
        if heads - h >= 3:
            outs, ps = (o, o + head_dim, o + 2 * head_dim), (p, p + step, p + 2 * step)
            while d + WIDEST * LANES <= whole:
                add_weighted_rows(out, outs, weights, ps, pool, tokens, value_at, length, d, WIDEST, soon)
                d += WIDEST * LANES
            while d < whole:
                add_weighted_rows(out, outs, weights, ps, pool, tokens, value_at, length, d, 1, soon)
                d += LANES
            h += 3
        else:
            while d + WIDEST * LANES <= whole:
                add_weighted_rows(out, (o,), weights, (p,), pool, tokens, value_at, length, d, WIDEST, soon)
                d += WIDEST * LANES
            while d < whole:
                add_weighted_rows(out, (o,), weights, (p,), pool, tokens, value_at, length, d, 1, soon)
                d += LANES
            h += 1
    for h in range(heads):
        for d in range(whole, head_dim):
            value = np.float32(0.0)
            for j in range(length):
                value = fma(load(weights, at + h * step + j), load(pool, tokens[j] + value_at + d), value)
            place = out_at + h * head_dim + d
            store(out, place, load(out, place) + value)


@inner
def _multiply(scores, at, factors, count):  # type: ignore[no-untyped-def]
    """scores[at + j] *= factors[j]"""
    for j in range(count):
        store(scores, at + j, load(scores, at + j) * load(factors, j))


@inner
def _rows_of_one_head(  # type: ignore[no-untyped-def]
    out, q, pool, tokens, key_scales, value_scales, scores, q_rows, score_rows, first, last, length, kv_head, group,
    num_heads, head_dim, block_size, value_at, scale,
):  # fmt: skip
    """Rows first to last of one sequence, of which the last sees `length` tokens, for the queries of one kv head.

    Scales are of the sequence's tokens at this head; none where the cache holds floats.
    """
    step = tokens.size  # scores of one (row, head) and the next
    count = (last - first) * group
    for m in range(count):
        q_rows[m] = ((first + m // group) * num_heads + kv_head * group + m % group) * head_dim
        score_rows[m] = m * step
    at = kv_head * block_size * head_dim
    for start in range(0, length, KEYS):
        width = min(KEYS, length - start)
        row_products(
            scores, score_rows, start, q, q_rows, 0, count, pool, tokens[start:], at, width, head_dim, value_at
        )  # fmt: skip
    if key_scales.size:
        for m in range(count):
            _multiply(scores, m * step, key_scales, length)
    for row in range(first, last):
        seen = length - (last - 1 - row)
        at_row, scores_at = q_rows[(row - first) * group], (row - first) * group * step
        for d in range(at_row, at_row + group * head_dim):
            store(out, d, np.float32(0.0))
        for h in range(group):
            weight = np.float32(1.0) / _softmax(scores, scores_at + h * step, seen, scale)
            for j in range(scores_at + h * step, scores_at + h * step + seen):
                store(scores, j, load(scores, j) * weight)
            if value_scales.size:
                _multiply(scores, scores_at + h * step, value_scales, seen)
        for start in range(0, seen, KEYS):  # from zero at every KEYS-th position, whatever the row
            width = min(KEYS, seen - start)
            _add_values(
                out, at_row, group, scores, scores_at + start, step, pool, tokens[start:], at + value_at, width,
                head_dim, block_size * head_dim - value_at,
            )  # fmt: skip


@inner
def _gather_scales(  # type: ignore[no-untyped-def]
    key_scales, value_scales, scales, table, length, kv_head, kv_heads, block_size, block_step, scales_at
):
    """Of a sequence's first `length` tokens, at one head. Steps and places are in bytes."""
    for start in range(0, length, block_size):
        at = (
            np.int64(table[start // block_size]) * block_step + scales_at
        ) // SCALE_BYTES + kv_head * block_size
        for j in range(start, min(start + block_size, length)):
            key_scales[j] = scales[at + j - start]
            value_scales[j] = scales[at + kv_heads * block_size + j - start]


@inner
def _attend(  # type: ignore[no-untyped-def]
    part, parts, out, q, pool, scales, block_tables, starts, lengths, num_heads, kv_heads, head_dim, block_size,
    block_step, layer_at, value_at, scale,
):  # fmt: skip
    """One part of all (kv head, row) pairs of the batch; a sequence's pairs are ordered by head, then row."""
    group = num_heads // kv_heads
    pairs = np.int64(starts[-1]) * kv_heads
    begin, end = pairs * part // parts, pairs * (part + 1) // parts
    longest = 0
    for s in range(lengths.size):
        longest = max(longest, int(lengths[s]))
    tokens = np.empty(longest, np.int64)  # where each token of the current sequence begins, in elements
    scores = np.empty(ROWS * group * longest, np.float32)
    q_rows, score_rows = np.empty(ROWS * group, np.int64), np.empty(ROWS * group, np.int64)
    scaled = longest if scales.size else 0
    key_scales, value_scales = np.empty(scaled, np.float32), np.empty(scaled, np.float32)
    for s in range(lengths.size):
        first, last, length = np.int64(starts[s]), np.int64(starts[s + 1]), np.int64(lengths[s])
        if last * kv_heads <= begin or end <= first * kv_heads:
            continue
        for start in range(0, length, block_size):
            at = np.int64(block_tables[s, start // block_size]) * block_step + layer_at
            for j in range(start, min(start + block_size, length)):
                tokens[j] = at + (j - start) * head_dim
        for kv_head in range(kv_heads):
            if scales.size:
                _gather_scales(
                    key_scales, value_scales, scales, block_tables[s], length, kv_head, kv_heads, block_size,
                    block_step, layer_at + 2 * value_at,
                )  # fmt: skip
            pair = first * kv_heads + kv_head * (last - first)  # of this head's first row
            row = first + max(begin - pair, 0)
            stop = first + min(end - pair, last - first)
            while row < stop:
                until = min(row + ROWS, stop)
                _rows_of_one_head(
                    out, q, pool, tokens, key_scales, value_scales, scores, q_rows, score_rows, row, until,
                    length - (last - until), kv_head, group, num_heads, head_dim, block_size, value_at, scale,
                )  # fmt: skip
                row = until


@compiled
def _attention(  # type: ignore[no-untyped-def]
    words, out, q, rows, pool, kind, pool_size, num_scales, block_tables, width, starts, lengths, sequences, num_heads,
    kv_heads, head_dim, block_size, block_step, layer_at, value_at, scale,
):  # fmt: skip
    real, integer = np.float32(0), np.int32(0)
    count = rows * num_heads * head_dim
    begins, contexts = array_at(starts, integer, (sequences + 1,)), array_at(lengths, integer, (sequences,))
    keys = 0
    for s in range(sequences):
        keys += int(begins[s + 1] - begins[s]) * contexts[s] * kv_heads
    parts = max(1, min(keys // PART_KEYS, rows * kv_heads))
    share(
        words, parts, _attend,
        (
            array_at(out, real, (count,)), array_at(q, real, (count,)), array_at(pool, kind, (pool_size,)),
            array_at(pool, real, (num_scales,)), array_at(block_tables, integer, (sequences, width)), begins, contexts,
            num_heads, kv_heads, head_dim, block_size, block_step, layer_at, value_at, np.float32(scale),
        ),
    )  # fmt: skip


def paged_attention(
    q: torch.Tensor, pool: Pool, layer: int, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """out[i, h] = softmax_j(scale * q[i, h] . k[j, h']) @ v[:, h'] over j up to row i's own position"""
    rows, num_heads, head_dim = q.shape
    layout = pool.layout
    out = empty(rows, num_heads, head_dim)
    if rows:
        itemsize = layout.kv_dtype.itemsize
        queries, tables = dense(q), batch.block_tables.contiguous()
        launch(
            _attention, out.data_ptr(), queries.data_ptr(), rows, pool.memory.data_ptr(), KINDS[layout.kv_dtype],
            pool.memory.numel() // itemsize, pool.memory.numel() // SCALE_BYTES if layout.quantised else 0,
            tables.data_ptr(), tables.shape[1], batch.cu_seqlens_q.data_ptr(),
            batch.context_lens.data_ptr(), tables.shape[0], num_heads, layout.num_kv_heads, head_dim,
            layout.block_size, layout.block_bytes // itemsize, layer * (layout.layer_bytes // itemsize),
            layout.num_kv_heads * layout.block_size * head_dim, scale,
        )  # fmt: skip
    return out if q.dtype is torch.float32 else out.to(q.dtype)
