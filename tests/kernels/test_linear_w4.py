"""Linear layers with packed 4 and 8 bit weights, against float64 arithmetic on codes drawn one by one."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from heddle.kernels import cpu, triton
from heddle.kernels.cpu import digits
from heddle.kernels.ops import W8A8_MAX_K, Ops
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


@pytest.fixture
def in_float(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """`linear_w4` as on a processor without AVX512-VNNI."""

    def linear(*arguments: object) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(importlib.import_module("heddle.kernels.cpu.linear_w4"), "X86_DIGITS", False)
            return cpu.linear_w4(*arguments)  # type: ignore[arg-type]

    return linear


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_products_without_vnni(
    in_float: Callable[..., torch.Tensor], check: Check, bits: int, n: int, k: int, group_size: int
) -> None:
    weight, wide = layer(n, k, group_size, bits)
    held, bias, x = cpu.hold_packed(weight), torch.randn(n), torch.randn(17, k)
    got = in_float(x, held, bias)
    check(got, x.double() @ wide.T + bias.double(), 2.0)
    assert torch.equal(torch.cat([in_float(row, held, bias) for row in x.split(5)]), got)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38, 1e-35])
@pytest.mark.parametrize("rows", [1, 2, 3, 70])
def test_rows_without_a_fixed_point_form_are_multiplied_in_float32(
    in_float: Callable[..., torch.Tensor], bits: int, value: float, rows: int
) -> None:
    """With the bits of other processors, and nothing of it in the other rows."""
    weight, _ = layer(40, 96, 32, bits)
    held, x, bias = cpu.hold_packed(weight), torch.randn(rows, 96), torch.randn(40)
    before = cpu.linear_w4(x, held, bias)
    for place in range(0, rows, 3):
        changed = x.clone()
        if abs(value) < 1:
            changed[place] = 0
        changed[place, 5] = value
        got, want = cpu.linear_w4(changed, held, bias), in_float(changed, held, bias)
        torch.testing.assert_close(got[place], want[place], rtol=0, atol=0, equal_nan=True)
        others = torch.arange(rows) != place
        assert torch.equal(got[others], before[others])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1e-29, 1e-3, 1.99, 1e4, 1e29])
def test_rows_of_every_size(check: Check, bits: int, size: float) -> None:
    weight, wide = layer(40, 96, 32, bits)
    x = (torch.rand(5, 96) * 2 - 1) * size
    x[0, 7], x[1, 8], x[2] = size, -size, 0
    got, want = cpu.linear_w4(x, cpu.hold_packed(weight), None), x.double() @ wide.T
    for row, expected in zip(got, want, strict=True):
        check(row, expected, 2.0)
    assert (got[2] == 0).all()


def test_scales_of_every_size_over_rows_of_every_size(check: Check) -> None:
    """What is put together of digits is far larger than what it stands for: it must not overflow."""
    for scale, size in ((1e37, 1e-29), (1e-38, 1e29), (1e-30, 1e29)):
        weight, _ = layer(24, 64, 32, 4)
        weight.scales.fill_(scale)
        wide, x = weight.values().double(), (torch.rand(3, 64) * 2 - 1) * size
        check(cpu.linear_w4(x, cpu.hold_packed(weight), None), x.double() @ wide.T, 2.0)


@pytest.mark.skipif(not digits.X86_DIGITS, reason="sums in float32 round, and overflow nowhere near")
@pytest.mark.parametrize("code", [0, 255])
def test_sums_of_the_largest_numbers(code: int) -> None:
    k = W8A8_MAX_K // 32 * 16
    zeros = torch.full((8, 1), 255 - code, dtype=torch.uint8)
    codes = torch.full((8, k), code, dtype=torch.uint8)
    held = cpu.hold_packed(PackedWeight(codes, torch.ones(8, 1), zeros, None, 8, k))
    for value in (1.9, -2.0):
        want = torch.tensor(value).double() * (2 * code - 255) * k
        got = cpu.linear_w4(torch.full((1, k), value), held, None)[0]
        torch.testing.assert_close(got.double(), want.expand(8), rtol=3e-7, atol=0)
