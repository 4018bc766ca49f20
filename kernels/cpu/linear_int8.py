"""Linear layers with weights in int8 and activations in float32, as good as exact.

Where the processor has AVX512-VNNI a row of activations becomes fixed-point numbers of 24 bits (`fixed_point`) and all
products and sums are of integers, by AMX where it has that too. A row that has no such form is multiplied in float32;
so is everything on other processors.

GOP/s of one core of an AMD EPYC (Zen 4), float32 -> fixed point; the error of normal random rows (Frobenius, against
float64) is 3e-7 to 5e-7 -> 1.5e-7:

    K x N       1 row       4 rows      16 rows      64 rows      256 rows
    576 x 960   43 -> 69    82 -> 112   98 -> 130    101 -> 135   98 -> 137
    576 x 3072  50 -> 82    88 -> 126   100 -> 136   101 -> 138   94 -> 131
    1536 x 576  46 -> 72    87 -> 122   100 -> 137   103 -> 141   102 -> 141

All layers of the demo base one after the other, milliseconds of two cores of an Intel Xeon (Granite Rapids):

    rows       1     2     4    16    64   256
    VNNI     4.2   3.2   3.6   9.9    36   135
    AMX      3.3   2.9   3.2   5.3    13    36

The demo base has rows with values hundreds of times the others: its logits are 3.6e-6 from those of its dequantised
weights in float32, where sums in float32 are 1.5e-6 from them.
"""

from __future__ import annotations

import numpy as np
import torch

from ..dense_weight import PANEL, DenseWeight
from ..ops import W8A8_MAX_K
from . import amx, linears
from .amx import AMX, leave_tiles, tile_products, use_tiles
from .arrays import TILED, address, aligned, array_at, dense, kind
from .compiled import compiled, inner
from .digits import DIGITS, TILE_ROWS, fixed_point_products
from .epilogue import scaled, scaled_numbers
from .fixed_point import fixed_point, own_fixed_point
from .linears import ONE, STRIP, extent, fetched_beside_tiles, following, part_of_product, row_bands
from .panels import panel_products
from .recording import empty, launch
from .team import ends_share, share_by_thread, spaced, thread_count

ROWS = TILE_ROWS // DIGITS
TILED_ROWS = amx.ROWS // DIGITS
CACHED_CODES = 131072
"""Bytes of digits worked on together: a share of the second-level cache."""
PART_PRODUCTS = 250_000
"""Products in one part of the work: about 3 microseconds of one core."""
PART_WEIGHTS = 100_000
"""Weights in one part where few rows share them: as long, since they come from memory."""


@inner
def _columns(  # type: ignore[no-untyped-def]
    thread, part, parts, threads, bands, ready, out, all_codes, all_scales, x, w, panels, each, scale, bias
):
    """One part of out [rows * size]; `w` (in panels) is flat."""
    (rows, k), step, size = x.shape, all_codes.shape[3], scale.size
    codes, row_scales = own_fixed_point(thread, ready, all_codes, all_scales, x, k)
    top, bottom, begin, end = part_of_product(part, parts, bands, rows, panels)
    stop = end if ends_share(part, parts, threads) else panels
    block = max(1, CACHED_CODES // (k * DIGITS * ROWS)) * ROWS
    sums = np.empty(ROWS * STRIP * PANEL, np.float32)
    for first in range(top, bottom, block):
        last = min(first + block, bottom)
        for q in range(begin, end, STRIP):
            count, n = min(STRIP, end - q), q * PANEL
            width = min(count * PANEL, size - n)
            for t in range(first, last, ROWS):
                height = min(ROWS, last - t)
                soon = following(q, count, stop, t - first, last - first, each)
                fixed_point_products(sums, STRIP * PANEL, codes, t, step, height, w, q * each, count, k, soon)
                for m in range(t, t + height):
                    place, factor = (m - t) * STRIP * PANEL, row_scales[m]
                    if factor == 0:
                        panel_products(
                            sums[place:], STRIP * PANEL, x.reshape(rows * k), m * k, k, np.int64(1), w,
                            q * each, count, k, soon,
                        )  # fmt: skip
                        factor = ONE
                    scaled(out, m * size + n, sums, place, factor, scale, bias, n, width)


@inner
def _columns_in_tiles(  # type: ignore[no-untyped-def]
    thread, part, parts, threads, bands, ready, out, all_codes, all_scales, x, w, panels, each, scale, bias
):
    """The same by way of `amx`."""
    (rows, k), step, size = x.shape, all_codes.shape[3], scale.size
    codes, row_scales = own_fixed_point(thread, ready, all_codes, all_scales, x, k)
    columns = STRIP * PANEL
    top, bottom, begin, end = part_of_product(part, parts, bands, rows, panels)
    stop = end if ends_share(part, parts, threads) else panels
    totals, sums = aligned(4 * amx.ROWS * columns).view(np.int32), np.empty(columns, np.float32)
    use_tiles()
    for q in range(begin, end, STRIP):
        count, n = min(STRIP, end - q), q * PANEL
        width = min(count * PANEL, size - n)
        for t in range(top, bottom, TILED_ROWS):
            height = min(TILED_ROWS, bottom - t)
            soon, lines = fetched_beside_tiles(q, count, stop, t - top, height, bottom - top, each)
            tile_products(
                totals, columns, codes, t * DIGITS * step, step, height * DIGITS, w, q * each, count, k, soon, lines
            )  # fmt: skip
            for m in range(t, t + height):
                at, factor = m * size + n, row_scales[m]
                if factor == 0:
                    panel_products(
                        sums, columns, x.reshape(rows * k), m * k, k, np.int64(1), w, q * each, count, k, q * each
                    )  # fmt: skip
                    scaled(out, at, sums, 0, ONE, scale, bias, n, width)
                else:
                    place = (m - t) * DIGITS * columns
                    scaled_numbers(out, at, totals, place, columns, factor, scale, bias, n, width)
    leave_tiles()


@inner
def _operands(words, out, x, rows, w, panels, each, size, scale, bias, k):  # type: ignore[no-untyped-def]
    """What both take after the part and the parts."""
    real = np.float32(0)
    values, bands, threads = array_at(x, real, (rows, k)), row_bands(words, rows), thread_count(words)
    codes, row_scales = fixed_point(words, values, k, bands)
    return (
        threads, bands, spaced(threads), array_at(out, real, (rows * size,)), codes, row_scales, values,
        array_at(w, TILED, (panels * each,)), panels, each, array_at(scale, real, (size,)),
        array_at(bias, real, (size if bias else 0,)),
    )  # fmt: skip


@compiled
def _product(words, parts, out, x, rows, w, panels, each, size, scale, bias, k):  # type: ignore[no-untyped-def]
    operands = _operands(words, out, x, rows, w, panels, each, size, scale, bias, k)
    bands = operands[1]
    share_by_thread(words, bands * max(1, parts // bands), _columns, operands)


@compiled
def _product_in_tiles(words, parts, out, x, rows, w, panels, each, size, scale, bias, k):  # type: ignore[no-untyped-def]
    operands = _operands(words, out, x, rows, w, panels, each, size, scale, bias, k)
    bands = operands[1]
    share_by_thread(words, bands * max(1, parts // bands), _columns_in_tiles, operands)


def linear_int8(
    x: torch.Tensor, weight: DenseWeight, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """y[t, n] = scale[n] * sum_k x[t, k] * weight[n, k] + bias[n]"""
    if kind(weight) is not TILED or weight.shape[1] > W8A8_MAX_K:
        return linears.linear_scaled(x, weight, scale, bias)
    rows, (size, k) = x.shape[0], weight.shape
    out = empty(rows, size)
    if rows and size:
        values, scale, bias = dense(x), dense(scale), None if bias is None else dense(bias)
        parts = max(rows * size * k // PART_PRODUCTS, size * k // PART_WEIGHTS)
        parts = max(1, min(parts, size // (STRIP * PANEL)))
        product = _product_in_tiles if AMX else _product
        launch(
            product, parts, out.data_ptr(), values.data_ptr(), rows, weight.values.data_ptr(),
            *extent(weight), size,
            scale.data_ptr(), address(bias), k,
        )  # fmt: skip
    return out if x.dtype is torch.float32 else out.to(x.dtype)
