"""Linear layers with weights in float or int8 and activations in float32, in an order of sums fixed by K."""

from __future__ import annotations

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import prange

from .arrays import NONE, as_array, optional, rows_of
from .compiled import parallel, serial
from .products import STRIP, evenly_spaced, row_products, widen

DIRECT_ROWS = 4
"""Up to this many rows weights are widened in registers as they are used; above, once per strip into a scratch."""
CACHED_VALUES = 32768
"""Activation values worked on together (128 KiB: a share of the second-level cache)."""
SERIAL_PRODUCTS = 100_000
"""Below this many products a call is not worth waking the other threads (about 3 microseconds of one core)."""


@serial
def _columns(out, x, x_step, rows, w, size, scale, bias, k, begin, end):  # type: ignore[no-untyped-def]
    """Columns begin to end of out [rows, size]."""
    block = min(rows, max(DIRECT_ROWS, CACHED_VALUES // k // 4 * 4))
    x_rows, out_rows = evenly_spaced(rows, x_step), evenly_spaced(rows, size)
    w_rows = evenly_spaced(STRIP, k)
    wide = np.empty(STRIP * k if rows > DIRECT_ROWS else 0, np.float32)
    for first in range(0, rows, block):
        count = min(block, rows - first)
        for n in range(begin, end, STRIP):
            width = min(STRIP, end - n)
            place = out[n:]
            if rows > DIRECT_ROWS:
                widen(wide, w, n * k, width * k)
                row_products(place, out_rows[first:], x, x_rows[first:], count, wide, w_rows, 0, width, k)
            else:
                row_products(place, out_rows[first:], x, x_rows[first:], count, w, w_rows, n * k, width, k)
            for t in range(first, first + count):
                row = out[t * size + n : t * size + n + width]
                if scale.size:
                    for i in range(width):
                        row[i] *= scale[n + i]
                if bias.size:
                    for i in range(width):
                        row[i] += bias[n + i]


@parallel
def _shared_columns(threads, out, x, x_step, rows, w, size, scale, bias, k):  # type: ignore[no-untyped-def]
    """All columns of out [rows, size], in `threads` parts."""
    strips = (size + STRIP - 1) // STRIP
    for part in prange(threads):
        begin, end = strips * part // threads * STRIP, strips * (part + 1) // threads * STRIP
        _columns(out, x, x_step, rows, w, size, scale, bias, k, begin, min(end, size))


def _run(
    x: torch.Tensor, weight: torch.Tensor, scale: np.ndarray, bias: torch.Tensor | None
) -> torch.Tensor:
    rows, k = x.shape
    size = weight.shape[0]
    out = torch.empty((rows, size), dtype=torch.float32)
    if rows and size:
        values, step = rows_of(x)
        call = as_array(out), values, step, rows, as_array(weight), size, scale, optional(bias), k
        threads = numba.get_num_threads()
        if threads == 1 or rows * size * k < SERIAL_PRODUCTS:
            _columns(*call, 0, size)
        else:
            _shared_columns(threads, *call)
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def linear_invariant(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]"""
    return _run(x, weight, NONE, bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]"""
    return _run(x, weight, NONE, bias)


def linear_int8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """y[t, n] = scale[n] * sum_k x[t, k] * weight[n, k] + bias[n]"""
    return _run(x, weight, optional(scale), bias)
