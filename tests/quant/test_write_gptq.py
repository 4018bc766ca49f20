"""GPTQ against the paper's algorithm written out column by column in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from heddle.quant.base import QuantError
from heddle.quant.quantize.gptq import BLOCK, Hessian, Settings, quantize
from heddle.quant.quantize.rounding import Rounded, find_grid, round_to_nearest

from .gptq_by_columns import by_columns, grid
from .packers import stands_for

N = 4


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(rows: int, k: int) -> torch.Tensor:
    """Features that depend on each other, some of them much larger than the rest."""
    mixed = random(rows, k, seed=1) @ (random(k, k, seed=2) * 0.2 + torch.eye(k))
    mixed[:, [1, k // 2]] *= 12
    return mixed


def hessian_of(x: torch.Tensor) -> torch.Tensor:
    found = Hessian(x.shape[1])
    for part in x.split(7):
        found.add(part)
    return found.value()


def loss(weight: torch.Tensor, rounded: Rounded, x: torch.Tensor) -> float:
    return float((x @ (weight - rounded.values()).t()).square().sum())


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "size"), [(4, 16), (4, 32), (4, 96), (4, -1), (8, 32)])
def test_every_column_is_the_papers(bits: int, size: int, symmetric: bool, act_order: bool) -> None:
    k = 192  # more than a block, and no multiple of it
    assert k > BLOCK
    weight, hessian = random(N, k) * 0.05, hessian_of(inputs(400, k))
    found = quantize(weight, hessian, Settings(bits, size, act_order, symmetric, 0.01))
    expected, g_idx = by_columns(
        weight.numpy(), hessian.numpy(), bits, k if size == -1 else size, act_order, symmetric, 0.01
    )
    assert np.array_equal(found.groups.numpy(), g_idx)
    assert found.scales.shape == (N, 1 if size == -1 else k // size)
    # Float32 may land on the other side of a tie now and then; what follows in that row then differs a little.
    step = found.scales[:, found.groups.long()].numpy()
    off = np.abs(found.values().numpy() - expected) > 0.01 * step
    assert off.mean() < 0.02


@pytest.mark.parametrize("size", [16, 48, 128, 256])
def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    k = 768
    weight, hessian = random(N, k) * 0.05, hessian_of(inputs(900, k))
    settings = Settings(4, size, symmetric=False)
    found = quantize(weight, hessian, settings)
    monkeypatch.setattr("heddle.quant.quantize.gptq.BLOCK", 4096)
    whole = quantize(weight, hessian, settings)
    assert (found.codes != whole.codes).float().mean() < 0.02


def test_the_output_error_is_far_below_that_of_rounding_to_nearest() -> None:
    weight, x = random(32, 128) * 0.05, inputs(600, 128)
    plain = loss(weight, round_to_nearest(weight, 4, 32, symmetric=True), x)
    kept = loss(weight, quantize(weight, hessian_of(x), Settings(4, 32)), x)
    ordered = loss(weight, quantize(weight, hessian_of(x), Settings(4, 32, act_order=True)), x)
    assert kept < 0.6 * plain
    assert ordered < 0.6 * plain


def test_linears_of_one_input_rounded_as_one_are_those_rounded_alone() -> None:
    q, k, hessian = random(32, 64), random(16, 64, seed=5), hessian_of(inputs(200, 64))
    settings = Settings(4, 32, act_order=True)
    both = quantize(torch.cat([q, k]), hessian, settings)
    for part, alone in ((both.rows(0, 32), q), (both.rows(32, 48), k)):
        single = quantize(alone, hessian, settings)
        assert (part.codes != single.codes).float().mean() < 0.02
        assert torch.equal(part.groups, single.groups)


def test_features_that_were_never_seen_become_zero() -> None:
    x = inputs(200, 64)
    x[:, [3, 40]] = 0
    for act_order in (False, True):
        values = quantize(random(N, 64), hessian_of(x), Settings(4, 32, act_order, symmetric=False)).values()
        assert not values[:, [3, 40]].any()
        assert values.isfinite().all()


def test_fewer_rows_than_features_are_enough() -> None:
    weight = random(N, 64)
    assert quantize(weight, hessian_of(inputs(20, 64)), Settings(4, 32)).values().isfinite().all()


def test_inputs_that_are_not_finite_are_refused() -> None:
    x = inputs(100, 32)
    x[5, 7] = torch.inf
    with pytest.raises(QuantError, match="damp"):
        quantize(random(N, 32), hessian_of(x), Settings(4, 32))


def test_the_hessian_is_twice_the_mean_of_outer_products() -> None:
    x = random(30, 5)
    expected = 2 * x.double().t() @ x.double() / 30
    assert torch.allclose(hessian_of(x).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_grids_by_hand(bits: int, symmetric: bool) -> None:
    rows = [[-1.0, 0.5, 2.0], [0.0, 0.0, 0.0], [0.25, 1.0, 3.0], [-4.0, -2.0, -1.0], [-0.001, 1.0, 3.0]]
    scales, zeros = find_grid(torch.tensor(rows), bits, symmetric=symmetric)
    for row, scale, zero in zip(rows, scales.tolist(), zeros.tolist()):
        assert (scale, zero) == grid(np.array(row), bits, symmetric)


def test_no_zero_point_is_zero_and_positive_groups_reach_their_largest_value() -> None:
    """A stored zero is one less, and readers disagree on what a stored -1 means."""
    weight = random(N, 64).abs() + 0.1
    found = round_to_nearest(weight, 4, 16, symmetric=False)
    assert (found.zeros == 1).all()
    assert ((found.values() - weight).abs() <= 0.51 * found.scales[:, found.groups.long()]).all()


def test_tiny_weights_keep_a_finite_grid() -> None:
    found = round_to_nearest(torch.full((2, 16), 1e-12), 4, 16, symmetric=True)
    assert found.values().abs().max() <= 1e-7


def test_values_are_the_formats_formula() -> None:
    found = quantize(
        random(N, 64), hessian_of(inputs(200, 64)), Settings(4, 16, act_order=True, symmetric=False)
    )
    by_hand = stands_for(
        found.codes.numpy().astype(np.int64),
        found.zeros.numpy().astype(np.int64).T,
        found.scales.half().numpy().T,
        found.groups.numpy(),
    )
    assert torch.equal(found.values(), by_hand)
    assert torch.equal(found.scales.half().float(), found.scales)
