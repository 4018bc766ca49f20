"""Linear layers over float, int8 and packed weights: which kernel, which tile, how K is cut."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..dense_weight import DenseWeight
from ..packed_weight import PackedWeight
from . import tiles
from .launch import cdiv, launch
from .linear_kernels import _dequantise, _few_rows, _few_rows_packed, _finish, _many_rows
from .tiles import STEP


def linear_invariant(x: torch.Tensor, weight: DenseWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]"""
    return _plain(x, weight.values, None, bias)


def linear(x: torch.Tensor, weight: DenseWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear_invariant`: whether a vendor's product is worth its order of sums is for a measurement to say."""
    return _plain(x, weight.values, None, bias)


def linear_int8(
    x: torch.Tensor, weight: DenseWeight, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """y[t, n] = scale[n] * sum_k x[t, k] * weight[n, k] + bias[n]

    int8 is exact in every float dtype, so the products run on tensor cores and the scale is applied once.
    """
    return _plain(x, weight.values, scale, bias)


def linear_w4(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """y[t, n] = sum_j x[t, order[j]] * (codes[n, j] - zeros[n, g]) * scales[n, g] + bias[n]

    What a code stands for is rounded to x's dtype, as the tools that made it do.
    """
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    x = _dense_rows(x)
    rows, k = x.shape
    n, pitch, halves = *weight.codes.shape, 8 // weight.bits
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    groups = weight.scales.shape[1]
    part = tiles.part_size(n, k, STEP * halves)
    if rows <= tiles.FEW_ROWS:
        tile = tiles.few(rows)
        parts = cdiv(k, part)
        sums = _sums(out, parts)
        launch(
            _few_rows_packed, (cdiv(n, tile.columns), parts, cdiv(rows, tile.rows)),
            x, weight.codes, weight.scales, weight.zeros, bias, sums, rows, n, k, x.stride(0), n, pitch, part // halves,
            groups, weight.group_size,
            SPLIT=parts > 1, HALVES=halves, ONE_GROUP=groups == 1 or weight.group_size % (STEP * halves) == 0,
            BLOCK_M=tile.rows, BLOCK_N=tile.columns, STEP=STEP, PRECISION=_precision(x),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        _finish_parts(sums, None, bias, out)
        return out

    def dequantised(first: int, last: int) -> torch.Tensor:
        strip = torch.empty((last - first, k), dtype=x.dtype, device=x.device)
        launch(
            _dequantise, (cdiv(pitch, tiles.DEQUANTISE_OCTETS), last - first),
            weight.codes[first:last], weight.scales[first:last], weight.zeros[first:last], strip,
            k, pitch, groups, weight.group_size, HALVES=halves, BLOCK=tiles.DEQUANTISE_OCTETS,
        )  # fmt: skip
        return strip

    _in_strips(x, dequantised, None, bias, out, part, halves)
    return out


def _plain(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """weight [N, K] in any dtype that x's holds, or that is to be rounded to it."""
    x = _dense_rows(x)
    rows, k = x.shape
    n = weight.shape[0]
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    part = tiles.part_size(n, k)
    if rows <= tiles.FEW_ROWS:
        tile = tiles.few(rows)
        parts = cdiv(k, part)
        sums = _sums(out, parts)
        launch(
            _few_rows, (cdiv(n, tile.columns), parts, cdiv(rows, tile.rows)),
            x, weight, scale, bias, sums, rows, n, k, x.stride(0), n, part,
            SPLIT=parts > 1, BLOCK_M=tile.rows, BLOCK_N=tile.columns, STEP=STEP, PRECISION=_precision(x),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        _finish_parts(sums, scale, bias, out)
    elif weight.dtype == x.dtype:
        _tiles_of(x, weight, scale, bias, out, part, 1)
    else:
        _in_strips(x, lambda first, last: weight[first:last].to(x.dtype), scale, bias, out, part, 1)
    return out


def _in_strips(
    x: torch.Tensor,
    dequantised: Callable[[int, int], torch.Tensor],
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    part: int,
    halves: int,
) -> None:
    """Many rows: some out-features' weights in x's dtype, the product with them, then the next out-features."""
    n = out.shape[1]
    width = tiles.strip(n, x.shape[1], x.element_size())
    for first in range(0, n, width):
        last = min(first + width, n)
        _tiles_of(
            x,
            dequantised(first, last),
            None if scale is None else scale[first:last],
            None if bias is None else bias[first:last],
            out[:, first:last],
            part,
            halves,
        )


def _tiles_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    part: int,
    halves: int,
) -> None:
    tile = tiles.many(x.dtype)
    (rows, k), n = x.shape, weight.shape[0]
    launch(
        _many_rows, (cdiv(rows, tile.rows), cdiv(n, tile.columns)),
        x, weight, scale, bias, out, rows, n, k, x.stride(0), out.stride(0), part,
        HALVES=halves, BLOCK_M=tile.rows, BLOCK_N=tile.columns, STEP=STEP, PRECISION=_precision(x),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _sums(out: torch.Tensor, parts: int) -> torch.Tensor:
    """Where parts go: [parts, T, N] float32, or `out` itself where there is but one."""
    if parts == 1:
        return out
    return torch.empty((parts, *out.shape), dtype=torch.float32, device=out.device)


def _finish_parts(
    sums: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    if sums is out:
        return
    rows, n = out.shape
    launch(
        _finish, (cdiv(n, tiles.FINISH_COLUMNS), rows),
        sums, scale, bias, out, rows, n, len(sums), BLOCK=tiles.FINISH_COLUMNS,
    )  # fmt: skip


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x with neighbouring values of a row side by side; rows may be apart."""
    return x if x.stride(1) == 1 else x.contiguous()


def _precision(x: torch.Tensor) -> str:
    """float32 activations are not rounded to TF32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
