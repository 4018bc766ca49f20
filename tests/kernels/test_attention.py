"""Paged attention over shuffled blocks, against float64 on the contexts kept aside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heddle.kernels import cpu
from heddle.kernels.ops import AttentionBatch, Ops

Case = Callable[..., Any]
Check = Callable[..., None]
RAGGED = [(0, 5), (7, 1), (0, 0), (30, 1), (0, 1), (3, 20), (16, 16), (63, 2)]
"""(tokens before, rows now): prefill, decode, nothing, chunks that begin and end within a block and at its edge."""


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 2), (6, 1)])
def test_ragged_batches(
    ops: Ops, attention_case: Case, check: Check, block_size: int, head_dim: int, heads: int, kv_heads: int
) -> None:
    case = attention_case(RAGGED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
    scale = head_dim**-0.5
    check(ops.paged_attention(case.q, case.pool, case.layer, case.batch, scale), case.expected(scale))


@pytest.mark.parametrize("head_dim", [4, 12, 36, 80])
def test_head_sizes_beside_the_vector_width(
    ops: Ops, attention_case: Case, check: Check, head_dim: int
) -> None:
    case = attention_case(RAGGED, heads=6, kv_heads=2, head_dim=head_dim)
    check(ops.paged_attention(case.q, case.pool, case.layer, case.batch, 0.3), case.expected(0.3))


@pytest.mark.parametrize("lengths", [[], [(0, 0)], [(0, 1)], [(12, 1)], [(0, 0), (5, 1), (0, 0)]])
def test_empty_and_single(
    ops: Ops, attention_case: Case, check: Check, lengths: list[tuple[int, int]]
) -> None:
    case = attention_case(lengths)
    check(ops.paged_attention(case.q, case.pool, case.layer, case.batch, 0.5), case.expected(0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_16_bit_caches_and_activations(
    ops: Ops, attention_case: Case, check: Check, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """The cache's rounding is in the expected values already: the rest is of the activations' dtype."""
    case = attention_case(RAGGED, head_dim=64, dtype=dtype, kv_dtype=kv_dtype)
    got = ops.paged_attention(case.q, case.pool, case.layer, case.batch, 0.125)
    assert got.dtype == dtype
    check(got, case.expected(0.125))


def test_large_scores_do_not_overflow(ops: Ops, attention_case: Case, check: Check) -> None:
    case = attention_case([(20, 3)])
    case.q *= 1000.0
    check(ops.paged_attention(case.q, case.pool, case.layer, case.batch, 1.0), case.expected(1.0), slack=50)


def test_nan_in_one_sequence_or_later_row_stays_there(ops: Ops, attention_case: Case) -> None:
    case = attention_case([(6, 1), (3, 4), (9, 1)])
    key_cache, value_cache = case.pool.kv(case.layer)
    slot = int(case.batch.slot_mapping[3])  # third of the four rows of the second sequence
    key_cache[slot // 8, :, slot % 8] = float("nan")
    value_cache[slot // 8, :, slot % 8] = float("nan")
    out = ops.paged_attention(case.q, case.pool, case.layer, case.batch, 0.35)
    assert torch.isfinite(out[[0, 1, 2, 5]]).all()
    assert out[3:5].isnan().all()


def test_bits_do_not_depend_on_chunks_or_neighbours(attention_case: Case) -> None:
    """One prefill, the same context row by row, in chunks, and among other sequences: equal bits."""
    case = attention_case([(0, 40), (11, 1), (5, 9)], heads=9, kv_heads=3, head_dim=64)
    whole = cpu.paged_attention(case.q, case.pool, case.layer, case.batch, 0.125)
    starts = case.batch.cu_seqlens_q.tolist()
    for s, length in enumerate(case.batch.context_lens.tolist()):
        rows = starts[s + 1] - starts[s]
        for chunk in (1, 2, 3, 7, rows):
            for first in range(0, rows, chunk):
                last = min(first + chunk, rows)
                batch = AttentionBatch(
                    block_tables=case.batch.block_tables[s : s + 1].clone(),
                    cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32),
                    context_lens=torch.tensor([length - rows + last], dtype=torch.int32),
                    slot_mapping=torch.empty(0, dtype=torch.int64),
                )
                q = case.q[starts[s] + first : starts[s] + last].clone()
                part = cpu.paged_attention(q, case.pool, case.layer, batch, 0.125)
                assert torch.equal(part, whole[starts[s] + first : starts[s] + last]), (s, chunk, first)


def test_bits_do_not_depend_on_block_ids_or_block_size(attention_case: Case) -> None:
    results = []
    for block_size in (8, 16, 64, 8):
        torch.manual_seed(block_size)  # other block ids
        case = attention_case([(50, 3)], head_dim=64, block_size=block_size)
        torch.manual_seed(7)
        key_cache, value_cache = case.pool.kv(case.layer)
        table = case.batch.block_tables[0].long()
        keys, values, q = torch.randn(53, 2, 64), torch.randn(53, 2, 64), torch.randn(3, 4, 64)
        for j in range(53):
            key_cache[table[j // block_size], :, j % block_size] = keys[j]
            value_cache[table[j // block_size], :, j % block_size] = values[j]
        results.append(cpu.paged_attention(q, case.pool, case.layer, case.batch, 0.125))
    assert all(torch.equal(result, results[0]) for result in results)
