"""Keys and values as int8 codes with a scale for each token and head: written, and attended to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heddle.kernels import cpu, reference, triton
from heddle.kernels.ops import AttentionBatch, Ops
from heddle.kernels.pool import Pool, PoolLayout

from .test_attention import RAGGED
from .test_rope import angles, rotated

Case = Callable[..., Any]
Check = Callable[..., None]
INT8 = {"kv_dtype": torch.int8}


def dequantised(case: Any, which: int) -> torch.Tensor:
    """What the step's slots of K (0) or V (1) hold: float64 [T, Hk, D]."""
    size = case.pool.layout.block_size
    block, offset = case.batch.slot_mapping // size, case.batch.slot_mapping % size
    codes = case.pool.kv(case.layer)[which][block, :, offset]
    return codes.double() * case.pool.kv_scales(case.layer)[which][block, :, offset].double().unsqueeze(-1)


def write(ops: Ops, case: Any, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    angle = angles(case.q.shape[2])
    return ops.rope_and_write_kv(
        case.q, k, v, case.positions, angle.cos().float(), angle.sin().float(), case.pool, case.layer,
        case.batch.slot_mapping,
    )  # fmt: skip


@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 8), (64, 16), (80, 64)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (6, 1)])
def test_attention_is_that_over_the_dequantised_values(
    ops: Ops, attention_case: Case, check: Check, head_dim: int, block_size: int, heads: int, kv_heads: int
) -> None:
    case = attention_case(
        RAGGED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, **INT8
    )
    scale = head_dim**-0.5
    check(ops.paged_attention(case.q, case.pool, case.layer, case.batch, scale), case.expected(scale))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_16_bit_activations_and_small_values(
    ops: Ops, attention_case: Case, check: Check, dtype: torch.dtype, size: float
) -> None:
    """Values of a thousandth have scales that times a weight would be no normal number in float16."""
    case = attention_case(RAGGED, head_dim=64, dtype=dtype, **INT8)
    for scales in case.pool.kv_scales(case.layer):
        scales *= size
    for context in (*case.keys, *case.values):
        context *= size
    got = ops.paged_attention(case.q, case.pool, case.layer, case.batch, 0.125)
    assert got.dtype == dtype
    check(got, case.expected(0.125))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 8), (64, 16), (12, 64)])
def test_writes_the_nearest_codes_into_its_slots_and_nothing_else(
    ops: Ops, attention_case: Case, check: Check, dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    case = attention_case(
        [(0, 9), (12, 1), (0, 0), (5, 3)],
        heads=6, kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=dtype, **INT8,
    )  # fmt: skip
    before = case.pool.memory.clone()
    fused = torch.cat([t.flatten(1) for t in (case.q, case.k, case.v)], dim=1)
    sizes = [6 * head_dim, 2 * head_dim, 2 * head_dim]
    case.q, k, v = (t.unflatten(1, (-1, head_dim)) for t in fused.split(sizes, dim=1))  # strided views
    angle = angles(head_dim)[case.positions]
    check(write(ops, case, k, v), rotated(case.q, angle))
    for which, given in enumerate((rotated(k, angle), v.double())):
        largest = given.abs().amax(dim=-1)
        error = (dequantised(case, which) - given).abs().amax(dim=-1)
        assert (error <= largest / 127 * 0.5001).all(), "within half a step"
        kept = dequantised(case, which).abs().amax(dim=-1)
        assert ((kept - largest).abs() <= 1e-6 * largest).all(), "the largest is exact"
    block, offset = case.batch.slot_mapping // block_size, case.batch.slot_mapping % block_size
    after = case.pool.memory.clone()
    for memory in (before, after):
        case.pool.memory.copy_(memory)
        for codes, scales in zip(case.pool.kv(case.layer), case.pool.kv_scales(case.layer)):
            codes[block, :, offset] = 0
            scales[block, :, offset] = 0
        memory.copy_(case.pool.memory)
    assert torch.equal(after, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("implementation", [reference, triton])
def test_codes_and_scales_are_torch_s_to_the_last_bit(
    implementation: Ops, attention_case: Case, dtype: torch.dtype
) -> None:
    """Largest value / 127, and the nearest code of value * (127 / largest value); many 16 bit values lie at a tie."""
    case = attention_case([(0, 128)], heads=2, kv_heads=2, head_dim=64, dtype=dtype, **INT8)
    angle = angles(64)
    cos, sin = (table.float()[case.positions].unsqueeze(1) for table in (angle.cos(), angle.sin()))
    a, b = case.k.float().split(32, dim=2)
    keys = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=2)
    write(implementation, case, case.k, case.v)
    size = case.pool.layout.block_size
    block, offset = case.batch.slot_mapping // size, case.batch.slot_mapping % size
    for which, given in enumerate((keys, case.v.float())):
        largest = given.abs().amax(dim=-1)
        codes = (given * (127 / largest).unsqueeze(-1)).round().to(torch.int8)
        assert torch.equal(case.pool.kv(case.layer)[which][block, :, offset], codes)
        assert torch.equal(case.pool.kv_scales(case.layer)[which][block, :, offset], largest / 127)


def test_zeros_specks_and_what_is_no_number(ops: Ops, attention_case: Case) -> None:
    case = attention_case([(0, 6)], **INT8)
    v = case.v
    v[0] = 0.0
    v[1] = 1e-37
    v[2, 0, 3] = float("nan")
    v[3, 1, 7] = float("-inf")
    v[4] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 3.25])
    write(ops, case, case.k, v)
    found = dequantised(case, 1)
    assert (found[:2] == 0).all()
    assert found[2, 0].isnan().all()
    assert torch.isfinite(found[2, 1]).all()
    assert found[3, 1].isnan().all()
    assert torch.isfinite(found[3, 0]).all()
    assert found[4].tolist() == [[127.0, 0.0, 2.0, 2.0, 0.0, -2.0, -126.0, 3.0]] * 2, "ties to even"


def test_nan_in_one_sequence_or_later_row_stays_there(ops: Ops, attention_case: Case) -> None:
    case = attention_case([(6, 1), (3, 4), (9, 1)], **INT8)
    slot = int(case.batch.slot_mapping[3])  # third of the four rows of the second sequence
    for scales in case.pool.kv_scales(case.layer):
        scales[slot // 8, :, slot % 8] = float("nan")
    out = ops.paged_attention(case.q, case.pool, case.layer, case.batch, 0.35)
    assert torch.isfinite(out[[0, 1, 2, 5]]).all()
    assert out[3:5].isnan().all()


@pytest.mark.parametrize("implementation", [cpu, triton])
def test_bits_do_not_depend_on_chunks(attention_case: Case, implementation: Ops) -> None:
    case = attention_case([(250, 9), (5, 9)], heads=2, kv_heads=1, head_dim=16, **INT8)
    whole = implementation.paged_attention(case.q, case.pool, case.layer, case.batch, 0.25)
    for row in (0, 5, 6, 8):
        batch = AttentionBatch(
            block_tables=case.batch.block_tables[:1].clone(),
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=torch.tensor([251 + row], dtype=torch.int32),
            slot_mapping=case.batch.slot_mapping[:1],
            max_query_len=1,
        )
        alone = implementation.paged_attention(case.q[row : row + 1], case.pool, case.layer, batch, 0.25)
        assert torch.equal(alone[0], whole[row]), row


def test_what_a_block_takes() -> None:
    """K and V of 8 heads of 128 in 16 tokens: a byte a value and four for each token and head."""
    layout = PoolLayout(32, 8, 128, 16, torch.int8)
    assert layout.layer_bytes == 2 * 8 * 16 * (128 + 4)
    assert PoolLayout(32, 8, 128, 16, torch.float16).layer_bytes == 2 * 8 * 16 * 128 * 2
    pool = Pool(PoolLayout(2, 3, 8, 4, torch.int8), 5)
    assert [view.shape for view in pool.kv_scales(1)] == [(5, 3, 4)] * 2
