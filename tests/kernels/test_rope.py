"""Rotary embedding and the write of keys and values into the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heddle.kernels.ops import Ops

Case = Callable[..., Any]
Check = Callable[..., None]


def angles(head_dim: int, positions: int = 128) -> torch.Tensor:
    """float64 [positions, D / 2]"""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)


def rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """The halves of each head as the parts of complex numbers, turned by the angles: float64."""
    a, b = x.double().chunk(2, dim=-1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 8), (64, 16), (12, 64)])
def test_rotates_and_writes_only_its_slots(
    ops: Ops,
    attention_case: Case,
    check: Check,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    block_size: int,
) -> None:
    case = attention_case(
        [(0, 9), (12, 1), (0, 0), (5, 3)],
        heads=6, kv_heads=2, head_dim=head_dim, block_size=block_size, kv_dtype=kv_dtype, dtype=dtype,
    )  # fmt: skip
    angle = angles(head_dim)
    before = case.pool.memory.clone()
    fused = torch.cat([t.flatten(1) for t in (case.q, case.k, case.v)], dim=1)
    sizes = [6 * head_dim, 2 * head_dim, 2 * head_dim]
    q, k, v = (t.unflatten(1, (-1, head_dim)) for t in fused.split(sizes, dim=1))  # strided views
    got = ops.rope_and_write_kv(
        q, k, v, case.positions, angle.cos().float(), angle.sin().float(), case.pool, case.layer,
        case.batch.slot_mapping,
    )  # fmt: skip
    assert got.dtype == dtype
    check(got, rotated(q, angle[case.positions]))
    key_cache, value_cache = case.pool.kv(case.layer)
    block, offset = case.batch.slot_mapping // block_size, case.batch.slot_mapping % block_size
    written = key_cache[block, :, offset]
    assert written.dtype == kv_dtype
    rounding = 1.0 if kv_dtype == torch.float32 or dtype == torch.float32 else 2.0  # rounded twice
    if dtype == torch.float32 or kv_dtype != torch.float32:
        check(written, rotated(k, angle[case.positions]), slack=rounding)
    assert torch.equal(value_cache[block, :, offset], v.to(kv_dtype))

    for cache in case.pool.kv(case.layer):  # everything else is as it was
        cache.view(torch.uint8)[block, :, offset] = 0
    after = case.pool.memory.clone()
    case.pool.memory.copy_(before)
    for cache in case.pool.kv(case.layer):
        cache.view(torch.uint8)[block, :, offset] = 0
    assert torch.equal(after, case.pool.memory)


def test_half_rounding_of_special_values(ops: Ops, attention_case: Case) -> None:
    """Values that round, overflow, vanish or are NaN go into a 16-bit cache as torch rounds them."""
    for kv_dtype in (torch.float16, torch.bfloat16):
        case = attention_case([(0, 2)], kv_dtype=kv_dtype)
        odd = torch.tensor(
            [1.00048828125, 1.00390625, 1.01171875, 70000.0, -1e-8, 6e-8, 3.4e38, float("inf")]
        )
        case.v[0, 0], case.v[0, 1] = odd, -odd
        case.v[1, 0] = float("nan")
        one, zero = torch.ones(128, 4), torch.zeros(128, 4)
        ops.rope_and_write_kv(
            case.q, case.k, case.v, case.positions, one, zero, case.pool, case.layer, case.batch.slot_mapping
        )
        slots = case.batch.slot_mapping
        written = case.pool.kv(case.layer)[1][slots // 8, :, slots % 8]
        assert torch.equal(written[0], case.v[0].to(kv_dtype))
        assert written[1, 0].isnan().all()
        assert torch.equal(written[1, 1], case.v[1, 1].to(kv_dtype))


def test_no_rows(ops: Ops, attention_case: Case) -> None:
    case = attention_case([])
    before = case.pool.memory.clone()
    table = torch.zeros(4, 4)
    got = ops.rope_and_write_kv(
        case.q, case.k, case.v, case.positions, table, table, case.pool, 0, case.batch.slot_mapping
    )
    assert got.shape == (0, 4, 8)
    assert torch.equal(case.pool.memory, before)
