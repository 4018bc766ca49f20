"""Linear layers with weights and activations in int8: tensor cores' integer products, outliers beside them in float.

One program walks all of K in steps for a tile of rows and columns. In each step activations become codes, whose
products are integers and exact; where a row of the tile has an outlier, the step's outliers are multiplied as
`linear_int8` would. A row without any then adds zeros, so that neither the number of rows nor the company shows in the
result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dense_weight import DenseWeight
from ..ops import W8A8_MAX_K, W8A8_SMALLEST
from .launch import cdiv, launch

FEW_ROWS = 16
"""Up to this many rows the smaller tile is used."""
COLUMNS, STEP = 64, 64
"""Of a tile, and in-features of a step. Not measured: no GPU has run this yet."""


@triton.jit(do_not_specialize=["T"])
def _codes_and_outliers(  # type: ignore[no-untyped-def]
    x, factors, row_scales, weight, scale, bias, out, T, N, K, x_stride, limit,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[t, n] = scale[n] * (row_scales[t] * codes[t] . weight[n] + outliers[t] . weight[n]) + bias[n]"""
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, columns = (t < T)[:, None], (n < N)[None, :]
    lefts = x + t[:, None].to(tl.int64) * x_stride
    rights = weight + n[None, :].to(tl.int64) * K
    factor = tl.load(factors + t, mask=t < T, other=0.0)[:, None]
    exact = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, K, STEP):
        k = k0 + tl.arange(0, STEP)
        left = tl.load(lefts + k[None, :], mask=rows & (k < K)[None, :], other=0.0)
        right = tl.load(rights + k[:, None], mask=columns & (k < K)[:, None], other=0)
        wide = left.to(tl.float32)
        ordinary = tl.abs(wide) < limit  # NaN is never below
        # Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even.
        rounded = (tl.where(ordinary, wide, 0.0) * factor + 12582912.0) - 12582912.0
        exact = tl.dot(rounded.to(tl.int8), right, exact, out_dtype=tl.int32)
        if tl.max(tl.max(tl.where(ordinary, 0, 1), axis=1), axis=0) > 0:
            outliers = tl.where(ordinary, 0.0, left).to(left.dtype)
            total = tl.dot(outliers, right.to(left.dtype), total, input_precision=PRECISION)
    row_scale = tl.load(row_scales + t, mask=t < T, other=0.0)[:, None]
    total = (exact.to(tl.float32) * row_scale + total) * tl.load(scale + n, mask=n < N, other=0.0)[None, :]
    if bias is not None:
        total = total + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + t[:, None].to(tl.int64) * N + n[None, :], total, mask=rows & columns)


def linear_w8a8(
    x: torch.Tensor, weight: DenseWeight, scale: torch.Tensor, bias: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """y[t, n] = scale[n] * (s[t] * sum_k codes[t, k] * weight[n, k] + sum_j x[t, j] * weight[n, j]) + bias[n]"""
    (rows, k), n = x.shape, weight.shape[0]
    assert k <= W8A8_MAX_K
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    limit = threshold or float("inf")
    sizes = x.abs().float()
    largest = sizes.masked_fill(~(sizes < limit), 0).amax(dim=1)
    factors = torch.where(largest > W8A8_SMALLEST, 127 / largest, 0)
    tile_rows = 16 if rows <= FEW_ROWS else 64
    launch(
        _codes_and_outliers, (cdiv(rows, tile_rows), cdiv(n, COLUMNS)),
        x, factors, largest / 127, weight.values, scale, bias, out, rows, n, k, x.stride(0), limit,
        BLOCK_M=tile_rows, BLOCK_N=COLUMNS, STEP=STEP, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
