"""Blocks beyond the 2^31st element of the pool: places are computed in 64 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from heddle.kernels.ops import Ops
from heddle.kernels.pool import ROW_ALIGN, Pool

from .test_attention import RAGGED
from .test_rope import angles

Case = Callable[..., Any]
Check = Callable[..., None]


def behind(pool: Pool, elements: int) -> tuple[Pool, int]:
    """A pool with the same contents behind so many elements, whose memory is never touched; how many blocks those
    are."""
    layout = pool.layout
    first = -(-elements * layout.kv_dtype.itemsize // layout.block_bytes)
    large = Pool(layout, first + pool.num_blocks)
    large.memory[first:] = pool.memory
    return large, first


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8])
def test_attention_and_the_cache_write(
    ops: Ops, attention_case: Case, check: Check, kv_dtype: torch.dtype
) -> None:
    case = attention_case(RAGGED[:5], head_dim=64, block_size=64, kv_dtype=kv_dtype)
    small = ops.paged_attention(case.q, case.pool, case.layer, case.batch, 0.125)
    pool, first = behind(case.pool, 2**31)
    batch = replace(
        case.batch,
        block_tables=case.batch.block_tables + first,
        slot_mapping=case.batch.slot_mapping + first * 64,
    )
    large = ops.paged_attention(case.q, pool, case.layer, batch, 0.125)
    assert torch.equal(large, small)
    check(large, case.expected(0.125))
    angle = angles(64)
    for memory, slots in ((case.pool, case.batch.slot_mapping), (pool, batch.slot_mapping)):
        ops.rope_and_write_kv(
            case.q, case.k, case.v, case.positions, angle.cos().float(), angle.sin().float(), memory, case.layer, slots
        )  # fmt: skip
    assert torch.equal(pool.memory[first:], case.pool.memory)


def test_adapters(ops: Ops, lora_case: Case, check: Check) -> None:
    case = lora_case(
        [(0, [1, 3]), (1, [0])], [{0: 5}, {0: 2}], {0: (40, 100)}, dtype=torch.float16
    )  # of 2 bytes an element: as many elements as the pool has, twice
    pool, first = behind(case.pool, 2**30)
    tables = case.lora.tables
    shifted = replace(tables, rows=tables.rows + first * pool.layout.block_bytes // ROW_ALIGN)
    out, x = torch.randn(4, 40), torch.randn(4, 100)
    got = out.clone()
    ops.add_lora(got, x, pool, case.layer, [0], [0, 40], replace(case.lora, tables=shifted))
    check(got, case.expected(out, x, [0], [0, 40]))
