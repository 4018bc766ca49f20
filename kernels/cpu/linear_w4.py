"""Linear layers with packed 4 and 8 bit weights and activations in float32.

Where the processor has AVX512-VNNI a row of activations becomes fixed-point numbers of 24 bits (`fixed_point`), whose
products with a group's codes are exact (`packed_digits`). A row that has no such form is multiplied in float32
(`packed_panels`); so is everything on other processors.

In GOP/s, codes of 4 bits in groups of 64, all 30 layers of the demo base after each other, on an AMD EPYC (Zen 5); the
error of normal random rows (Frobenius, against float64) is 1.5e-7 to 1.8e-7 either way:

    rows                         1     2     4     6    16    64   256
    one core, float32           43    69   100   111   116   128   126
    one core, fixed point       64   116   196   214   245   245   254
    two cores, float32          74   126   187   210   225   237   245
    two cores, fixed point     102   179   260   290   369   466   502

and in float32 on a Zen 4:

    one core                    29    48    70    79    79    96    97
    two cores                   52    92   131   140   153   186   197

Where the processor has AMX 4 rows and more go by way of tiles (`packed_tiles`); milliseconds of two cores of an Intel
Xeon (Granite Rapids):

    rows                         1     2     4     6    16    64   256
    VNNI                       2.1   2.4   3.7   5.1  12.0    45   180
    AMX                        3.2   3.3   3.5   4.4   6.3    20    74
"""

from __future__ import annotations

import numpy as np
import torch

from ..dense_weight import PANEL
from ..ops import W8A8_MAX_K
from ..packed_weight import WORD_BITS, PackedWeight
from . import amx
from .amx import AMX, leave_tiles, tile_products, use_tiles
from .arrays import KINDS, address, aligned, array_at, dense
from .compiled import compiled, inner
from .digits import DIGITS, TILE_INPUTS, TILE_ROWS, X86_DIGITS
from .epilogue import scaled
from .fixed_point import fixed_point, own_fixed_point
from .linears import CACHED_VALUES, ONE, PART_VALUES, STRIP, following, part_of_product, row_bands
from .packed_digits import packed_fixed_point_products
from .packed_panels import packed_products
from .packed_tiles import BITS, add_group, fetch, group_bytes, unpack_group
from .panels import ROWS
from .recording import empty, launch
from .team import ends_share, share, share_by_thread, spaced, thread_count

DIGIT_ROWS = TILE_ROWS // DIGITS
"""Rows of fixed-point numbers in a tile."""
CACHED_CODES = 131072
"""Bytes of digits worked on together: a share of the second-level cache."""
PART_PRODUCTS = 150_000
"""Products in one part of the work: about 3 microseconds of one core."""
TILED_ROWS = amx.ROWS // DIGITS
FEWEST_ROWS = 4
"""That are multiplied in tiles of `amx`, for which codes are unpacked."""
UNPACKING = 2
"""What making a float of a code costs, in products."""


@inner
def _float_tile(  # type: ignore[no-untyped-def]
    sums, at, x, x_at, height, codes, scales, zeros, bits, q, count, k, group_size, groups
):
    """Products of `height` rows with `count` panels from q on, to sums[at + m * STRIP * PANEL:]."""
    step, tile = STRIP * PANEL, sums[at:]
    if bits == 4:
        packed_products(
            tile, step, x, x_at, k, height, codes, scales, zeros, q, count, k, group_size, groups, 4
        )
    else:
        packed_products(
            tile, step, x, x_at, k, height, codes, scales, zeros, q, count, k, group_size, groups, 8
        )


@inner
def _fixed_point_tile(  # type: ignore[no-untyped-def]
    sums,
    digits,
    row,
    digits_step,
    factors,
    height,
    codes,
    scales,
    zeros,
    bits,
    q,
    count,
    k,
    group_size,
    groups,
    soon,
):
    step = STRIP * PANEL
    if bits == 4:
        packed_fixed_point_products(
            sums, step, digits, row, digits_step, factors, height, codes, scales, zeros, q, count, k, group_size,
            groups, soon, 4,
        )  # fmt: skip
    else:
        packed_fixed_point_products(
            sums, step, digits, row, digits_step, factors, height, codes, scales, zeros, q, count, k, group_size,
            groups, soon, 8,
        )  # fmt: skip


@inner
def _columns(part, parts, bands, out, x, rows, codes, scales, zeros, bits, group_size, size, bias, k):  # type: ignore[no-untyped-def]
    """One part of out [rows, size] = x [rows, k] @ weight [size, k] transposed + bias."""
    panels, groups = (size + PANEL - 1) // PANEL, (k + group_size - 1) // group_size
    top, bottom, begin, end = part_of_product(part, parts, bands, rows, panels)
    block = max(1, CACHED_VALUES // (k * ROWS)) * ROWS
    step, none = STRIP * PANEL, np.empty(0, np.float32)
    sums = np.empty(ROWS * step, np.float32)
    for first in range(top, bottom, block):
        last = min(first + block, bottom)
        for q in range(begin, end, STRIP):
            count, n = min(STRIP, end - q), q * PANEL
            width, t = min(count * PANEL, size - n), first
            for left in range((last - first + ROWS - 1) // ROWS, 0, -1):
                height = (last - t + left - 1) // left  # tiles of like height
                _float_tile(
                    sums, 0, x, t * k, height, codes, scales, zeros, bits, q, count, k, group_size, groups
                )
                for m in range(height):
                    scaled(out, (t + m) * size + n, sums, m * step, ONE, none, bias, n, width)
                t += height


@inner
def _columns_of_digits(  # type: ignore[no-untyped-def]
    thread, part, parts, threads, bands, ready, out, all_digits, all_factors, x, codes, scales, zeros, bits, group_size,
    size, bias,
):  # fmt: skip
    """The same by way of fixed-point numbers."""
    (rows, k), digits_step = x.shape, all_digits.shape[3]
    digits, factors = own_fixed_point(thread, ready, all_digits, all_factors, x, group_size)
    panels, groups = (size + PANEL - 1) // PANEL, (k + group_size - 1) // group_size
    panel_size = k * bits // WORD_BITS * PANEL
    top, bottom, begin, end = part_of_product(part, parts, bands, rows, panels)
    stop = end if ends_share(part, parts, threads) else panels
    block = max(1, CACHED_CODES // (k * DIGITS * DIGIT_ROWS)) * DIGIT_ROWS
    step, none = STRIP * PANEL, np.empty(0, np.float32)
    sums = np.empty(DIGIT_ROWS * step, np.float32)
    for first in range(top, bottom, block):
        last = min(first + block, bottom)
        for q in range(begin, end, STRIP):
            count, n = min(STRIP, end - q), q * PANEL
            width = min(count * PANEL, size - n)
            for t in range(first, last, DIGIT_ROWS):
                height = min(DIGIT_ROWS, last - t)
                soon = following(q, count, stop, t - first, last - first, panel_size)
                _fixed_point_tile(
                    sums, digits, t, digits_step, factors, height, codes, scales, zeros, bits, q, count, k,
                    group_size, groups, soon,
                )  # fmt: skip
                for m in range(height):
                    if factors[t + m] == 0:
                        _float_tile(
                            sums, m * step, x.reshape(rows * k), (t + m) * k, np.int64(1), codes, scales, zeros, bits,
                            q, count, k, group_size, groups,
                        )  # fmt: skip
                    scaled(out, (t + m) * size + n, sums, m * step, ONE, none, bias, n, width)


@inner
def _columns_in_tiles(  # type: ignore[no-untyped-def]
    thread, part, parts, threads, bands, ready, out, all_digits, all_factors, x, codes, scales, zeros, bits, group_size,
    size, bias,
):  # fmt: skip
    """The same by way of `packed_tiles`."""
    (rows, k), digits_step = x.shape, all_digits.shape[3]
    digits, factors = own_fixed_point(thread, ready, all_digits, all_factors, x, group_size)
    panels, groups = (size + PANEL - 1) // PANEL, (k + group_size - 1) // group_size
    panel_size = k * bits // WORD_BITS * PANEL
    top, bottom, begin, end = part_of_product(part, parts, bands, rows, panels)
    stop = end if ends_share(part, parts, threads) else panels
    step, none = STRIP * PANEL, np.empty(0, np.float32)
    each = group_bytes(STRIP, group_size)
    tiles, totals = aligned(groups * each), aligned(4 * amx.ROWS * step).view(np.int32)
    sums = aligned(4 * TILED_ROWS * step).view(np.float32)
    use_tiles()
    for q in range(begin, end, STRIP):
        count, n = min(STRIP, end - q), q * PANEL
        width = min(count * PANEL, size - n)
        for t in range(top, bottom, TILED_ROWS):
            height = min(TILED_ROWS, bottom - t)
            soon = following(q, count, stop, t - top, bottom - top, panel_size)
            share_of_it = count * panel_size * height // ((bottom - top) * groups)
            for g in range(groups):
                fetch(codes, soon + g * share_of_it, share_of_it)
                place = g * each if bottom - top > TILED_ROWS else 0  # to be read again, or not
                if t == top:
                    unpack_group(tiles, place, codes, zeros, q, count, k, g, group_size, groups)
                tile_products(
                    totals, step, digits, t * DIGITS * digits_step + g * group_size, digits_step, height * DIGITS,
                    tiles, place, (count + 1) // 2 * 2, min(group_size, k - g * group_size), 0, 0,
                )  # fmt: skip
                add_group(sums, totals, step, factors, t, height, scales, q, count, g, groups)
            for m in range(height):
                if factors[t + m] == 0:
                    _float_tile(
                        sums, m * step, x.reshape(rows * k), (t + m) * k, np.int64(1), codes, scales, zeros, bits,
                        q, count, k, group_size, groups,
                    )  # fmt: skip
                scaled(out, (t + m) * size + n, sums, m * step, ONE, none, bias, n, width)
    leave_tiles()


@inner
def _ordered_rows(part, parts, out, x, order):  # type: ignore[no-untyped-def]
    rows, k = out.shape
    for t in range(rows * part // parts, rows * (part + 1) // parts):
        for j in range(k):
            out[t, j] = x[t, order[j]]


@compiled
def _in_order(words, parts, out, x, rows, order, k):  # type: ignore[no-untyped-def]
    """out[t, j] = x[t, order[j]]"""
    real = np.float32(0)
    arrays = array_at(out, real, (rows, k)), array_at(x, real, (rows, k)), array_at(order, np.int64(0), (k,))
    share(words, parts, _ordered_rows, arrays)


@compiled
def _product(  # type: ignore[no-untyped-def]
    words, parts, out, x, rows, codes, scales, kind, zeros, bits, group_size, size, bias, k
):  # fmt: skip
    real, octet, word = np.float32(0), np.uint8(0), np.int32(0)
    full, groups = (size + PANEL - 1) // PANEL * PANEL, (k + group_size - 1) // group_size
    bands = row_bands(words, rows)
    share(
        words, bands * max(1, parts // bands), _columns,
        (
            bands, array_at(out, real, (rows * size,)), array_at(x, real, (rows * k,)), rows,
            array_at(codes, word, (full * k * bits // WORD_BITS,)), array_at(scales, kind, (full * groups,)),
            array_at(zeros, octet, (full * groups,)), bits, group_size, size,
            array_at(bias, real, (size if bias else 0,)), k,
        ),
    )  # fmt: skip


@inner
def _operands(  # type: ignore[no-untyped-def]
    words, out, x, rows, codes, scales, kind, zeros, bits, group_size, size, bias, k
):  # fmt: skip
    """What the functions of digits take after the part and the parts."""
    real, octet, word = np.float32(0), np.uint8(0), np.int32(0)
    full, groups = (size + PANEL - 1) // PANEL * PANEL, (k + group_size - 1) // group_size
    values, bands, threads = array_at(x, real, (rows, k)), row_bands(words, rows), thread_count(words)
    digits, factors = fixed_point(words, values, group_size, bands)
    return (
        threads, bands, spaced(threads), array_at(out, real, (rows * size,)), digits, factors, values,
        array_at(codes, word, (full * k * bits // WORD_BITS,)), array_at(scales, kind, (full * groups,)),
        array_at(zeros, octet, (full * groups,)), bits, group_size, size,
        array_at(bias, real, (size if bias else 0,)),
    )  # fmt: skip


@compiled
def _product_of_digits(  # type: ignore[no-untyped-def]
    words, parts, out, x, rows, codes, scales, kind, zeros, bits, group_size, size, bias, k
):  # fmt: skip
    operands = _operands(words, out, x, rows, codes, scales, kind, zeros, bits, group_size, size, bias, k)
    bands = operands[1]
    share_by_thread(words, bands * max(1, parts // bands), _columns_of_digits, operands)


@compiled
def _product_in_tiles(  # type: ignore[no-untyped-def]
    words, parts, out, x, rows, codes, scales, kind, zeros, bits, group_size, size, bias, k
):  # fmt: skip
    operands = _operands(words, out, x, rows, codes, scales, kind, zeros, bits, group_size, size, bias, k)
    bands = operands[1]
    share_by_thread(words, bands * max(1, parts // bands), _columns_in_tiles, operands)


def linear_w4(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """y[t, n] = sum_j x[t, order[j]] * (codes[n, j] - zeros[n, g]) * scales[n, g] + bias[n]"""
    rows, k = x.shape
    size = weight.out_features
    assert weight.panels_of is not None
    out = empty(rows, size)
    if rows and size:
        values = dense(x)
        if weight.order is not None:
            given, values = values, empty(rows, k)
            parts = max(1, min(rows, rows * k // PART_VALUES))
            launch(_in_order, parts, values.data_ptr(), given.data_ptr(), rows, weight.order.data_ptr(), k)
        bias = None if bias is None else dense(bias)
        parts = max(1, min((rows + UNPACKING) * size * k // PART_PRODUCTS, size // (STRIP * PANEL)))
        product = _product
        if X86_DIGITS and 2 * weight.group_size <= W8A8_MAX_K:
            tiled = weight.bits == BITS and (weight.group_size % TILE_INPUTS == 0 or weight.group_size >= k)
            product = _product_in_tiles if AMX and tiled and rows >= FEWEST_ROWS else _product_of_digits
        launch(
            product, parts, out.data_ptr(), values.data_ptr(), rows, weight.codes.data_ptr(),
            weight.scales.data_ptr(), KINDS[weight.scales.dtype], weight.zeros.data_ptr(), weight.bits,
            weight.group_size, size, address(bias), k,
        )  # fmt: skip
    return out if x.dtype is torch.float32 else out.to(x.dtype)
