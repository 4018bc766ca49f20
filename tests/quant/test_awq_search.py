"""AWQ's search and rounding against the paper's formulas written out number by number in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heddle.quant.quantize.awq import (
    clip,
    dequantize,
    mean_square,
    quantize,
    search_clip,
    search_scale,
)
from safetensors.torch import load_file

from .packers import AWQ_ORDER

GROUP = 8
TOOL = Path(__file__).parents[3] / "shared" / "checkpoints" / "smollm2-135m-awq-g64.layers.safetensors"


def rounded(values: list[float], kind: Any = np.float16) -> tuple[list[int], float, int]:
    """Codes, scale (rounded to `kind`) and zero of one group."""
    low, high = min(*values, 0.0), max(*values, 0.0)
    scale = float(kind(max(high - low, 1e-5) / 15))
    zero = min(max(round(-low / scale), 0), 15)
    return [min(max(round(v / scale) + zero, 0), 15) for v in values], scale, zero


def stand_for(values: list[float], kind: Any = np.float16) -> list[float]:
    codes, scale, zero = rounded(values, kind)
    return [(code - zero) * scale for code in codes]


def round_trip(weight: np.ndarray, kind: Any = np.float16) -> np.ndarray:
    out = np.zeros(weight.shape)
    for n in range(weight.shape[0]):
        for first in range(0, weight.shape[1], GROUP):
            out[n, first : first + GROUP] = stand_for(weight[n, first : first + GROUP].tolist(), kind)
    return out


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven_inputs(rows: int, k: int) -> torch.Tensor:
    """Activations a few of whose features are much larger than the rest, as in a language model."""
    loud = torch.ones(k)
    loud[[1, k // 2, k - 2]] = torch.tensor([40.0, 15.0, 25.0])
    return random(rows, k, seed=1) * loud


def hard_weight(n: int, k: int, seed: int) -> torch.Tensor:
    """With large values among small ones in every group: a coarse grid hurts the small ones."""
    heavy = torch.where(random(n, k, seed=seed + 50).abs() > 1.8, 6.0, 1.0)
    return random(n, k, seed=seed) * 0.05 * heavy


def test_codes_scales_and_zeros_are_those_of_the_formula() -> None:
    weight = random(6, 4 * GROUP)
    weight[0, :GROUP] = 0.0
    weight[1, :GROUP] = weight[1, :GROUP].abs() + 0.5
    weight[2, :GROUP] = -weight[2, :GROUP].abs() - 0.5
    weight[3, GROUP : 2 * GROUP] = 0.25
    codes, scales, zeros = quantize(weight, group_size=GROUP)
    assert (codes.dtype, scales.dtype, zeros.dtype) == (torch.uint8, torch.float32, torch.uint8)
    for n in range(6):
        for g in range(4):
            values = weight[n, g * GROUP : (g + 1) * GROUP].tolist()
            expected, scale, zero = rounded(values)
            assert codes[n, g * GROUP : (g + 1) * GROUP].tolist() == expected
            assert scales[n, g].item() == scale
            assert zeros[n, g].item() == zero


def test_a_group_by_hand() -> None:
    # From -1 to 2 in 15 steps of 0.2 (0.19995 in float16): zero at code 5, 0.33 is 1.65 steps above it.
    weight = torch.tensor([[-1.0, 2.0, 0.0, 0.33, -0.33, 0.09, 0.11, 1.0]])
    codes, scales, zeros = quantize(weight, group_size=8)
    assert codes.tolist() == [[0, 15, 5, 7, 3, 5, 6, 10]]
    assert zeros.tolist() == [[5]]
    assert scales.tolist() == [[float(np.float16(0.2))]]
    step = float(np.float16(0.2))
    expected = [-5 * step, 10 * step, 0.0, 2 * step, -2 * step, 0.0, step, 5 * step]
    torch.testing.assert_close(dequantize(codes, scales, zeros), torch.tensor([expected]), rtol=0, atol=1e-7)


def test_groups_of_one_sign_keep_their_values() -> None:
    weight = torch.stack([random(32).abs() + 3, -random(32).abs() - 3])
    codes, scales, zeros = quantize(weight, group_size=32)
    assert zeros.tolist() == [[0], [15]]
    off = (dequantize(codes, scales, zeros) - weight).abs()
    assert (off <= scales * 0.5 + 15 * scales * 2**-11).all()  # half a step, and the scale's own rounding


def test_scales_survive_float16() -> None:
    _, scales, _ = quantize(random(16, 64) * torch.logspace(-6, 3, 16).unsqueeze(1), group_size=GROUP)
    assert torch.equal(scales.half().float(), scales)
    assert (scales > 0).all()


def expected_scale(ratio: float, x: np.ndarray, weights: list[np.ndarray]) -> np.ndarray:
    k = x.shape[1]
    stacked = np.concatenate(weights)
    scale = np.zeros(k)
    for feature in range(k):
        first = feature // GROUP * GROUP
        share = 0.0
        for row in stacked:
            share += abs(row[feature]) / (np.abs(row[first : first + GROUP]).max() + 1e-6)
        share /= len(stacked)
        size = float(np.abs(x[:, feature]).mean())
        scale[feature] = max(size**ratio / (share ** (1 - ratio) + 1e-4), 1e-4)
    return scale / math.sqrt(scale.max() * scale.min())


def test_the_scale_chosen_is_the_grids_best_for_the_modules_output() -> None:
    gate, up, x = hard_weight(24, 32, 3), hard_weight(24, 32, 4), uneven_inputs(40, 32)
    found = search_scale(
        [gate, up],
        x,
        lambda candidates: torch.nn.functional.silu(x @ candidates[0].T) * (x @ candidates[1].T),
        group_size=GROUP,
        grid=10,
    )

    inputs, weights = x.double().numpy(), [gate.double().numpy(), up.double().numpy()]

    def output(pair: list[np.ndarray]) -> np.ndarray:
        left, right = inputs @ pair[0].T, inputs @ pair[1].T
        return left / (1 + np.exp(-left)) * right

    target = output(weights)
    errors, scales = [], []
    for step in range(10):
        scale = expected_scale(step / 10, inputs, weights)
        pair = [round_trip(weight * scale, np.float64) / scale for weight in weights]
        errors.append(float(((output(pair) - target) ** 2).mean()))
        scales.append(scale)
    best = int(np.argmin(errors))
    assert 0 < best < 9, "the best of this input lies within the grid"
    torch.testing.assert_close(found.double(), torch.from_numpy(scales[best]), rtol=1e-4, atol=0)
    unscaled = output([round_trip(weight) for weight in weights])
    assert errors[best] < 0.7 * float(((unscaled - target) ** 2).mean())


def test_the_module_sees_candidates_in_the_order_of_the_weights() -> None:
    weights, x = [hard_weight(3, 16, 1), hard_weight(5, 16, 2)], uneven_inputs(4, 16)
    seen: list[list[torch.Tensor]] = []

    def run(candidates: list[torch.Tensor]) -> torch.Tensor:
        seen.append(candidates)
        return torch.cat([x @ weight.T for weight in candidates], dim=1)

    search_scale(weights, x, run, group_size=GROUP, grid=4)
    assert len(seen) == 5
    assert all(torch.equal(left, right) for left, right in zip(seen[0], weights))
    for candidates in seen[1:]:
        for candidate, weight in zip(candidates, weights):
            assert candidate.shape == weight.shape
            assert not torch.equal(candidate, weight)
            assert (candidate - weight).norm() < 0.5 * weight.norm()


@pytest.mark.parametrize("silent", ["input", "weights", "both", "everything"])
def test_a_feature_that_is_always_zero_leaves_finite_scales(silent: str) -> None:
    weight, x = hard_weight(8, 16, 5), uneven_inputs(10, 16)
    if silent in ("input", "both"):
        x[:, 3] = 0
    if silent in ("weights", "both"):
        weight[:, 3] = 0
    if silent == "everything":
        x.zero_()
        weight.zero_()
    scale = search_scale([weight], x, lambda candidates: x @ candidates[0].T, group_size=GROUP)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert dequantize(*quantize(weight * scale, group_size=GROUP)).isfinite().all()


def test_each_group_keeps_the_range_that_costs_the_output_least_beside_the_others() -> None:
    weight, x = hard_weight(10, 3 * GROUP, 7), uneven_inputs(50, 3 * GROUP)
    found = search_clip(weight, x, group_size=GROUP)
    assert found.shape == (10, 3)
    values, inputs = weight.double().numpy(), x.double().numpy()
    shares = set()
    for n in range(10):
        row = round_trip(values[n : n + 1])[0]
        limits = {}
        for g in [0, 1, 2] * 3:
            columns = slice(g * GROUP, (g + 1) * GROUP)
            full = float(np.abs(values[n, columns]).max())
            errors, rows = [], []
            for step in range(10):
                limit = full * (1 - step / 20)
                tried = row.copy()
                tried[columns] = stand_for(np.clip(values[n, columns], -limit, limit).tolist())
                errors.append(float(((inputs @ (tried - values[n])) ** 2).sum()))
                rows.append(tried)
            best = int(np.argmin(errors))
            row = rows[best]
            limits[g] = full * (1 - best / 20)
            shares.add(best)
        assert found[n].tolist() == pytest.approx([limits[g] for g in range(3)], rel=1e-6)
    assert len(shares) > 3, "this input asks for different ranges"


def test_clipping_never_makes_an_output_worse() -> None:
    weight, x = hard_weight(24, 4 * GROUP, 9), uneven_inputs(60, 4 * GROUP)
    # Groups that see nearly the same activations: their errors add up, or make up for each other.
    x[:, GROUP : 2 * GROUP] = x[:, :GROUP] * 1.01
    limits = search_clip(weight, x, group_size=GROUP)

    def error(values: torch.Tensor) -> torch.Tensor:
        off = (values - weight).double().numpy()
        return torch.from_numpy(((x.double().numpy() @ off.T) ** 2).sum(0))

    plain = error(dequantize(*quantize(weight, group_size=GROUP)))
    clipped = error(dequantize(*quantize(clip(weight, limits), group_size=GROUP)))
    assert (clipped <= plain * (1 + 1e-5)).all()
    assert clipped.sum() < 0.8 * plain.sum()


def test_many_rows_are_searched_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from heddle.quant.quantize import awq

    weight, x = hard_weight(21, 2 * GROUP, 8), uneven_inputs(30, 2 * GROUP)
    whole = search_clip(weight, x, group_size=GROUP)
    monkeypatch.setattr(awq, "CHUNK", 4 * 2 * GROUP)
    torch.testing.assert_close(search_clip(weight, x, group_size=GROUP), whole)
    assert mean_square(weight, whole.new_zeros(weight.shape)) == pytest.approx(
        float(weight.double().square().mean()), rel=1e-6
    )


def test_weights_already_on_their_grid_are_not_clipped() -> None:
    weight = torch.arange(-5.0, 11.0).repeat(4, 2)  # 16 values one apart: nothing to gain
    found = search_clip(weight, random(20, 32), group_size=16)
    assert found.tolist() == [[10.0, 10.0]] * 4
    assert torch.equal(clip(weight, found), weight)


def test_clip_holds_each_group_within_its_own_limit() -> None:
    weight = torch.tensor([[3.0, -3.0, 1.0, -5.0], [0.5, -0.25, 9.0, -9.0]])
    limits = torch.tensor([[2.0, 4.0], [1.0, 8.0]])
    assert clip(weight, limits).tolist() == [[2.0, -2.0, 1.0, -4.0], [0.5, -0.25, 8.0, -8.0]]


@pytest.mark.skipif(not TOOL.is_file(), reason="the tool's layers are not here")
@pytest.mark.parametrize("layer", [0, 15, 29])
def test_the_tool_rounds_the_same_weights_to_the_same_codes(layer: int, demo_base: Path) -> None:
    """AutoAWQ's q and k (which it never clips) in that file are W * s * s, s standing in the norm.

    s is the grid's first point there: run on a CPU, the tool's search overwrites the weights it means to
    restore, and scales them twice.
    """
    tool, base = load_file(TOOL), load_file(demo_base / "model.safetensors")
    norm = f"model.layers.{layer}.input_layernorm.weight"
    scale = base[norm].float() / tool[norm]
    back = [AWQ_ORDER.index(i) for i in range(8)]
    names = [f"model.layers.{layer}.self_attn.{part}_proj" for part in "qkv"]
    weights = [base[f"{name}.weight"].float() for name in names]
    x = torch.ones(4, 576)  # of no matter for the grid's first point
    first = search_scale(weights, x, lambda candidates: x @ candidates[0].T, group_size=64, grid=1)
    torch.testing.assert_close(first, scale, rtol=1e-4, atol=0)
    for name, weight in zip(names[:2], weights):

        def fields(part: str, name: str = name) -> torch.Tensor:
            words = tool[f"{name}.{part}"]
            return torch.stack([words >> 4 * i & 15 for i in range(8)], dim=2)[:, :, back].flatten(1).T

        codes, scales, zeros = quantize((weight * first * first).half(), group_size=64)
        # The tool divides in float16, so a value near the middle of two codes may fall to the other side.
        assert (codes != fields("qweight")).float().mean() < 0.01
        assert (zeros != fields("qzeros")).float().mean() < 0.01
        torch.testing.assert_close(scales, tool[f"{name}.scales"].T.float(), rtol=2 * 2**-10, atol=0)
