"""What happens to each row on its own: norms, gated activation, embedding, and the exponential under them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from heddle.kernels import cpu
from heddle.kernels.cpu.compiled import compiled
from heddle.kernels.cpu.exponential import exp
from heddle.kernels.ops import Ops

Check = Callable[..., None]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, 64, 577])
@pytest.mark.parametrize("rows", [0, 1, 5, 130])
def test_rms_norm(ops: Ops, check: Check, dtype: torch.dtype, size: int, rows: int) -> None:
    x, weight = (torch.randn(rows, size) * 3).to(dtype), torch.randn(size).to(dtype)
    got = ops.rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    check(got, normed(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 5, 130])
def test_add_rms_norm(ops: Ops, check: Check, dtype: torch.dtype, rows: int) -> None:
    x, residual, weight = (torch.randn(n, 333).to(dtype) for n in (rows, rows, 1))
    want = x + residual
    got, total = ops.add_rms_norm(x, residual, weight[0], 1e-5)
    assert torch.equal(total, want)
    check(got, normed(want, weight[0], 1e-5))


def test_rows_of_zeros_and_tiny_values(ops: Ops, check: Check) -> None:
    x = torch.zeros(3, 16)
    x[1], x[2] = 1e-20, 1e15
    check(ops.rms_norm(x, torch.ones(16), 1e-6), normed(x, torch.ones(16), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 9, 64, 1536])
@pytest.mark.parametrize("rows", [0, 1, 4, 70])
def test_silu_mul(ops: Ops, check: Check, dtype: torch.dtype, size: int, rows: int) -> None:
    gate_up = (torch.randn(rows, 2 * size) * 5).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    got = ops.silu_mul(gate_up)
    assert got.dtype == dtype
    check(got, gate * torch.sigmoid(gate) * up)


def test_silu_far_from_zero(ops: Ops) -> None:
    gate = torch.tensor([-1000.0, -200.0, -88.5, -40.0, 40.0, 88.5, 1000.0, 0.0])
    got = ops.silu_mul(torch.cat([gate, torch.ones(8)]).unsqueeze(0))[0]
    assert torch.isfinite(got).all()
    torch.testing.assert_close(
        got.double(), gate.double() * torch.sigmoid(gate.double()), rtol=3e-7, atol=1e-30
    )


def test_nan_in_one_row_stays_there(ops: Ops) -> None:
    x = torch.randn(5, 32)
    x[2, 7] = float("nan")
    for got in (
        ops.rms_norm(x, torch.ones(32), 1e-5),
        ops.add_rms_norm(x, torch.zeros(5, 32), torch.ones(32), 1e-5)[0],
        ops.silu_mul(x),
    ):
        assert torch.isfinite(got[[0, 1, 3, 4]]).all()
        assert got[2].isnan().any()


def test_bits_of_a_row_do_not_depend_on_its_company() -> None:
    x, residual, weight = torch.randn(200, 578), torch.randn(200, 578), torch.randn(578)
    for function in (
        lambda rows: cpu.rms_norm(x[rows], weight, 1e-5),
        lambda rows: cpu.add_rms_norm(x[rows], residual[rows], weight, 1e-5)[0],
        lambda rows: cpu.silu_mul(x[rows]),
    ):
        whole = function(slice(None))
        for count in (*range(1, 41), 150):
            assert torch.equal(function(slice(0, count)), whole[:count])
            assert torch.equal(function(slice(200 - count, 200)), whole[200 - count :])


def test_inputs_that_are_slices_of_wider_rows(ops: Ops, check: Check) -> None:
    wide = torch.randn(6, 300)
    check(ops.rms_norm(wide[:, 10:74], torch.ones(64), 1e-5), normed(wide[:, 10:74], torch.ones(64), 1e-5))
    gate, up = wide[:, 3:131].double().chunk(2, dim=-1)
    check(ops.silu_mul(wide[:, 3:131]), gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(20, 8), (21, 7), (300, 2050)])
def test_embedding(ops: Ops, weight_dtype: torch.dtype, n: int, k: int) -> None:
    weight = torch.randn(n, k).to(weight_dtype)
    ids = torch.tensor([3, 19, 0, n - 1, 3])
    got = ops.embedding(ids, ops.hold(weight.clone()), None, torch.float32)
    assert got.dtype == torch.float32
    for row, index in zip(got, ids.tolist(), strict=True):
        assert torch.equal(row, weight[index].float())
    assert ops.embedding(ids[:0], ops.hold(weight.clone()), None, torch.float32).shape == (0, k)


@pytest.mark.parametrize(("n", "k"), [(20, 8), (21, 7), (300, 2050)])
def test_embedding_in_int8(ops: Ops, n: int, k: int) -> None:
    weight, absmax = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n) + 0.01
    ids = torch.tensor([3, 19, 0, n - 1, 3])
    got = ops.embedding(ids, ops.hold(weight.clone()), absmax, torch.float32)
    assert torch.equal(got, weight[ids] * absmax[ids, None] * (1 / 127)), "as bitsandbytes takes them back"


@compiled
def _exp_all(out, x):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        out[i] = exp(x[i])


def test_exponential_is_float32s() -> None:
    x = np.concatenate([np.linspace(-87, 88, 200_001), [0.0, -0.0, 1e-20, -1e-20]]).astype(np.float32)
    got = np.empty_like(x)
    _exp_all(got, x)
    want = np.exp(x.astype(np.float64))
    assert np.max(np.abs(got - want) / want) < 2.5e-7
    special = np.array([-1e4, -np.inf, np.nan, 1e4], np.float32)
    _exp_all(got[:4], special)
    assert got[0] == 0
    assert got[1] == 0
    assert np.isnan(got[2])
    assert got[3] > 1e38
