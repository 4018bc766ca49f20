"""Adapter deltas for any mix of adapters and rows, from the rows of A and B where they lie in the pool.

Shrink: each (segment, module) multiplies its rows of x by its rows of A into a small scratch of rank sums. Expand:
these times its rows of B are added to `out`. Where every row has one adapter, a thread takes a segment's rows through
both, reads A and B once and waits for nobody. Else, and where there are few segments, these are two passes: in the
second whoever has some columns of `out` adds all segments to them, in order, so that a row with several adapters gets
its deltas in the order of its segments. The bits are the same.

16 rows over 8 adapters of ranks 4 to 16, all layers of the demo base on two threads of a Zen 4: 3.8 ms in two passes,
2.9 segment by segment; prompts of 256 rows 14.0 and 11.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from ..ops import ADAPTER_FORMS, LoraBatch
from ..pool import ROW_ALIGN, Pool
from .arrays import KINDS, address, array_at, dense
from .compiled import compiled, inner
from .products import row_products
from .recording import launch
from .team import share, thread_count
from .vector_ir import LANES, WIDEST, add_weighted_rows, fma, load, store

SHRINK_RANKS, SHRINK_PAIRS = 8, 32
"""A unit of the first pass: so many rows of A times so many rows of x."""
COLUMNS = 384
"""A unit of the second pass: at most so many columns of `out`, for all segments. With 16 rows over 8 adapters both
passes take 0.2 to 0.27 of the time of a step's products, as with 576 to 1536; with 192, where B is read in shorter
pieces, 0.32."""
PART_PRODUCTS = 50_000
"""Products of one pass in one part of the work: about 5 microseconds of one core, which mostly waits for memory."""

F32, F16 = ADAPTER_FORMS.index(torch.float32), ADAPTER_FORMS.index(torch.float16)
KINDS_F16, KINDS_BF16 = KINDS[torch.float16], KINDS[torch.bfloat16]


@inner
def _plan(ranks, slots, starts, layer, modules):  # type: ignore[no-untyped-def]
    """Where the rank sums of each (segment, module) begin in the scratch: int64 [G * modules + 1]."""
    sums_at = np.zeros(slots.size * modules.size + 1, np.int64)
    for g in range(slots.size):
        pairs = np.int64(starts[g + 1]) - np.int64(starts[g])
        for i in range(modules.size):
            entry = g * modules.size + i
            sums_at[entry + 1] = sums_at[entry] + pairs * ranks[slots[g], layer, modules[i]]
    return sums_at


@inner
def _shrink_unit(  # type: ignore[no-untyped-def]
    sums, sum_rows, x, x_rows, count, pool, a_rows, rows, first, width, k
):
    """sums[sum_rows[m] + j] = x[x_rows[m]] . A[j] for m < `count` and the `width` rows of A from entry `first` on."""
    per_unit = ROW_ALIGN // pool.itemsize
    for j in range(width):
        a_rows[j] = np.int64(rows[first + j]) * per_unit
    row_products(sums, sum_rows, 0, x, x_rows, 0, count, pool, a_rows, 0, width, k, width * k)


@inner
def _shrink(  # type: ignore[no-untyped-def]
    part, parts, sums, sums_at, x, pool, pool_f16, pool_bf16, form, forms, ranks, first_row, scales, rows, pair_rows,
    pair_weights, starts, slots, layer, modules, k,
):  # fmt: skip
    """sums[pair, r] = weight * scale * x[row] . A[r], for every `parts`-th unit beginning with number `part`."""
    x_rows, sum_rows = np.empty(SHRINK_PAIRS, np.int64), np.empty(SHRINK_PAIRS, np.int64)
    a_rows = np.empty(SHRINK_RANKS, np.int64)
    unit = 0
    for g in range(slots.size):
        for i in range(modules.size):
            slot, module = slots[g], modules[i]
            rank, first = int(ranks[slot, layer, module]), int(first_row[slot, layer, module])
            base, held = sums_at[g * modules.size + i], forms[slot] if forms.size else form
            for r in range(0, rank, SHRINK_RANKS):
                for p in range(starts[g], starts[g + 1], SHRINK_PAIRS):
                    unit += 1
                    if (unit - 1) % parts != part:
                        continue
                    width, count = min(SHRINK_RANKS, rank - r), min(SHRINK_PAIRS, int(starts[g + 1]) - p)
                    for m in range(count):
                        x_rows[m] = np.int64(pair_rows[p + m]) * k
                        sum_rows[m] = base + (p + m - starts[g]) * rank + r
                    if held == F32:
                        _shrink_unit(
                            sums, sum_rows, x, x_rows, count, pool, a_rows, rows, first + r, width, k
                        )
                    elif held == F16:
                        _shrink_unit(
                            sums, sum_rows, x, x_rows, count, pool_f16, a_rows, rows, first + r, width, k
                        )
                    else:
                        _shrink_unit(
                            sums, sum_rows, x, x_rows, count, pool_bf16, a_rows, rows, first + r, width, k
                        )
                    for m in range(count):
                        factor = pair_weights[p + m] * scales[slot, layer, module]
                        for j in range(sum_rows[m], sum_rows[m] + width):
                            sums[j] *= factor


@inner
def _add_columns(out, outs, sums, sum_rows, pool, b_rows, rank, begin, end):  # type: ignore[no-untyped-def]
    """out[o + n] += sum_r sums[s + r] * B[r][n] for the rows (o, s) and n from begin to end."""
    n = begin
    while n + WIDEST * LANES <= end:
        add_weighted_rows(out, outs, sums, sum_rows, pool, b_rows, 0, rank, n, WIDEST, WIDEST * LANES)
        n += WIDEST * LANES
    while n + LANES <= end:
        add_weighted_rows(out, outs, sums, sum_rows, pool, b_rows, 0, rank, n, 1, LANES)
        n += LANES
    while n < end:
        for m in range(len(outs)):
            delta = np.float32(0.0)
            for r in range(rank):
                delta = fma(load(sums, sum_rows[m] + r), load(pool, b_rows[r] + n), delta)
            store(out, outs[m] + n, load(out, outs[m] + n) + delta)
        n += 1


@inner
def _expand_unit(  # type: ignore[no-untyped-def]
    out, out_at, out_step, sums, base, pair_rows, p, last, pool, b_rows, rows, first, rank, begin, end
):
    """out[out_at + row * out_step + n] += sums[base:] @ B for the pairs p to last and the columns n from begin to end.

    The columns of B are those of the `rank` entries from `first` on.
    """
    per_unit = ROW_ALIGN // pool.itemsize
    for r in range(rank):
        b_rows[r] = np.int64(rows[first + r]) * per_unit
    while p < last:
        o0 = out_at + pair_rows[p] * out_step
        if last - p >= 2:
            o1 = out_at + pair_rows[p + 1] * out_step
            _add_columns(out, (o0, o1), sums, (base, base + rank), pool, b_rows, rank, begin, end)
            p, base = p + 2, base + 2 * rank
        else:
            _add_columns(out, (o0,), sums, (base,), pool, b_rows, rank, begin, end)
            p, base = p + 1, base + rank


@inner
def _both(  # type: ignore[no-untyped-def]
    out, out_step, x, k, pool, first, rank, size, at, factor, rows, pair_rows, pair_weights, p, last, sums, sum_rows,
    x_rows, entries,
):  # fmt: skip
    """out[row, at : at + size] += weight * factor * x[row] @ A.T @ B for the pairs p to last, all of different rows."""
    per_unit, count = ROW_ALIGN // pool.itemsize, last - p
    for m in range(count):
        x_rows[m], sum_rows[m] = np.int64(pair_rows[p + m]) * k, m * rank
    for j in range(rank):
        entries[j] = np.int64(rows[first + j]) * per_unit
    to_b = np.int64(rows[first + rank]) * per_unit - entries[0]
    row_products(sums, sum_rows, 0, x, x_rows, 0, count, pool, entries, 0, rank, k, to_b)
    for m in range(count):
        weighed = pair_weights[p + m] * factor
        for j in range(m * rank, (m + 1) * rank):
            sums[j] *= weighed
    _expand_unit(
        out, at, out_step, sums, np.int64(0), pair_rows, p, last, pool, entries, rows, first + rank, rank,
        np.int64(0), size,
    )  # fmt: skip


@inner
def _segments(  # type: ignore[no-untyped-def]
    part, parts, unit_pairs, unit_segments, out, out_step, x, pool, pool_f16, pool_bf16, form, forms, ranks, first_row,
    scales, rows, pair_rows, pair_weights, starts, slots, layer, modules, offsets, k,
):  # fmt: skip
    """One part of the units: up to `SHRINK_PAIRS` pairs of a segment, from unit_pairs on, for all modules."""
    highest = 0
    for g in range(slots.size):
        for i in range(modules.size):
            highest = max(highest, int(ranks[slots[g], layer, modules[i]]))
    sums, entries = np.empty(SHRINK_PAIRS * highest, np.float32), np.empty(highest, np.int64)
    x_rows, sum_rows = np.empty(SHRINK_PAIRS, np.int64), np.empty(SHRINK_PAIRS, np.int64)
    units = unit_pairs.size
    for unit in range(units * part // parts, units * (part + 1) // parts):
        g, p = unit_segments[unit], unit_pairs[unit]
        slot, last = slots[g], min(p + SHRINK_PAIRS, np.int64(starts[g + 1]))
        held = forms[slot] if forms.size else form
        for i in range(modules.size):
            module, at, size = modules[i], offsets[i], offsets[i + 1] - offsets[i]
            rank, first = np.int64(ranks[slot, layer, module]), np.int64(first_row[slot, layer, module])
            factor = scales[slot, layer, module]
            if rank == 0:
                continue
            if held == F32:
                _both(
                    out, out_step, x, k, pool, first, rank, size, at, factor, rows, pair_rows, pair_weights, p, last,
                    sums, sum_rows, x_rows, entries,
                )  # fmt: skip
            elif held == F16:
                _both(
                    out, out_step, x, k, pool_f16, first, rank, size, at, factor, rows, pair_rows, pair_weights, p,
                    last, sums, sum_rows, x_rows, entries,
                )  # fmt: skip
            else:
                _both(
                    out, out_step, x, k, pool_bf16, first, rank, size, at, factor, rows, pair_rows, pair_weights, p,
                    last, sums, sum_rows, x_rows, entries,
                )  # fmt: skip


@inner
def _units(pair_rows, starts, num_rows):  # type: ignore[no-untyped-def]
    """(first pair, segment) of every unit, in the order of rows; none where a row has several adapters."""
    taken = np.zeros(num_rows, np.bool_)
    for row in pair_rows:
        if taken[row]:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        taken[row] = True
    count = 0
    for g in range(starts.size - 1):
        count += (starts[g + 1] - starts[g] + SHRINK_PAIRS - 1) // SHRINK_PAIRS
    pairs, segments, first_rows = (
        np.empty(count, np.int64),
        np.empty(count, np.int64),
        np.empty(count, np.int64),
    )
    unit = 0
    for g in range(starts.size - 1):
        for p in range(starts[g], starts[g + 1], SHRINK_PAIRS):
            pairs[unit], segments[unit], first_rows[unit] = p, g, pair_rows[p]
            unit += 1
    order = np.argsort(first_rows)
    return pairs[order], segments[order]


@inner
def _strip(size):  # type: ignore[no-untyped-def]
    """Columns of a unit of a module with `size` of them: about as many in each, and whole tiles."""
    tile, units = 4 * LANES, (size + COLUMNS - 1) // COLUMNS
    return (size + units * tile - 1) // (units * tile) * tile


@inner
def _expand(  # type: ignore[no-untyped-def]
    part, parts, out, out_step, sums, sums_at, pool, pool_f16, pool_bf16, form, forms, ranks, first_row, rows,
    pair_rows, starts, slots, layer, modules, offsets,
):  # fmt: skip
    """out[row, columns] += sums[pair] @ B, for every `parts`-th unit of columns beginning with number `part`."""
    highest = 0
    for g in range(slots.size):
        for i in range(modules.size):
            highest = max(highest, int(ranks[slots[g], layer, modules[i]]))
    b_rows = np.empty(highest, np.int64)
    unit = 0
    for i in range(modules.size):
        size, at = offsets[i + 1] - offsets[i], offsets[i]
        strip = _strip(size)
        for begin in range(0, size, strip):
            unit += 1
            if (unit - 1) % parts != part:
                continue
            end = min(begin + strip, size)
            for g in range(slots.size):
                slot, module = slots[g], modules[i]
                rank = np.int64(ranks[slot, layer, module])
                if rank == 0:
                    continue
                first, base = np.int64(first_row[slot, layer, module]) + rank, sums_at[g * modules.size + i]
                p, last, held = (
                    np.int64(starts[g]),
                    np.int64(starts[g + 1]),
                    forms[slot] if forms.size else form,
                )
                if held == F32:
                    _expand_unit(
                        out, at, out_step, sums, base, pair_rows, p, last, pool, b_rows, rows, first, rank, begin, end
                    )  # fmt: skip
                elif held == F16:
                    _expand_unit(
                        out, at, out_step, sums, base, pair_rows, p, last, pool_f16, b_rows, rows, first, rank,
                        begin, end,
                    )  # fmt: skip
                else:
                    _expand_unit(
                        out, at, out_step, sums, base, pair_rows, p, last, pool_bf16, b_rows, rows, first, rank,
                        begin, end,
                    )  # fmt: skip


@compiled
def _add_lora(  # type: ignore[no-untyped-def]
    words, out_address, out_step, x_address, k, num_rows, pool_address, pool_bytes, form, forms_address, ranks_address,
    first_row_address, scales_address, num_slots, num_layers, num_modules, rows_address, num_entries,
    pair_rows_address, pair_weights_address, num_pairs, starts_address, slots_address, num_segments, layer, modules,
    offsets,
):  # fmt: skip
    real, integer, shape = np.float32(0), np.int32(0), (num_slots, num_layers, num_modules)
    out, x = array_at(out_address, real, (num_rows * out_step,)), array_at(x_address, real, (num_rows * k,))
    pool = array_at(pool_address, real, (pool_bytes // 4,))
    pool_f16 = array_at(pool_address, KINDS_F16, (pool_bytes // 2,))
    pool_bf16 = array_at(pool_address, KINDS_BF16, (pool_bytes // 2,))
    forms = array_at(forms_address, integer, (num_slots if forms_address else 0,))
    ranks, first_row = array_at(ranks_address, integer, shape), array_at(first_row_address, integer, shape)
    scales, rows = array_at(scales_address, real, shape), array_at(rows_address, integer, (num_entries,))
    pair_rows = array_at(pair_rows_address, integer, (num_pairs,))
    pair_weights = array_at(pair_weights_address, real, (num_pairs,))
    starts = array_at(starts_address, integer, (num_segments + 1,))
    slots = array_at(slots_address, integer, (num_segments,))
    unit_pairs, unit_segments = _units(pair_rows, starts, num_rows)
    if unit_pairs.size >= 2 * thread_count(words):
        share(
            words, unit_pairs.size, _segments,
            (
                unit_pairs, unit_segments, out, out_step, x, pool, pool_f16, pool_bf16, form, forms, ranks, first_row,
                scales, rows, pair_rows, pair_weights, starts, slots, layer, modules, offsets, k,
            ),
        )  # fmt: skip
        return
    sums_at = _plan(ranks, slots, starts, layer, modules)
    sums = np.empty(sums_at[-1], np.float32)
    if sums.size == 0:
        return
    parts = max(1, min(64, sums.size * k // PART_PRODUCTS))
    share(
        words, parts, _shrink,
        (
            sums, sums_at, x, pool, pool_f16, pool_bf16, form, forms, ranks, first_row, scales, rows, pair_rows,
            pair_weights, starts, slots, layer, modules, k,
        ),
    )  # fmt: skip
    units = 0
    for i in range(modules.size):
        size = offsets[i + 1] - offsets[i]
        units += (size + _strip(size) - 1) // _strip(size)
    share(
        words, min(parts, units), _expand,
        (
            out, out_step, sums, sums_at, pool, pool_f16, pool_bf16, form, forms, ranks, first_row, rows, pair_rows,
            starts, slots, layer, modules, offsets,
        ),
    )  # fmt: skip


@cache
def _as_array(numbers: tuple[int, ...]) -> np.ndarray:
    """A model has four such tuples of modules and of offsets."""
    return np.array(numbers, np.int64)


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    pool: Pool,
    layer: int,
    modules: Sequence[int],
    offsets: Sequence[int],
    lora: LoraBatch,
) -> None:
    """out[row, module's columns] += weight * scale * (x[row] @ A.T) @ B.T"""
    num_pairs = lora.pair_rows.shape[0]
    if num_pairs == 0:
        return
    if out.dtype is not torch.float32 or not out.is_contiguous():
        target = dense(out)
        add_lora(target, x, pool, layer, modules, offsets, lora)
        out.copy_(target)
        return
    tables, values = lora.tables, dense(x)
    num_slots, num_layers, num_modules = tables.ranks.shape
    launch(
        _add_lora, out.data_ptr(), out.shape[1], values.data_ptr(), x.shape[1], x.shape[0],
        pool.memory.data_ptr(), pool.memory.numel(), ADAPTER_FORMS.index(tables.dtype), address(tables.forms),
        tables.ranks.data_ptr(), tables.first_row.data_ptr(), tables.scales.data_ptr(), num_slots,
        num_layers, num_modules, tables.rows.data_ptr(), tables.rows.shape[0], lora.pair_rows.data_ptr(),
        lora.pair_weights.data_ptr(), num_pairs, lora.starts.data_ptr(), lora.slots.data_ptr(),
        lora.slots.shape[0], layer, _as_array(tuple(modules)), _as_array(tuple(offsets)),
    )  # fmt: skip
