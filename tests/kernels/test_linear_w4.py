"""Linear layers with packed 4 and 8 bit weights, against float64 arithmetic on codes drawn one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from heddle.kernels import cpu, triton
from heddle.kernels.ops import Ops
from heddle.kernels.packed_weight import PackedWeight, pack, unpack

Check = Callable[..., None]
SHAPES = [
    (1, 16, 16),
    (3, 32, 16),
    (8, 96, 32),
    (25, 144, 64),
    (31, 576, 576),
    (72, 1536, 128),
    (100, 64, 64),
]
"""(N, K, group size): the last group of some is short; N beside multiples of every tile."""


def layer(
    n: int, k: int, group_size: int, bits: int, *, ordered: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[PackedWeight, torch.Tensor]:
    """A random weight, and what it stands for: float64 [N, K]."""
    groups = -(-k // group_size)
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, 2**bits, (n, groups), dtype=torch.uint8)
    scales = (torch.rand(n, groups) / 2**bits + 1e-3).to(dtype)
    order = torch.randperm(k) if ordered else None
    octets = codes.clone()
    if bits == 4:
        octets = torch.zeros(n, k // 2, dtype=torch.uint8)
        for j in range(k):
            octets[:, j // 16 * 8 + j % 8] |= codes[:, j] << (4 if j % 16 >= 8 else 0)
    wide = torch.zeros(n, k, dtype=torch.float64)
    for j in range(k):
        g = j // group_size
        place = j if order is None else int(order[j])
        wide[:, place] = (codes[:, j].double() - zeros[:, g].double()) * scales[:, g].double()
    return PackedWeight(octets, scales, zeros, order, bits, group_size), wide


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_products_are_those_of_the_values_stood_for(
    ops: Ops, check: Check, bits: int, n: int, k: int, group_size: int
) -> None:
    for ordered in (False, True):
        weight, wide = layer(n, k, group_size, bits, ordered=ordered)
        for rows in (0, 1, 17) if ops is triton else (0, 1, 2, 3, 5, 17):  # Triton's tile is of 16 rows
            x, bias = torch.randn(rows, k), torch.randn(n)
            check(ops.linear_w4(x, ops.hold_packed(weight), None), x.double() @ wide.T, 2.0)
            check(ops.linear_w4(x, ops.hold_packed(weight), bias), x.double() @ wide.T + bias.double(), 2.0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scales_and_activations_of_every_float_type(
    ops: Ops, check: Check, bits: int, dtype: torch.dtype
) -> None:
    weight, wide = layer(40, 192, 64, bits, dtype=dtype)
    x = torch.randn(5, 192)
    check(ops.linear_w4(x, ops.hold_packed(weight), None), x.double() @ wide.T, 2.0)
    narrow, bias = x.to(dtype), torch.randn(40).to(dtype)
    got = ops.linear_w4(narrow, ops.hold_packed(weight), bias)
    assert got.dtype == dtype
    check(got, narrow.double() @ wide.T + bias.double(), 2.0)


@pytest.mark.parametrize("bits", [4, 8])
def test_values_are_exact_in_every_code_zero_and_lane(ops: Ops, bits: int) -> None:
    """Unit rows read single weights: all codes against all zeros, no rounding anywhere."""
    levels = 2**bits
    n, k = levels, max(levels, 16)
    codes = torch.arange(levels, dtype=torch.uint8).repeat(n, k // levels)
    zeros = torch.arange(n, dtype=torch.uint8).unsqueeze(1)
    weight = PackedWeight(pack(codes, bits), torch.full((n, 1), 0.25), zeros, None, bits, k)
    assert torch.equal(unpack(weight.codes, bits), codes)
    want = (codes.float() - zeros.float()) * 0.25
    assert torch.equal(weight.values(), want)
    assert torch.equal(ops.linear_w4(torch.eye(k), ops.hold_packed(weight), None), want.T)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group_size"), [*SHAPES, (5000, 208, 16)])
def test_a_weight_in_panels_stands_for_the_same_values(bits: int, n: int, k: int, group_size: int) -> None:
    weight, _ = layer(n, k, group_size, bits, ordered=True, dtype=torch.float16)
    held = cpu.hold_packed(weight)
    assert torch.equal(held.values(), weight.values())
    assert (held.out_features, held.in_features) == (n, k)


def test_only_half_a_byte_a_weight_is_held_in_4_bit() -> None:
    weight, _ = layer(64, 512, 64, 4, dtype=torch.float16)
    for held in (weight, cpu.hold_packed(weight)):
        assert held.nbytes / (64 * 512) == 0.5 + (2 + 1) / 64
    assert (weight.out_features, weight.in_features) == (64, 512)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group_size"), [(25, 64, 16), (72, 576, 64), (600, 96, 96)])
def test_bits_of_a_row_do_not_depend_on_its_company(bits: int, n: int, k: int, group_size: int) -> None:
    weight, _ = layer(n, k, group_size, bits, ordered=True)
    bias, x = torch.randn(n), torch.randn(40, k)
    weight = cpu.hold_packed(weight)
    alone = torch.cat([cpu.linear_w4(row, weight, bias) for row in x.split(1)])
    for rows in range(1, 41):
        assert torch.equal(cpu.linear_w4(x[:rows], weight, bias), alone[:rows]), rows
        assert torch.equal(cpu.linear_w4(x[40 - rows :], weight, bias), alone[40 - rows :]), rows
    order = torch.randperm(40)
    assert torch.equal(cpu.linear_w4(x[order], weight, bias), alone[order])


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    weight, _ = layer(600, 304, 16, 4)
    weight, x = cpu.hold_packed(weight), torch.randn(9, 304)
    before = torch.get_num_threads()
    try:
        cpu.set_num_threads(1)
        alone = cpu.linear_w4(x, weight, None)
        cpu.set_num_threads(64)
        assert torch.equal(cpu.linear_w4(x, weight, None), alone)
    finally:
        cpu.set_num_threads(before)


@pytest.mark.parametrize("rows", [2, 6, 40])
def test_nan_in_one_row_stays_there(ops: Ops, rows: int) -> None:
    weight, _ = layer(40, 96, 32, 4, ordered=True)
    x = torch.randn(rows, 96)
    x[1, 3] = float("nan")
    y = ops.linear_w4(x, ops.hold_packed(weight), None)
    assert y[1].isnan().all()
    assert torch.isfinite(y[[0, *range(2, rows)]]).all()


def test_rows_that_are_a_slice_of_wider_ones(ops: Ops, check: Check) -> None:
    weight, wide = layer(32, 64, 32, 4)
    x = torch.randn(6, 200)[:, 40:104]
    check(ops.linear_w4(x, ops.hold_packed(weight), None), x.double() @ wide.T, 2.0)
