"""Linear layers with weights and activations in int8, each row with its own scale and outliers."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable

import bitsandbytes
import numba
import numpy as np
import pytest
import torch
from heddle.kernels import cpu, triton
from heddle.kernels.cpu import digits, panels
from heddle.kernels.dense_weight import in_panels
from heddle.kernels.ops import W8A8_MAX_K, Ops

Check = Callable[..., None]
SHAPES = [(1, 1), (3, 5), (8, 16), (31, 64), (25, 63), (99, 577), (72, 1536)]
"""(N, K): K below, at and beside multiples of the vector width; N beside multiples of every tile."""
THRESHOLD = 6.0
FORMS = {"pairs": in_panels} | ({"tiled": cpu.hold} if digits.X86_DIGITS else {})
"""How a weight may be held: by this the kernels choose their instructions."""
MODULE = importlib.import_module("heddle.kernels.cpu.linear_w8a8")


def layer(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    weight[0, 0] = -127
    return weight, torch.rand(n) / 127


def activations(rows: int, k: int) -> torch.Tensor:
    """Every third row has an outlier, every fifth several, both signs among them."""
    x = torch.randn(rows, k).clamp(-5.5, 5.5)
    x[::3, k // 2] = 60
    x[::5, ::7] *= 20
    x[::5, 0] = -6
    return x


def expected(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """Row by row in float64; codes and scale in float32, as they are defined."""
    rows = []
    for row in x.float():
        outlier = row.abs() >= threshold if threshold else torch.zeros(len(row), dtype=torch.bool)
        inside = row[~outlier]
        largest = inside.abs().max() if len(inside) else torch.tensor(0.0)
        codes = (inside * (127 / largest)).round() if largest > 0 else torch.zeros_like(inside)
        y = (weight[:, ~outlier].double() @ codes.double()) * largest.double() / 127
        y += weight[:, outlier].double() @ row[outlier].double()
        rows.append(y * scale.double() + (0 if bias is None else bias.double()))
    return torch.stack(rows) if rows else torch.empty((0, len(weight)), dtype=torch.float64)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 8, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_codes_times_weights_and_outliers_in_float(
    ops: Ops, check: Check, rows: int, n: int, k: int, with_bias: bool
) -> None:
    weight, scale = layer(n, k)
    x, bias = activations(rows, k), torch.randn(n) if with_bias else None
    got = ops.linear_w8a8(x, ops.hold(weight.clone()), scale, bias, THRESHOLD)
    check(got, expected(x, weight, scale, bias, THRESHOLD), slack=4)


def test_by_hand(ops: Ops) -> None:
    """Largest 2.54, so 0.02 is one step: codes 127, -2 (a tie, to even), 100; 8 is an outlier."""
    x = torch.tensor([[2.54, -0.05, 8.0, 2.0]])
    weight = torch.tensor([[1, 2, 3, 4], [0, 0, -5, 0], [-127, 0, 0, 0]], dtype=torch.int8)
    scale, bias = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0.0, 0.25, 0.0])
    got = ops.linear_w8a8(x, ops.hold(weight.clone()), scale, bias, THRESHOLD)
    steps = [127 - 2 * 2 + 100 * 4, 0, -127 * 127]
    want = [steps[0] * 0.02 + 24, 2 * -40 + 0.25, 0.5 * steps[2] * 0.02]
    torch.testing.assert_close(got[0], torch.tensor(want), rtol=1e-6, atol=0)


@pytest.mark.parametrize("outliers", [0, 1, 9])
@pytest.mark.parametrize("threshold", [0.0, 6.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_one_row_equals_bitsandbytes(
    ops: Ops, caplog: pytest.LogCaptureFixture, outliers: int, threshold: float, with_bias: bool
) -> None:
    """With one row there is no company from which bitsandbytes would take outlier columns.

    It divides by 127 squared through a constant that is 2e-5 too large; what remains is float32's rounding.
    """
    caplog.set_level(logging.ERROR)
    k, n = 200, 90
    bias = torch.randn(n) if with_bias else None
    linear = bitsandbytes.nn.Linear8bitLt(k, n, bias=with_bias, has_fp16_weights=False, threshold=threshold)
    linear.weight = bitsandbytes.nn.Int8Params(torch.randn(n, k), requires_grad=False, has_fp16_weights=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    linear = linear.to("cpu").eval()
    for _ in range(5):
        x = torch.randn(1, k).clamp(-5.9, 5.9)
        x[0, torch.randperm(k)[:outliers]] *= 30
        x = x.half().float()  # it rounds activations to float16 before it looks for their scale
        with torch.no_grad():
            want = linear(x)
        state = linear.state
        codes, scale = state.CB, state.SCB / 127
        got = ops.linear_w8a8(x, ops.hold(codes.clone()), scale, bias, threshold)
        torch.testing.assert_close(got, want, rtol=3e-5, atol=3e-5 * want.abs().max().item())


def test_without_a_threshold_every_number_is_rounded(ops: Ops, check: Check) -> None:
    weight, scale = layer(20, 50)
    x = activations(6, 50)
    check(
        ops.linear_w8a8(x, ops.hold(weight.clone()), scale, None, 0.0),
        expected(x, weight, scale, None, 0.0),
        slack=4,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_activations(ops: Ops, check: Check, dtype: torch.dtype) -> None:
    weight, scale = layer(40, 200)
    x, bias = activations(7, 200).to(dtype), torch.randn(40).to(dtype)
    got = ops.linear_w8a8(x, ops.hold(weight.clone()), scale, bias, THRESHOLD)
    assert got.dtype == dtype
    check(got, expected(x, weight, scale, bias, THRESHOLD))


def test_rows_that_are_a_slice_of_wider_ones(ops: Ops, check: Check) -> None:
    weight, scale = layer(30, 64)
    x = activations(6, 200)[:, 40:104]
    got = ops.linear_w8a8(x, ops.hold(weight.clone()), scale, None, THRESHOLD)
    check(got, expected(x, weight, scale, None, THRESHOLD), slack=4)


def test_many_rows_need_more_than_one_block_of_codes(ops: Ops, check: Check) -> None:
    weight, scale = layer(50, 2048)
    x = activations(70, 2048)
    got = ops.linear_w8a8(x, ops.hold(weight.clone()), scale, None, THRESHOLD)
    check(got, expected(x, weight, scale, None, THRESHOLD), slack=20)


def test_rows_of_zeros_tiny_values_and_nothing_but_outliers(ops: Ops, check: Check) -> None:
    """Also rows whose scale float32 cannot invert: they count as zeros, they do not turn into NaN."""
    weight, scale = layer(30, 40)
    x = torch.zeros(6, 40)
    x[1], x[2] = 1e-40, 1e-30
    x[3] = torch.randn(40).sign() * 50
    x[4, 3] = -7
    got = ops.linear_w8a8(x, ops.hold(weight.clone()), scale, None, THRESHOLD)
    assert torch.equal(got[[0, 5]], torch.zeros(2, 30))
    assert got[1].abs().max() < 1e-35
    check(got[2:5], expected(x[2:5], weight, scale, None, THRESHOLD), slack=4)
    check(got[2:3], expected(x[2:3], weight, scale, None, THRESHOLD), slack=4)


@pytest.mark.parametrize("threshold", [0.0, 6.0])
@pytest.mark.parametrize("rows", [4, 7, 40])
def test_nan_and_infinity_stay_in_their_own_row(ops: Ops, rows: int, threshold: float) -> None:
    weight, scale = layer(40, 100)
    weight[weight == 0] = 1
    x = activations(rows, 100)
    clean = ops.linear_w8a8(x[3:], ops.hold(weight.clone()), scale, None, threshold)
    x[0, 5], x[1, 3], x[2, 7], x[2, 8] = torch.inf, torch.nan, -torch.inf, torch.inf
    got = ops.linear_w8a8(x, ops.hold(weight.clone()), scale, None, threshold)
    assert got[0].isinf().all()
    assert got[1].isnan().all()
    assert not got[2].isfinite().any()
    torch.testing.assert_close(got[3:], clean, rtol=1e-6, atol=1e-6)


def test_sums_up_to_the_longest_row_are_exact(ops: Ops) -> None:
    """The sums pass 2^24, where float32 ends to hold every integer; the interpreter is spared the longest row."""
    k = 4099 if ops is triton else W8A8_MAX_K
    for value in (-128, 127):
        weight = torch.full((1, k), value, dtype=torch.int8)
        got = ops.linear_w8a8(torch.ones(2, k), ops.hold(weight), torch.ones(1), None, THRESHOLD)
        torch.testing.assert_close(got, torch.full((2, 1), float(value * k)), rtol=2e-7, atol=0)


def test_a_row_with_an_outlier_changes_no_bit_of_a_quiet_neighbour(ops: Ops) -> None:
    """Outlier columns chosen over the whole batch would take 60's column out of the quiet row's int8 part."""
    weight, scale = layer(64, 33)
    quiet, loud = torch.randn(1, 33), torch.randn(1, 33)
    quiet *= 3 / quiet.abs().max()
    loud[0, 0] = 60
    held = ops.hold(weight)
    alone = ops.linear_w8a8(quiet, held, scale, None, THRESHOLD)[0]
    for rows in (2, 8):
        for place in range(rows):
            batch = loud.repeat(rows, 1)
            batch[place] = quiet
            assert torch.equal(ops.linear_w8a8(batch, held, scale, None, THRESHOLD)[place], alone)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (600, 2), (40, 3), (16, 4)])
def test_a_processors_own_products_give_the_same_bits(
    check: Check, form: str, n: int, k: int, with_bias: bool
) -> None:
    (weight, scale), bias, x = layer(n, k), torch.randn(n) if with_bias else None, activations(33, k)
    held, pairs = FORMS[form](weight.clone()), in_panels(weight.clone())
    computed = {rows: cpu.linear_w8a8(x[:rows], held, scale, bias, THRESHOLD) for rows in (1, 2, 7, 33)}
    check(computed[33], expected(x, weight, scale, bias, THRESHOLD))
    for rows, result in computed.items():
        assert torch.equal(result, cpu.linear_w8a8(x[:rows], pairs, scale, bias, THRESHOLD))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("n", "k"), [(25, 63), (72, 576), (600, 100)])
def test_bits_of_a_row_do_not_depend_on_its_company(form: str, n: int, k: int, threads: int) -> None:
    """Any number of rows from 1 to 40, any place among them, any row's neighbours: the same bits."""
    weight, scale = layer(n, k)
    bias, x, held = torch.randn(n), activations(40, k), FORMS[form](weight)
    before = cpu.team.TEAM.num_threads
    cpu.team.TEAM.resize(threads)
    try:
        alone = torch.cat([cpu.linear_w8a8(row, held, scale, bias, THRESHOLD) for row in x.split(1)])
        for rows in range(1, 41):
            for part in (slice(rows), slice(40 - rows, 40)):
                assert torch.equal(cpu.linear_w8a8(x[part], held, scale, bias, THRESHOLD), alone[part])
        order = torch.randperm(40)
        assert torch.equal(cpu.linear_w8a8(x[order], held, scale, bias, THRESHOLD), alone[order])
    finally:
        cpu.team.TEAM.resize(before)


@pytest.mark.parametrize("k", [1, 2, 15, 16, 100])
@pytest.mark.parametrize("rows", range(1, panels.ROWS + 1))
@pytest.mark.parametrize("x86", [False, panels.X86_PAIRS])
def test_integer_products_with_and_without_x86s_instruction(
    monkeypatch: pytest.MonkeyPatch, rows: int, k: int, x86: bool
) -> None:
    monkeypatch.setattr(panels, "X86_PAIRS", x86)
    products = panels.panel_products

    @numba.njit
    def tile(out, x, w, count, k):  # type: ignore[no-untyped-def]
        products(out, out.size // rows, x, 0, k, rows, w, 0, count, k, 0)

    for count in (1, 7):
        x = np.random.default_rng(k).integers(-127, 128, (rows, k)).astype(np.int16)
        w = np.random.default_rng(k + 1).integers(-128, 128, (8 * count, k)).astype(np.int8)
        held = in_panels(torch.from_numpy(w.copy())).values.numpy()
        out = np.zeros(rows * 8 * count, np.float32)
        tile(out, x.ravel(), held.ravel(), count, k)
        assert (out.reshape(rows, -1) == x.astype(np.int64) @ w.astype(np.int64).T).all()
    code = next(iter(tile.inspect_llvm().values()))
    assert ("llvm.x86.avx2.pmadd.wd" in code) == x86
