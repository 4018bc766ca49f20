"""Rows as digits in base 256, and linear layers over int8 weights whose rows are fixed-point numbers of three."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numba
import numpy as np
import pytest
import torch
from heddle.kernels import cpu
from heddle.kernels.cpu import digits, linears, panels
from heddle.kernels.ops import W8A8_MAX_K

Check = Callable[..., None]
pytestmark = pytest.mark.skipif(not digits.X86_DIGITS, reason="this processor has no AVX512-VNNI")
MODULE = importlib.import_module("heddle.kernels.cpu.linear_int8")
INFINITE, NAN = float("inf"), float("nan")


@numba.njit
def row_bytes(k):  # type: ignore[no-untyped-def]
    return digits.digit_step(k, k)


@numba.njit
def finish(rows, k):  # type: ignore[no-untyped-def]
    for row in rows:
        digits.finish_row(row, k, np.int32(row[:k].sum()))


def in_rows(numbers: np.ndarray) -> np.ndarray:
    """Digits [rows, k] as the kernels read them, flat; beyond k lies nothing that counts."""
    rows, k = numbers.shape
    codes = np.full((rows, row_bytes(k)), 77, np.int8)
    codes[:, :k] = numbers
    finish(codes, k)
    return codes.ravel()


def weights(n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """[n, k] and the same in panels, tiled, flat."""
    matrix = np.random.default_rng(k).integers(-128, 128, (n, k)).astype(np.int8)
    return matrix, cpu.hold(torch.from_numpy(matrix.copy())).values.numpy().ravel().view(np.uint8)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7, 8, 31, 100])
@pytest.mark.parametrize("rows", range(1, panels.ROWS + 1))
def test_products_of_rows_of_one_digit(rows: int, k: int) -> None:
    products = panels.panel_products

    @numba.njit
    def tile(out, x, w, step, count, k):  # type: ignore[no-untyped-def]
        products(out, out.size // rows, x, 0, step, rows, w, 0, count, k, 0)

    for count in (2, 4, 14, 26):
        x = np.random.default_rng(count).integers(-128, 128, (rows, k))
        matrix, held = weights(8 * count, k)
        out = np.full(rows * 8 * count, -1, np.float32)
        tile(out, in_rows(x), held, row_bytes(k), count, k)
        assert (out.reshape(rows, -1) == x @ matrix.astype(np.int64).T).all()
    assert "llvm.x86.avx512.vpdpbusd.512" in next(iter(tile.inspect_llvm().values()))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 31, 100])
def test_products_of_fixed_point_numbers_are_rounded_twice(k: int) -> None:
    """The sum of what the two last digits stand for, and all of it."""
    products, most = digits.fixed_point_products, digits.TILE_ROWS // digits.DIGITS

    @numba.njit
    def tile(out, x, w, step, rows, count, k):  # type: ignore[no-untyped-def]
        products(out, out.size // rows, x, 1, step, rows, w, 0, count, k, 0)

    for rows in range(1, most + 1):
        for count in (2, 4, 14):
            each = np.random.default_rng(count).integers(-128, 128, (rows + 1, digits.DIGITS, k))
            each[:, 0] //= 2 ** np.minimum(np.arange(k), 8)  # sums whose first digits cancel or are nothing
            x = (each * np.array([65536, 256, 1])[:, None]).sum(1)
            matrix, held = weights(8 * count, k)
            out = np.full(rows * 8 * count, -1, np.float32)
            tile(out, in_rows(each.reshape(-1, k)), held, row_bytes(k), rows, count, k)
            want = x[1:] @ matrix.astype(np.int64).T
            low = (each[1:, 1:] * np.array([256, 1])[:, None]).sum(1) @ matrix.astype(np.int64).T
            bound = (np.abs(want) + np.abs(low)) * 2.0**-24
            assert (np.abs(out.reshape(rows, -1) - want) <= bound).all()


def largest_magnitudes() -> list[float]:
    """On both sides of where the first digit of a number would overflow, at powers of two and far out."""
    edges = [np.float32(2 - 2.0**-7), np.float32((127 * 65793 + 0.5) * 2**-22)]
    beside = [np.nextafter(edge, np.float32(side)) for edge in edges for side in (0, edge, 2)]
    return [
        1.0,
        *map(float, beside),
        float(np.nextafter(np.float32(2), np.float32(0))),
        1.5e30,
        1e30,
        1e34,
        1e-30,
        1e-38,
        1e-44,
    ]


@pytest.mark.parametrize("largest", largest_magnitudes())
@pytest.mark.parametrize("sign", [-1, 1])
def test_rows_of_every_size(check: Check, largest: float, sign: int) -> None:
    weight = torch.randint(-127, 128, (40, 100), dtype=torch.int8)
    scale = torch.rand(40) / 127 if largest < 1e30 else torch.full((40,), 2.0**-20)
    x = (torch.rand(5, 100) * 2 - 1) * largest
    x[:, 7] = sign * largest
    x[1, 7], x[2], x[3, :50] = 0, 0, 0
    want = x.double() @ weight.double().T * scale.double()
    got = cpu.linear_int8(x, cpu.hold(weight), scale, None)
    for row, expected in zip(got, want, strict=True):
        if expected.abs().max() > 1e-30:
            check(row, expected)
        else:  # near float32's least
            torch.testing.assert_close(row.double(), expected, rtol=0, atol=2e-43)
    assert (got[2] == 0).all()


def test_a_value_far_below_its_rows_largest_counts_as_in_float32(check: Check) -> None:
    """Where the largest value's weights are zero the small ones are what is left."""
    weight = torch.randint(-127, 128, (24, 64), dtype=torch.int8)
    weight[:, 3] = 0
    x = torch.randn(4, 64)
    x[:, 3] = 1000
    got = cpu.linear_int8(x, cpu.hold(weight.clone()), torch.ones(24), None)
    check(got, x.double() @ weight.double().T, slack=1000 * 2**-23 / 2e-6)


@pytest.mark.parametrize("value", [INFINITE, -INFINITE, NAN, 3e38])
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
def test_rows_without_a_scale_are_multiplied_in_float32(value: float, rows: int) -> None:
    """The same bits as where there is no such instruction, and nothing of it in the other rows."""
    weight, scale, bias = (
        torch.randint(-127, 128, (40, 33), dtype=torch.int8),
        torch.rand(40),
        torch.randn(40),
    )
    held, x = cpu.hold(weight), torch.randn(rows, 33)
    before = cpu.linear_int8(x, held, scale, bias)
    for place in range(rows):
        changed = x.clone()
        changed[place, 5] = value
        got, want = (
            cpu.linear_int8(changed, held, scale, bias),
            linears.linear_scaled(changed, held, scale, bias),
        )
        torch.testing.assert_close(got[place], want[place], rtol=0, atol=0, equal_nan=True)
        others = torch.arange(rows) != place
        assert torch.equal(got[others], before[others])


def test_inputs_too_many_for_int32_sums_are_multiplied_in_float32(
    monkeypatch: pytest.MonkeyPatch, check: Check
) -> None:
    weight, x, scale = (
        torch.randint(-127, 128, (16, 40), dtype=torch.int8),
        torch.randn(3, 40),
        torch.rand(16),
    )
    held = cpu.hold(weight.clone())
    monkeypatch.setattr(MODULE, "W8A8_MAX_K", 39)
    got = cpu.linear_int8(x, held, scale, None)
    assert torch.equal(got, linears.linear_scaled(x, held, scale, None))
    check(got, x.double() @ weight.double().T * scale.double())


def test_sums_of_the_largest_numbers() -> None:
    k = W8A8_MAX_K
    x, scale = torch.full((1, k), 1.9), torch.ones(8)
    for code in (-128, 127):
        held = cpu.hold(torch.full((8, k), code, dtype=torch.int8))
        want = torch.tensor(1.9).double() * code * k
        torch.testing.assert_close(
            cpu.linear_int8(x, held, scale, None)[0].double(), want.expand(8), rtol=2e-7, atol=0
        )
