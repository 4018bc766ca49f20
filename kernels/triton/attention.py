"""Paged attention over block tables: decodes and prefill chunks of mixed lengths, query heads of one key head packed.

Every row's context is cut into parts of PART tokens, counted from position 0; within a part the softmax runs online
over steps of BLOCK_N tokens; parts are then merged in order. Sequences with one row (decodes) take a program for each
part and a second launch merges; chunks of several rows walk their parts in one program and merge in registers by the
same arithmetic. **Order of sums**: of a row's own context alone. The weights are summed by a product with ones, whose
order is along the tokens as for the values, where a reduction's would depend on the tile.

Sources: FlashAttention-2 (Dao 2023, arXiv 2307.08691) and its split-KV decoding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..ops import AttentionBatch
from ..pool import Pool
from .launch import REGISTERS, cdiv, launch, next_power_of_2

PART = 256
"""Tokens of context in one part."""
STEP_BYTES = 16384
"""Of keys in one step, and of values: the stages of both stay below 99 KiB."""
STEP = 32
"""Tokens in one step at most."""
PREFILL_ROWS, ROWS_WIDTH = 64, 128
"""Packed query rows of a chunk's program, (row, query head of one key head), for heads up to this wide (padded). Half
as many for wider heads, and over an int8 cache, whose values are widened in registers. With more rows, or with more
tokens in a step, prefill keeps values on the stack on one of the chips or with one of the versions of triton."""
DECODE_WARPS, PREFILL_WARPS = 4, 8
STAGES = 5
"""Of the loop over steps: block ids are fetched two stages ahead of keys and values, so that two steps of these fly."""
LOG2E = 1.4426950408889634


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    most, weight_sum, mixed, queries, keys, values, key_scales, value_scales, table, first, end, position, scale,
    block_stride,
    DIAGONAL: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_N more tokens, from `first` up to `end` at most, join the online softmax; scores are in base 2.

    DIAGONAL: some rows do not see all of them. What such a row does not see has weight 0, but 0 times NaN is NaN: so
    tokens whose values are not finite are cleared, and whoever does see them gets NaN.

    Codes of an int8 cache are exact in every float dtype: a key's scale multiplies the score; values are scaled before
    they are rounded to the queries' dtype, because weights times scales would be too small for it.
    """
    token = first + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, PAD_D)
    there = token < end
    block = tl.load(table + token // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    place = (block * block_stride + token % BLOCK_SIZE * D)[:, None] + dim[None, :]
    mask = there[:, None] & (dim < D)[None, :]
    key = tl.load(keys + place, mask=mask, other=0.0).to(queries.dtype)
    score = tl.dot(queries, tl.trans(key), input_precision=PRECISION) * scale
    value = tl.load(values + place, mask=mask, other=0.0)
    if key_scales is not None:
        scale_place = block * (block_stride // 4) + token % BLOCK_SIZE
        score = score * tl.load(key_scales + scale_place, mask=there, other=0.0)[None, :]
        value_scale = tl.load(value_scales + scale_place, mask=there, other=0.0)
        value = (value.to(tl.float32) * value_scale[:, None]).to(queries.dtype)
    if DIAGONAL:
        wide = value.to(tl.float32)
        broken = tl.max((tl.abs(wide) < float("inf")).to(tl.int32) ^ 1, axis=1) > 0
        value = tl.where(broken[:, None], 0.0, wide).to(value.dtype)
        score = tl.where(broken[None, :], float("nan"), score)
        score = tl.where(token[None, :] <= position[:, None], score, float("-inf"))
    score = tl.where(there[None, :], score, float("-inf"))
    new_most = tl.maximum(most, tl.max(score, axis=1))
    anchor = tl.where(new_most == float("-inf"), 0.0, new_most)
    weight = tl.exp2(score - anchor[:, None]).to(queries.dtype)
    fade = tl.exp2(most - anchor)
    ones = tl.full((BLOCK_N, 16), 1.0, tl.float32).to(queries.dtype)
    sums = tl.dot(weight, ones, input_precision=PRECISION)  # every column is the sum
    weight_sum = weight_sum * fade + tl.sum(tl.where(tl.arange(0, 16)[None, :] == 0, sums, 0.0), axis=1)
    mixed = tl.dot(weight, value.to(queries.dtype), mixed * fade[:, None], input_precision=PRECISION)
    return new_most, weight_sum, mixed


@triton.jit
def _scales(scales, layer, layer_stride, head, HK: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a head's scales of keys begin in a layer of an int8 cache, which `layer_stride` bytes are."""
    return scales + layer * (layer_stride // 4) + HK * BLOCK_SIZE * D // 2 + head * BLOCK_SIZE


@triton.jit
def _merge(most, weight_sum, mixed, part_most, part_sum, part_mixed):  # type: ignore[no-untyped-def]
    """One more part joins what was merged so far."""
    new_most = tl.maximum(most, part_most)
    anchor = tl.where(new_most == float("-inf"), 0.0, new_most)
    fade = tl.exp2(most - anchor)
    part_fade = tl.exp2(part_most - anchor)
    return (
        new_most,
        weight_sum * fade + part_sum * part_fade,
        mixed * fade[:, None] + part_mixed * part_fade[:, None],
    )


@triton.jit(do_not_specialize=["table_stride", "layer", "parts"])
def _decode(  # type: ignore[no-untyped-def]
    q, pool, scales, block_tables, cu_seqlens, context_lens, out, part_mixed, part_stats, scale,
    table_stride, layer, layer_stride, block_stride, parts, q_stride,
    SPLIT: tl.constexpr, H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of the context of one single-row sequence, for the query heads of one key head."""
    sequence, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(cu_seqlens + sequence)
    length = tl.load(context_lens + sequence)
    if (tl.load(cu_seqlens + sequence + 1) - row != 1) | (part * PART >= length):
        return
    GROUP: tl.constexpr = H // HK
    member = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, PAD_D)
    query_head = head * GROUP + member
    mask = (member < GROUP)[:, None] & (dim < D)[None, :]
    queries = tl.load(
        q + row.to(tl.int64) * q_stride + query_head[:, None] * D + dim[None, :], mask=mask, other=0.0
    )
    keys = pool + layer * layer_stride + head * (BLOCK_SIZE * D)
    values = keys + HK * BLOCK_SIZE * D
    key_scales, value_scales = scales, scales
    if scales is not None:
        key_scales = _scales(scales, layer, layer_stride, head, HK, D, BLOCK_SIZE)
        value_scales = key_scales + HK * BLOCK_SIZE
    table = block_tables + sequence.to(tl.int64) * table_stride
    most = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_M, PAD_D), dtype=tl.float32)
    end = tl.minimum(part * PART + PART, length)
    for first in range(part * PART, end, BLOCK_N):
        most, weight_sum, mixed = _step(
            most, weight_sum, mixed, queries, keys, values, key_scales, value_scales, table, first, end, member, scale,
            block_stride, False, D, PAD_D, BLOCK_SIZE, BLOCK_N, PRECISION,
        )  # fmt: skip
    if SPLIT:
        target = (sequence.to(tl.int64) * parts + part) * H + query_head
        tl.store(part_mixed + target[:, None] * D + dim[None, :], mixed, mask=mask)
        tl.store(part_stats + target * 2, most, mask=member < GROUP)
        tl.store(part_stats + target * 2 + 1, weight_sum, mask=member < GROUP)
    else:
        target = row.to(tl.int64) * H + query_head
        tl.store(out + target[:, None] * D + dim[None, :], mixed / weight_sum[:, None], mask=mask)


@triton.jit(do_not_specialize=["parts"])
def _merge_parts(  # type: ignore[no-untyped-def]
    out, cu_seqlens, context_lens, part_mixed, part_stats, parts,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The parts that `_decode` left, in order."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(cu_seqlens + sequence)
    if tl.load(cu_seqlens + sequence + 1) - row != 1:
        return
    length = tl.load(context_lens + sequence)
    GROUP: tl.constexpr = H // HK
    member = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, PAD_D)
    query_head = head * GROUP + member
    live = member < GROUP
    mask = live[:, None] & (dim < D)[None, :]
    most = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_M, PAD_D), dtype=tl.float32)
    for part in range(tl.cdiv(length, PART)):
        source = (sequence.to(tl.int64) * parts + part) * H + query_head
        part_most = tl.load(part_stats + source * 2, mask=live, other=0.0)
        part_sum = tl.load(part_stats + source * 2 + 1, mask=live, other=1.0)
        values = tl.load(part_mixed + source[:, None] * D + dim[None, :], mask=mask, other=0.0)
        most, weight_sum, mixed = _merge(most, weight_sum, mixed, part_most, part_sum, values)
    target = row.to(tl.int64) * H + query_head
    tl.store(out + target[:, None] * D + dim[None, :], mixed / weight_sum[:, None], mask=mask)


@triton.jit(do_not_specialize=["table_stride", "layer"])
def _prefill(  # type: ignore[no-untyped-def]
    q, pool, scales, block_tables, cu_seqlens, context_lens, out, scale,
    table_stride, layer, layer_stride, block_stride, q_stride,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PART: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_Q rows of one chunk, for the query heads of one key head: all parts of their context."""
    sequence, head = tl.program_id(1), tl.program_id(2)
    first_row = tl.load(cu_seqlens + sequence)
    count = tl.load(cu_seqlens + sequence + 1) - first_row
    start = tl.program_id(0) * BLOCK_Q
    if (count == 1) | (start >= count):
        return
    length = tl.load(context_lens + sequence)
    GROUP: tl.constexpr = H // HK
    packed = tl.arange(0, BLOCK_M)
    index = start + packed // GROUP
    live = (packed < BLOCK_Q * GROUP) & (index < count)
    query_head = head * GROUP + packed % GROUP
    position = length - count + index
    dim = tl.arange(0, PAD_D)
    mask = live[:, None] & (dim < D)[None, :]
    row = (first_row + index).to(tl.int64)
    queries = tl.load(q + (row * q_stride + query_head * D)[:, None] + dim[None, :], mask=mask, other=0.0)
    keys = pool + layer * layer_stride + head * (BLOCK_SIZE * D)
    values = keys + HK * BLOCK_SIZE * D
    key_scales, value_scales = scales, scales
    if scales is not None:
        key_scales = _scales(scales, layer, layer_stride, head, HK, D, BLOCK_SIZE)
        value_scales = key_scales + HK * BLOCK_SIZE
    table = block_tables + sequence.to(tl.int64) * table_stride
    last = tl.minimum(length, length - count + start + BLOCK_Q)
    seen_by_all = length - count + start + 1
    most = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_M, PAD_D), dtype=tl.float32)
    for part in range(0, last, PART):
        part_most = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        part_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
        part_mixed = tl.zeros((BLOCK_M, PAD_D), dtype=tl.float32)
        end = tl.minimum(part + PART, last)
        diagonal = part + tl.maximum(tl.minimum(end, seen_by_all) - part, 0) // BLOCK_N * BLOCK_N
        for first in range(part, diagonal, BLOCK_N):
            part_most, part_sum, part_mixed = _step(
                part_most, part_sum, part_mixed, queries, keys, values, key_scales, value_scales, table, first, end,
                position, scale, block_stride, False, D, PAD_D, BLOCK_SIZE, BLOCK_N, PRECISION,
            )  # fmt: skip
        for first in tl.range(
            diagonal, end, BLOCK_N, num_stages=1
        ):  # one or two steps: nothing to run ahead of
            part_most, part_sum, part_mixed = _step(
                part_most, part_sum, part_mixed, queries, keys, values, key_scales, value_scales, table, first, end,
                position, scale, block_stride, True, D, PAD_D, BLOCK_SIZE, BLOCK_N, PRECISION,
            )  # fmt: skip
        most, weight_sum, mixed = _merge(most, weight_sum, mixed, part_most, part_sum, part_mixed)
    target = out + (row * H + query_head)[:, None] * D + dim[None, :]
    tl.store(target, mixed / weight_sum[:, None], mask=mask)


def paged_attention(
    q: torch.Tensor, pool: Pool, layer: int, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """out[i, h] = softmax_j(scale * q[i, h] . k[j, h']) @ v[:, h'] over j up to row i's own position"""
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    if q.stride(2) != 1 or q.stride(1) != dim:
        q = q.contiguous()
    layout = pool.layout
    elements, width = pool.elements(layout.kv_dtype), layout.kv_dtype.itemsize
    scales = pool.elements(torch.float32) if layout.quantised else None
    sequences = batch.context_lens.shape[0]
    group = heads // layout.num_kv_heads
    pad_d = max(16, next_power_of_2(dim))
    heads_shape = {"H": heads, "HK": layout.num_kv_heads, "D": dim, "PAD_D": pad_d, "PART": PART}
    chunk_rows = PREFILL_ROWS if pad_d <= ROWS_WIDTH and not layout.quantised else PREFILL_ROWS // 2
    tile: dict[str, Any] = {
        "BLOCK_SIZE": layout.block_size,
        "BLOCK_N": max(16, min(STEP, STEP_BYTES // (pad_d * max(width, q.element_size())))),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_stages": STAGES,
    }
    rows = max(16, next_power_of_2(group))
    # The layer's number and its stride apart: their product is then known to be aligned, whatever the layer.
    place = (batch.block_tables.stride(0), layer, layout.layer_bytes // width, layout.block_bytes // width)
    most_rows = tokens if batch.max_query_len is None else batch.max_query_len
    if most_rows > 1:
        block_m = max(chunk_rows, rows)
        block_q = block_m // group
        launch(
            _prefill, (cdiv(most_rows, block_q), sequences, layout.num_kv_heads),
            q, elements, scales, batch.block_tables, batch.cu_seqlens_q, batch.context_lens, out, scale * LOG2E,
            *place, q.stride(0), **heads_shape, **tile, BLOCK_Q=block_q, BLOCK_M=block_m, num_warps=PREFILL_WARPS,
            maxnreg=REGISTERS,
        )  # fmt: skip
        if batch.max_query_len == tokens:
            return out  # one sequence has all rows: no decodes beside it
    parts = max(1, cdiv(batch.block_tables.shape[1] * layout.block_size, PART))
    part_mixed = torch.empty((sequences, parts, heads, dim), dtype=torch.float32, device=q.device)
    part_stats = torch.empty((sequences, parts, heads, 2), dtype=torch.float32, device=q.device)
    launch(
        _decode, (sequences, layout.num_kv_heads, parts),
        q, elements, scales, batch.block_tables, batch.cu_seqlens_q, batch.context_lens, out, part_mixed, part_stats,
        scale * LOG2E, *place, parts, q.stride(0), **heads_shape, **tile, SPLIT=parts > 1, BLOCK_M=rows,
        num_warps=DECODE_WARPS,
    )  # fmt: skip
    if parts > 1:
        launch(
            _merge_parts, (sequences, layout.num_kv_heads),
            out, batch.cu_seqlens_q, batch.context_lens, part_mixed, part_stats, parts,
            **heads_shape, BLOCK_M=rows, num_warps=DECODE_WARPS,
        )  # fmt: skip
    return out
