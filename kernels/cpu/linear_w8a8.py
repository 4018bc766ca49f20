"""Linear layers with weights and activations in int8: each row of activations has its own scale and outliers.

First every row becomes codes, a scale and a list of outliers: few rows by each thread for itself, since that takes
less than what another core wrote takes to arrive. Then whoever has some part of the output multiplies codes by weights
(integers, exact in any order) and adds each row's outliers in the order of their columns. No row's result depends on
another; what rows share is the work of widening weights.

The weights stay the int8 that `linear_int8` reads. Where the processor multiplies four of them at once (AVX512-VNNI;
tiles of them with AMX) codes are int8, one digit a row (`digits`); elsewhere they are int16 and weights are widened,
once for all rows of a tile. The sums are the same integers, so the results are the same bits. Against float32 x int8,
in GOP/s of one core (AMD EPYC, Zen 3; the better of two turns on a machine that others use too; with an outlier in
every row it loses 2 to 15 %):

    K x N       1 row       4 rows      16 rows      64 rows      256 rows
    576 x 576   30 -> 32    63 -> 79    82 -> 112    90 -> 128    88 -> 127
    576 x 3072  36 -> 53    74 -> 105   86 -> 129    83 -> 129    61 -> 86
    1536 x 576  25 -> 31    65 -> 73    74 -> 88     65 -> 115    82 -> 123

and, four at once, on a Zen 4:

    576 x 960   43 -> 72    82 -> 209   98 -> 317    101 -> 367   98 -> 384
    576 x 3072  50 -> 92    88 -> 255   100 -> 355   101 -> 389   94 -> 385
    1536 x 576  46 -> 65    87 -> 232   100 -> 344   103 -> 385   102 -> 398

All layers of the demo base one after the other, milliseconds of two cores of an Intel Xeon (Granite Rapids):

    rows       1     2     4    16    64   256
    VNNI     3.5   3.7   3.8   6.2    17    63
    AMX      3.6   3.6   3.7   4.3   9.2    24

It is the faster one for 4 rows and more and about as fast for fewer, so nothing has to choose between the two by their
number: a result would then depend on who shares the batch.
"""

from __future__ import annotations

import numpy as np
import torch

from ..dense_weight import PANEL, DenseWeight
from ..ops import W8A8_MAX_K
from . import amx
from .amx import AMX, leave_tiles, tile_products, use_tiles
from .arrays import TILED, address, aligned, array_at, dense, kind
from .compiled import compiled, inner
from .digits import digit_step
from .epilogue import scaled_sums
from .int8_rows import quantise_rows
from .linears import PART_VALUES, STRIP, extent, fetched_beside_tiles, following, part_of_product, row_bands
from .panels import ROWS, panel_products
from .recording import empty, launch
from .team import APART, ends_share, share, share_by_thread, spaced, thread_count
from .vector_ir import LANES, add_weighted_rows, load

COLUMNS = STRIP * PANEL
"""Of the output, worked on together."""
STRIP_GROUPS = COLUMNS // LANES

CACHED_CODES = 65536
"""Codes worked on together (128 KiB: a share of the second-level cache)."""
PART_PRODUCTS = 300_000
"""Products in one part of the second pass: about 5 microseconds of one core."""
PART_WEIGHTS = 100_000
"""Weights in one part where few rows share them: as long, since they come from memory."""


@inner
def _number_columns(columns, places, counts):  # type: ignore[no-untyped-def]
    """How many columns are an outlier in some row, the first so many of `columns`; from here on `places` tells where
    in a table of strips they lie.
    """
    numbers, found = np.full(columns.size, -1, np.int64), 0
    for t in range(counts.size):
        for i in range(counts[t]):
            j = places[t, i]
            if numbers[j] < 0:
                numbers[j], columns[found] = found, j
                found += 1
            places[t, i] = numbers[j] * COLUMNS
    return found


@inner
def _widen_columns(table, columns, w, n, width, each, outputs, inputs):  # type: ignore[no-untyped-def]
    """table[c * COLUMNS + i] = weight[n + i, columns[c]], zeros from i = width on. `n` is where a panel begins."""
    table[:] = np.float32(0)
    for c in range(columns.size):
        within = n // PANEL * each + columns[c] // inputs * (outputs * inputs) + columns[c] % inputs
        for i in range(width):
            place = within + i // outputs * (outputs // PANEL * each) + i % outputs * inputs
            table[c * COLUMNS + i] = load(w, place)


@inner
def _finish_rows(  # type: ignore[no-untyped-def]
    out, first, count, n, width, sums, row_scales, values, places, counts, table, deltas, scale, bias
):
    """Columns n to n + width of `count` rows of out, whose sums of codes are rows of `COLUMNS` each, flat.

    Each row's first counts[t] of values and places are its outliers; the table is `_widen_columns`', deltas are zeros
    and are so again.
    """
    k, flat = values.shape[1], values.reshape(values.size)
    for m in range(count):
        t = first + m
        if counts[t]:
            add_weighted_rows(
                deltas, (0,), flat, (t * k,), table, places[t], 0, counts[t], 0, STRIP_GROUPS, COLUMNS
            )  # fmt: skip
        scaled_sums(out, t * scale.size + n, sums, m * COLUMNS, row_scales[t], deltas, scale, bias, n, width)
        if counts[t]:
            deltas[:] = np.float32(0)


@inner
def _own_codes(copy, found, x, limit, codes, scales, values, places, counts, columns):  # type: ignore[no-untyped-def]
    """Make this copy's codes and the rest unless they are there; its outlier columns. All arguments hold all copies."""
    if found[copy * APART] < 0:
        quantise_rows(0, 1, codes[copy], scales[copy], values[copy], places[copy], counts[copy], x, limit)
        found[copy * APART] = _number_columns(columns[copy], places[copy], counts[copy])
    return columns[copy, : found[copy * APART]]


@inner
def _columns(  # type: ignore[no-untyped-def]
    thread, part, parts, threads, bands, found, out, x, limit, all_codes, all_scales, all_values, all_places,
    all_counts, all_columns, w, panels, each, outputs, inputs, scale, bias,
):  # fmt: skip
    """One part of out [rows, size]; `w` (in panels) is flat.

    What is called all_… is of the rows of x, or there is as much for each thread, and each makes its own when it comes
    to its first part. found[copy * APART]: outlier columns, -1 where they are not counted yet.
    """
    (rows, size), k, (copies, height, step) = out.shape, x.shape[1], all_codes.shape
    copy = thread if copies > 1 else 0
    outlier_columns = _own_codes(
        copy, found, x, limit, all_codes, all_scales, all_values, all_places, all_counts, all_columns
    )
    codes, row_scales, values = all_codes[copy].reshape(height * step), all_scales[copy], all_values[copy]
    places, counts = all_places[copy], all_counts[copy]
    top, bottom, begin, end = part_of_product(part, parts, bands, rows, panels)
    stop = end if ends_share(part, parts, threads) else panels
    block = max(1, CACHED_CODES // (k * ROWS)) * ROWS
    sums = np.empty(ROWS * COLUMNS, np.float32)
    table, deltas = np.empty(outlier_columns.size * COLUMNS, np.float32), np.zeros(COLUMNS, np.float32)
    for first in range(top, bottom, block):
        last = min(first + block, bottom)
        for q in range(begin, end, STRIP):
            count, n = min(STRIP, end - q), q * PANEL
            width, t, tiles = min(count * PANEL, size - n), first, (last - first + ROWS - 1) // ROWS
            _widen_columns(table, outlier_columns, w, n, width, each, outputs, inputs)
            for left in range(tiles, 0, -1):
                height = (last - t + left - 1) // left  # tiles of like height
                soon = following(q, count, stop, t - first, last - first, each)
                panel_products(sums, COLUMNS, codes, t * step, step, height, w, q * each, count, k, soon)
                _finish_rows(
                    out, t, height, n, width, sums, row_scales, values, places, counts, table, deltas, scale, bias
                )  # fmt: skip
                t += height


@inner
def _columns_in_tiles(  # type: ignore[no-untyped-def]
    thread, part, parts, threads, bands, found, out, x, limit, all_codes, all_scales, all_values, all_places,
    all_counts, all_columns, w, panels, each, outputs, inputs, scale, bias,
):  # fmt: skip
    """The same by way of `amx`."""
    (rows, size), k, (copies, height, step) = out.shape, x.shape[1], all_codes.shape
    copy = thread if copies > 1 else 0
    outlier_columns = _own_codes(
        copy, found, x, limit, all_codes, all_scales, all_values, all_places, all_counts, all_columns
    )
    codes, row_scales, values = all_codes[copy].reshape(height * step), all_scales[copy], all_values[copy]
    places, counts = all_places[copy], all_counts[copy]
    top, bottom, begin, end = part_of_product(part, parts, bands, rows, panels)
    stop = end if ends_share(part, parts, threads) else panels
    sums = aligned(4 * amx.ROWS * COLUMNS).view(np.int32)
    table, deltas = np.empty(outlier_columns.size * COLUMNS, np.float32), np.zeros(COLUMNS, np.float32)
    use_tiles()
    for q in range(begin, end, STRIP):
        count, n = min(STRIP, end - q), q * PANEL
        width = min(count * PANEL, size - n)
        _widen_columns(table, outlier_columns, w, n, width, each, outputs, inputs)
        for t in range(top, bottom, amx.ROWS):
            height = min(amx.ROWS, bottom - t)
            soon, lines = fetched_beside_tiles(q, count, stop, t - top, height, bottom - top, each)
            tile_products(sums, COLUMNS, codes, t * step, step, height, w, q * each, count, k, soon, lines)
            _finish_rows(
                out, t, height, n, width, sums, row_scales, values, places, counts, table, deltas, scale, bias
            )  # fmt: skip
    leave_tiles()


@inner
def _operands(words, zero, out_at, x_at, rows, w_at, like, layout, size, scale_at, bias_at, limit, k):  # type: ignore[no-untyped-def]
    """What both take after the part and the parts."""
    real = np.float32(0)
    panels, each, outputs, inputs = layout
    x, w = array_at(x_at, real, (rows, k)), array_at(w_at, like, (panels * each,))
    bands, threads, limit = row_bands(words, rows), thread_count(words), np.int32(limit)
    copies = threads if bands == 1 else 1
    shape = (copies, rows + amx.TILE - 1, digit_step(k, k))  # a tile may begin at the last one
    none = np.full(0, zero)
    codes = aligned(shape[0] * shape[1] * shape[2] * none.itemsize).view(none.dtype).reshape(shape)
    row_scales = np.empty((copies, rows), np.float32)
    values, places = np.empty((copies, rows, k), np.float32), np.empty((copies, rows, k), np.int64)
    counts, columns = np.empty((copies, rows), np.int64), np.empty((copies, k), np.int64)
    found = spaced(copies)
    found[:] = -1
    if copies == 1:
        share(
            words, max(1, min(rows, rows * k // PART_VALUES)), quantise_rows,
            (codes[0], row_scales[0], values[0], places[0], counts[0], x, limit),
        )  # fmt: skip
        found[0] = _number_columns(columns[0], places[0], counts[0])
    return (
        threads, bands, found, array_at(out_at, real, (rows, size)), x, limit, codes, row_scales, values, places,
        counts, columns, w, panels, each, outputs, inputs, array_at(scale_at, real, (size,)),
        array_at(bias_at, real, (size if bias_at else 0,)),
    )  # fmt: skip


@inner
def _parts(bands, rows, size, k):  # type: ignore[no-untyped-def]
    parts = max(1, min(max(rows * size * k // PART_PRODUCTS, size * k // PART_WEIGHTS), size // COLUMNS))
    return bands * max(1, parts // bands)


@compiled
def _product(words, zero, out, x, rows, w, like, layout, size, scale, bias, limit, k):  # type: ignore[no-untyped-def]
    operands = _operands(words, zero, out, x, rows, w, like, layout, size, scale, bias, limit, k)
    share_by_thread(words, _parts(operands[1], rows, size, k), _columns, operands)


@compiled
def _product_in_tiles(words, zero, out, x, rows, w, like, layout, size, scale, bias, limit, k):  # type: ignore[no-untyped-def]
    operands = _operands(words, zero, out, x, rows, w, like, layout, size, scale, bias, limit, k)
    share_by_thread(words, _parts(operands[1], rows, size, k), _columns_in_tiles, operands)


def linear_w8a8(
    x: torch.Tensor, weight: DenseWeight, scale: torch.Tensor, bias: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """y[t, n] = scale[n] * (s[t] * sum_k codes[t, k] * weight[n, k] + sum_j x[t, j] * weight[n, j]) + bias[n]"""
    rows, (size, k) = x.shape[0], weight.shape
    assert k <= W8A8_MAX_K
    out = empty(rows, size)
    if rows and size:
        values, scale, bias = dense(x), dense(scale), None if bias is None else dense(bias)
        limit = np.float32(threshold or np.inf)
        tiled = kind(weight) is TILED
        zero = np.int8(0) if tiled else np.int16(0)
        product = _product_in_tiles if tiled and AMX else _product
        launch(
            product, zero, out.data_ptr(), values.data_ptr(), rows, weight.values.data_ptr(), kind(weight),
            (*extent(weight), *weight.values.shape[2:]), size, scale.data_ptr(), address(bias),
            int(limit.view(np.int32)), k,
        )  # fmt: skip
    return out if x.dtype is torch.float32 else out.to(x.dtype)
