"""Attention that reads keys and values where they lie in the pool, for decoding rows and prefill chunks alike.

A row's result depends on its own context alone: scores are `vector_ir.dots`, the softmax takes its maximum and sum over
exactly the row's own positions, and values are added in the order of positions.
"""

from __future__ import annotations

import numpy as np
import torch

from ..ops import AttentionBatch
from ..pool import Pool
from .arrays import as_floats, pool_array
from .compiled import compiled
from .exponential import exp
from .products import row_products
from .team import TEAM, share
from .vector_ir import LANES, add_weighted_rows, fma, largest, load, store, total

PART_KEYS = 256
"""(row, key-value head, key) triples in one part of the work: about 5 microseconds of one core."""


@compiled
def _add_values(out, out_rows, weights, weight_rows, count, pool, tokens, at, length, head_dim):  # type: ignore[no-untyped-def]
    """out[out_rows[m] + d] += sum_j weights[weight_rows[m] + j] * value j [d], for `count` query heads of one row."""
    m = 0
    while m < count:
        d = 0
        if count - m >= 3:
            outs = (out_rows[m], out_rows[m + 1], out_rows[m + 2])
            ps = (weight_rows[m], weight_rows[m + 1], weight_rows[m + 2])
            while d + 4 * LANES <= head_dim:
                columns = (d, d + LANES, d + 2 * LANES, d + 3 * LANES)
                add_weighted_rows(out, outs, weights, ps, pool, tokens, at, length, columns)
                d += 4 * LANES
            while d + LANES <= head_dim:
                add_weighted_rows(out, outs, weights, ps, pool, tokens, at, length, (d,))
                d += LANES
            m += 3
        else:
            while d + 4 * LANES <= head_dim:
                columns = (d, d + LANES, d + 2 * LANES, d + 3 * LANES)
                add_weighted_rows(
                    out, (out_rows[m],), weights, (weight_rows[m],), pool, tokens, at, length, columns
                )
                d += 4 * LANES
            while d + LANES <= head_dim:
                add_weighted_rows(
                    out, (out_rows[m],), weights, (weight_rows[m],), pool, tokens, at, length, (d,)
                )
                d += LANES
            m += 1
    for m in range(count):
        for d in range(head_dim // LANES * LANES, head_dim):
            value = np.float32(0.0)
            for j in range(length):
                value = fma(load(weights, weight_rows[m] + j), load(pool, tokens[j] + at + d), value)
            store(out, out_rows[m] + d, value)


@compiled
def _softmax(scores, start, length, scale):  # type: ignore[no-untyped-def]
    """Turn scores into exp(scale * (score - max)) in place; returns their sum."""
    top = largest(scores, start, length)
    for j in range(start, start + length):
        scores[j] = exp((scores[j] - top) * scale)
    return total(scores, start, length)


@compiled
def _attend(  # type: ignore[no-untyped-def]
    part, parts, out, q, pool, block_tables, starts, lengths, num_heads, kv_heads, head_dim,
    block_size, block_step, layer_at, value_at, scale,
):  # fmt: skip
    """One part of all pairs of (row, key-value head), row by row."""
    group = num_heads // kv_heads
    pairs = np.int64(starts[-1]) * kv_heads
    pair, last_pair = pairs * part // parts, pairs * (part + 1) // parts
    longest = 0
    for s in range(lengths.size):
        longest = max(longest, np.int64(lengths[s]))
    tokens = np.empty(longest, np.int64)  # where each token of the current sequence begins, in elements
    scores = np.empty(group * longest, np.float32)
    rows, score_rows = np.empty(group, np.int64), np.empty(group, np.int64)
    for i in range(group):
        score_rows[i] = i * longest
    for s in range(lengths.size):
        first, last, length = np.int64(starts[s]), np.int64(starts[s + 1]), np.int64(lengths[s])
        if last * kv_heads <= pair or last_pair <= first * kv_heads:
            continue
        for start in range(0, length, block_size):
            at = np.int64(block_tables[s, start // block_size]) * block_step + layer_at
            for j in range(start, min(start + block_size, length)):
                tokens[j] = at + (j - start) * head_dim
        while pair < min(last * kv_heads, last_pair):
            row, kv_head = pair // kv_heads, pair % kv_heads
            seen = length - last + row + 1
            at = kv_head * block_size * head_dim
            for i in range(group):
                head = kv_head * group + i
                rows[i] = (row * num_heads + head) * head_dim
            row_products(scores, score_rows, 0, q, rows, 0, group, pool, tokens, at, seen, head_dim)
            for i in range(group):
                weight = _softmax(scores, score_rows[i], seen, scale)
                for j in range(score_rows[i], score_rows[i] + seen):
                    scores[j] /= weight
                for d in range(rows[i], rows[i] + head_dim):
                    store(out, d, np.float32(0.0))
            _add_values(out, rows, scores, score_rows, group, pool, tokens, at + value_at, seen, head_dim)
            pair += 1


@compiled
def _attention(  # type: ignore[no-untyped-def]
    words, part_keys, out, q, pool, block_tables, starts, lengths, num_heads, kv_heads, head_dim,
    block_size, block_step, layer_at, value_at, scale,
):  # fmt: skip
    keys = 0
    for s in range(lengths.size):
        keys += np.int64(starts[s + 1] - starts[s]) * lengths[s] * kv_heads
    parts = max(1, min(keys // part_keys, np.int64(starts[-1]) * kv_heads))
    share(
        words, parts, _attend,
        (
            out, q, pool, block_tables, starts, lengths, num_heads, kv_heads, head_dim,
            block_size, block_step, layer_at, value_at, scale,
        ),
    )  # fmt: skip


def paged_attention(
    q: torch.Tensor, pool: Pool, layer: int, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """out[i, h] = softmax_j(scale * q[i, h] . k[j, h']) @ v[:, h'] over j up to row i's own position"""
    rows, num_heads, head_dim = q.shape
    layout = pool.layout
    out = torch.empty((rows, num_heads, head_dim), dtype=torch.float32)
    if rows == 0:
        return out.to(q.dtype)
    itemsize = layout.kv_dtype.itemsize
    _attention(
        TEAM.words, PART_KEYS, out.numpy(), as_floats(q), pool_array(pool, layout.kv_dtype),
        batch.block_tables.numpy(), batch.cu_seqlens_q.numpy(), batch.context_lens.numpy(), num_heads,
        layout.num_kv_heads, head_dim, layout.block_size, layout.block_bytes // itemsize,
        layer * (layout.layer_bytes // itemsize), layout.num_kv_heads * layout.block_size * head_dim,
        np.float32(scale),
    )  # fmt: skip
    return out if q.dtype == torch.float32 else out.to(q.dtype)
