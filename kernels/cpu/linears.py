"""Linear layers with weights in float or int8 and activations in float32, in an order of sums fixed by K."""

from __future__ import annotations

import numpy as np
import torch

from .arrays import KINDS, address, array_at, dense
from .compiled import compiled, inner
from .products import STRIP, evenly_spaced, row_products
from .team import TEAM, share
from .vector_ir import load, store

CACHED_VALUES = 32768
"""Activation values worked on together (128 KiB: a share of the second-level cache)."""
PART_PRODUCTS = 150_000
"""Products in one part of the work: about 5 microseconds of one core."""


@inner
def _scale_and_shift(out, start, scale, bias, n, width):  # type: ignore[no-untyped-def]
    """out[start + i] = out[start + i] * scale[n + i] + bias[n + i] for i < width; either may be empty."""
    if scale.size:
        for i in range(width):
            store(out, start + i, load(out, start + i) * load(scale, n + i))
    if bias.size:
        for i in range(width):
            store(out, start + i, load(out, start + i) + load(bias, n + i))


@inner
def _columns(part, parts, out, x, rows, w, size, scale, bias, k):  # type: ignore[no-untyped-def]
    """One part of the columns of out [rows, size] = x [rows, k] @ w [size, k] transposed * scale + bias."""
    strips = (size + STRIP - 1) // STRIP
    begin, end = strips * part // parts * STRIP, min(strips * (part + 1) // parts * STRIP, size)
    block = max(4, CACHED_VALUES // k // 4 * 4)
    x_rows, out_rows, w_rows = evenly_spaced(rows, k), evenly_spaced(rows, size), evenly_spaced(STRIP, k)
    for first in range(0, rows, block):
        last = min(first + block, rows)
        for n in range(begin, end, STRIP):
            width = min(STRIP, end - n)
            row_products(out, out_rows, n, x, x_rows, first, last, w, w_rows, n * k, width, k)
            for t in range(first, last):
                _scale_and_shift(out, out_rows[t] + n, scale, bias, n, width)


@compiled
def _product(words, parts, out, x, rows, w, kind, size, scale, bias, k):  # type: ignore[no-untyped-def]
    real = np.float32(0)
    share(
        words, parts, _columns,
        (
            array_at(out, real, (rows * size,)), array_at(x, real, (rows * k,)), rows,
            array_at(w, kind, (size * k,)), size, array_at(scale, real, (size if scale else 0,)),
            array_at(bias, real, (size if bias else 0,)), k,
        ),
    )  # fmt: skip


def _run(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    rows, k = x.shape
    size = weight.shape[0]
    out = torch.empty((rows, size), dtype=torch.float32)
    if rows and size:
        values, bias = dense(x), None if bias is None else dense(bias)
        parts = max(1, min(rows * size * k // PART_PRODUCTS, size // STRIP))
        _product(
            TEAM.words, parts, out.data_ptr(), values.data_ptr(), rows, weight.data_ptr(), KINDS[weight.dtype],
            size, address(scale), address(bias), k,
        )  # fmt: skip
    return out if x.dtype is torch.float32 else out.to(x.dtype)


def linear_invariant(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]"""
    return _run(x, weight, None, bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]"""
    return _run(x, weight, None, bias)


def linear_int8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """y[t, n] = scale[n] * sum_k x[t, k] * weight[n, k] + bias[n]"""
    return _run(x, weight, dense(scale), bias)
