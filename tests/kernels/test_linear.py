"""Linear layers with float and int8 weights, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from heddle.kernels import cpu, triton
from heddle.kernels.ops import Ops

Check = Callable[..., None]
SHAPES = [(1, 1), (3, 5), (8, 8), (31, 64), (25, 63), (99, 577), (72, 1536)]
"""(N, K): K below, at and beside multiples of the vector width; N beside multiples of every tile."""


def int8_layer(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    weight[0, 0] = -127
    return weight, torch.rand(n) / 127


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 8, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_weights(ops: Ops, check: Check, rows: int, n: int, k: int, with_bias: bool) -> None:
    weight, scale = int8_layer(n, k)
    x, bias = torch.randn(rows, k), torch.randn(n) if with_bias else None
    want = x.double() @ weight.double().T * scale.double() + (0 if bias is None else bias.double())
    check(ops.linear_int8(x, ops.hold(weight.clone()), scale, bias), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_int8_weights_with_16_bit_activations(ops: Ops, check: Check, dtype: torch.dtype) -> None:
    weight, scale = int8_layer(40, 200)
    x, bias = torch.randn(5, 200).to(dtype), torch.randn(40).to(dtype)
    got = ops.linear_int8(x, ops.hold(weight.clone()), scale, bias)
    assert got.dtype == dtype
    check(got, x.double() @ weight.double().T * scale.double() + bias.double())


@pytest.mark.parametrize("function", ["linear", "linear_invariant"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_float_weights(
    ops: Ops, check: Check, function: str, weight_dtype: torch.dtype, n: int, k: int
) -> None:
    """A narrower weight is used exactly: the error is float32's, not that of the weight's dtype."""
    weight = torch.randn(n, k).to(weight_dtype)
    held = ops.hold(weight.clone())
    for rows in (0, 3) if ops is triton else (0, 1, 3, 4, 7):  # Triton's tile is of 16 rows
        x, bias = torch.randn(rows, k), torch.randn(n)
        want = x.double() @ weight.double().T
        check(getattr(ops, function)(x, held, None), want)
        check(getattr(ops, function)(x, held, bias), want + bias.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_activations(ops: Ops, check: Check, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 200).to(dtype), torch.randn(40, 200).to(dtype)
    got = ops.linear(x, ops.hold(weight.clone()), None)
    assert got.dtype == dtype
    check(got, x.double() @ weight.double().T)


def test_rows_that_are_a_slice_of_wider_ones(ops: Ops, check: Check) -> None:
    weight, scale = int8_layer(30, 64)
    x = torch.randn(6, 200)[:, 40:104]
    check(
        ops.linear_int8(x, ops.hold(weight.clone()), scale, None),
        x.double() @ weight.double().T * scale.double(),
    )


@pytest.mark.parametrize("rows", [2, 6, 40])
def test_nan_in_one_row_stays_there(ops: Ops, rows: int) -> None:
    weight, scale = int8_layer(40, 100)
    x = torch.randn(rows, 100)
    x[1, 3] = float("nan")
    x[0, 5] = float("inf")
    for y in (
        ops.linear_int8(x, ops.hold(weight.clone()), scale, None),
        ops.linear_invariant(x, ops.hold(weight.half()), None),
    ):
        assert y[1].isnan().all()
        assert torch.isfinite(y[2:]).all()


@pytest.mark.parametrize(("n", "k"), [(25, 63), (72, 576), (600, 100)])
def test_bits_of_a_row_do_not_depend_on_its_company(n: int, k: int) -> None:
    """Any number of rows from 1 to 40, any place among them, any row's neighbours: the same bits."""
    assert cpu.ROWS_INVARIANT
    weight, scale = int8_layer(n, k)
    bias, x = torch.randn(n), torch.randn(40, k)
    held, single, half = (cpu.hold(w) for w in (weight.clone(), weight.float(), weight.half()))
    layers = [
        lambda rows: cpu.linear_int8(rows, held, scale, bias),
        lambda rows: cpu.linear_invariant(rows, single, bias),
        lambda rows: cpu.linear_invariant(rows, half, None),
    ]
    for layer in layers:
        alone = torch.cat([layer(row) for row in x.split(1)])
        for rows in range(1, 41):
            assert torch.equal(layer(x[:rows]), alone[:rows]), rows
            assert torch.equal(layer(x[40 - rows :]), alone[40 - rows :]), rows
        order = torch.randperm(40)
        assert torch.equal(layer(x[order]), alone[order])


def test_many_rows_need_more_than_one_block_of_activations(ops: Ops, check: Check) -> None:
    weight, scale = int8_layer(50, 2048)
    x = torch.randn(70, 2048)
    check(
        ops.linear_int8(x, ops.hold(weight.clone()), scale, None),
        x.double() @ weight.double().T * scale.double(),
    )
