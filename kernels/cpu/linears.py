"""Linear layers with weights in float or int8 and activations in float32, in an order of sums fixed by K."""

from __future__ import annotations

import numpy as np
import torch

from ..dense_weight import PANEL, DenseWeight
from .amx import AHEAD, TILE
from .arrays import address, array_at, dense, kind
from .compiled import compiled, inner
from .epilogue import scaled
from .panels import ROWS, panel_products
from .recording import empty, launch
from .team import ends_share, share, thread_count

STRIP = 12
"""Panels worked on together: a multiple of those in each tile, few enough for the caches."""
CACHED_VALUES = 32768
"""Activation values worked on together (128 KiB: a share of the second-level cache)."""
PART_PRODUCTS = 150_000
"""Products in one part of the work: about 3 microseconds of one core."""
BAND_ROWS = 32
"""Rows for each thread from which on it gets rows of its own, in every product the same, instead of columns."""
ONE = np.float32(1)
PART_VALUES = 16384
"""Activations made ready in one part of the work: about as long."""


@inner
def row_bands(words, rows):  # type: ignore[no-untyped-def]
    """How many bands of neighbouring rows a product of so many has."""
    threads = thread_count(words)
    return threads if rows >= threads * BAND_ROWS else 1


@inner
def part_of_product(part, parts, bands, rows, panels):  # type: ignore[no-untyped-def]
    """The rows and the panels of one part: begin and end of each. `parts` is a multiple of `bands`.

    A part has one band's rows and whole strips of panels, as long as there are.
    """
    pieces, strips = parts // bands, (panels + STRIP - 1) // STRIP
    band, piece = part // pieces, part % pieces
    begin, end = strips * piece // pieces * STRIP, min(strips * (piece + 1) // pieces * STRIP, panels)
    return rows * band // bands, rows * (band + 1) // bands, begin, end


@inner
def following(q, count, stop, row, rows, panel_size):  # type: ignore[no-untyped-def]
    """Where the weights lie that are fetched while row `row` of `rows` is multiplied with `count` panels from q on: its
    share of the panels after them, which are read next; these themselves where the thread has none from `stop` on.
    """
    if q + count >= stop:
        return q * panel_size
    return (q + count) * panel_size + count * panel_size * row // rows


@inner
def fetched_beside_tiles(q, count, stop, row, height, rows, each):  # type: ignore[no-untyped-def]
    """`following` for rows multiplied `height` at a time in tiles (`amx`): where, and how many lines beside a tile."""
    if height >= rows:
        return q * each + AHEAD, TILE
    return following(q, count, stop, row, rows, each), (TILE * height + rows - 1) // rows


@inner
def _columns(part, parts, threads, bands, out, x, rows, w, panels, each, size, scale, bias, k):  # type: ignore[no-untyped-def]
    """One part of out [rows, size] = x [rows, k] @ w [size, k] transposed * scale + bias."""
    top, bottom, begin, end = part_of_product(part, parts, bands, rows, panels)
    stop = end if ends_share(part, parts, threads) else panels
    block = max(1, CACHED_VALUES // (k * ROWS)) * ROWS
    sums = np.empty(ROWS * STRIP * PANEL, np.float32)
    for first in range(top, bottom, block):
        last = min(first + block, bottom)
        for q in range(begin, end, STRIP):
            count = min(STRIP, end - q)
            n, width, tiles = (
                q * PANEL,
                min(count * PANEL, size - q * PANEL),
                (last - first + ROWS - 1) // ROWS,
            )
            t = first
            for left in range(tiles, 0, -1):
                height = (last - t + left - 1) // left  # tiles of like height
                soon = following(q, count, stop, t - first, last - first, each)
                panel_products(sums, STRIP * PANEL, x, t * k, k, height, w, q * each, count, k, soon)
                for m in range(height):
                    scaled(out, (t + m) * size + n, sums, m * STRIP * PANEL, ONE, scale, bias, n, width)
                t += height


@compiled
def _product(words, parts, out, x, rows, w, like, panels, each, size, scale, bias, k):  # type: ignore[no-untyped-def]
    real, bands = np.float32(0), row_bands(words, rows)
    share(
        words, bands * max(1, parts // bands), _columns,
        (
            thread_count(words), bands, array_at(out, real, (rows * size,)), array_at(x, real, (rows * k,)), rows,
            array_at(w, like, (panels * each,)), panels, each, size, array_at(scale, real, (size if scale else 0,)),
            array_at(bias, real, (size if bias else 0,)), k,
        ),
    )  # fmt: skip


def extent(weight: DenseWeight) -> tuple[int, int]:
    """How many panels of `PANEL` outputs a weight has, and the elements of each."""
    count, groups, outputs, inputs = weight.values.shape
    return count * outputs // PANEL, groups * inputs * PANEL


def _run(
    x: torch.Tensor, weight: DenseWeight, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    rows, (size, k) = x.shape[0], weight.shape
    out = empty(rows, size)
    if rows and size:
        values, bias = dense(x), None if bias is None else dense(bias)
        parts = max(1, min(rows * size * k // PART_PRODUCTS, size // (STRIP * PANEL)))
        launch(
            _product, parts, out.data_ptr(), values.data_ptr(), rows, weight.values.data_ptr(),
            kind(weight), *extent(weight), size, address(scale), address(bias), k,
        )  # fmt: skip
    return out if x.dtype is torch.float32 else out.to(x.dtype)


def linear_invariant(x: torch.Tensor, weight: DenseWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]"""
    return _run(x, weight, None, bias)


def linear(x: torch.Tensor, weight: DenseWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]"""
    return _run(x, weight, None, bias)


def linear_scaled(
    x: torch.Tensor, weight: DenseWeight, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """y[t, n] = scale[n] * sum_k x[t, k] * weight[n, k] + bias[n]"""
    return _run(x, weight, dense(scale), bias)
