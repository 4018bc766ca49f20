"""Kernels of the linears: few rows over packed weights, many rows over float ones, and the passes beside them.

**Order of sums.** K is cut into parts whose size the weight's shape fixes. Within a part products are added in steps
of STEP in-features, each one `tl.dot` onto the running float32 sum; parts are then added in order, from zero. Few rows
give each part a program of its own and `_finish` adds them; with many rows one program walks all parts and adds in
registers. Rows of a tile never meet, so neither the number of rows nor the tile shows in the result. In 4 bit the
steps alternate: the low halves of 64 bytes, then their high halves; both kernels keep to that.

Sources: split-K with a second pass as in CUTLASS' "parallel split-K"; the interplay of unpacking and tensor cores as in
GPTQ-triton and Marlin (Frantar et al. 2024, arXiv 2408.11743), without their repacking.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _feature(p, half, HALVES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which in-feature of a step the p-th of one product is: bytes of 4 bit codes hold features i and i + 8 of 16."""
    if HALVES == 2:
        return p // 8 * 16 + p % 8 + half * 8
    return p


@triton.jit
def _store(total, out, scale, bias, T, N, t, n, part, out_stride, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """A part's bare sums into out [parts, T, N]; or, not split, the finished tile into out [T, N]."""
    mask = (t < T)[:, None] & (n < N)[None, :]
    row = t.to(tl.int64)
    if SPLIT:
        tl.store(out + (part * T + row)[:, None] * N + n[None, :], total, mask=mask)
    else:
        if scale is not None:
            total = total * tl.load(scale + n, mask=n < N, other=0.0)[None, :]
        if bias is not None:
            total = total + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        tl.store(out + row[:, None] * out_stride + n[None, :], total, mask=mask)


@triton.jit(do_not_specialize=["T"])
def _few_rows(  # type: ignore[no-untyped-def]
    x, weight, scale, bias, out, T, N, K, x_stride, out_stride, part_size,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Float or int8 weight [N, K]: program (column tile, part, row tile) sums one part of K."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows, columns = (t < T)[:, None], (n < N)[None, :]
    start = tl.program_id(1) * part_size
    lefts = x + t[:, None].to(tl.int64) * x_stride
    rights = weight + n[None, :].to(tl.int64) * K
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(start, start + part_size, STEP):
        k = k0 + tl.arange(0, STEP)
        left = tl.load(lefts + k[None, :], mask=rows & (k < K)[None, :], other=0.0)
        right = tl.load(rights + k[:, None], mask=columns & (k < K)[:, None], other=0.0)
        total = tl.dot(left, right.to(left.dtype), total, input_precision=PRECISION)
    _store(total, out, scale, bias, T, N, t, n, tl.program_id(1), out_stride, SPLIT)


@triton.jit
def _values(  # type: ignore[no-untyped-def]
    codes, table, n, columns, k0, K, groups, group_size, ONE_GROUP: tl.constexpr, BLOCKS: tl.constexpr
):
    """Scales or zeros [N, groups] of one step: float32 [1, BLOCK_N] where a step is of one group, else like codes.

    Groups are of whole blocks of 16 in-features: one value is fetched for each of the step's BLOCKS.
    """
    if ONE_GROUP:
        value = tl.load(table + n * groups + k0 // group_size, mask=columns, other=0).to(tl.float32)
        return value[None, :]
    else:
        block = k0 + tl.arange(0, BLOCKS) * 16
        value = tl.load(
            table + n[None, :] * groups + (block // group_size)[:, None],
            mask=columns[None, :] & (block < K)[:, None],
            other=0,
        ).to(tl.float32)
        spread = tl.broadcast_to(value[:, None, :], (BLOCKS, codes.shape[0] // BLOCKS, codes.shape[1]))
        return tl.reshape(spread, (codes.shape[0], codes.shape[1]))


@triton.jit(do_not_specialize=["T"])
def _few_rows_packed(  # type: ignore[no-untyped-def]
    x, codes, scales, zeros, bias, out, T, N, K, x_stride, out_stride, pitch, part_octets, groups, group_size,
    SPLIT: tl.constexpr, HALVES: tl.constexpr, ONE_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`PackedWeight` in 8 bit (HALVES 1) or 4 (HALVES 2): as `_few_rows`, STEP bytes of each row at a time.

    A row of codes is `pitch` bytes long, a part `part_octets`: given apart from K, so that their alignment is known.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows, columns = (t < T)[:, None], n < N
    start = tl.program_id(1) * part_octets
    p = tl.arange(0, STEP)
    lefts = x + t[:, None].to(tl.int64) * x_stride
    rights = codes + n[None, :].to(tl.int64) * pitch
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(start, start + part_octets, STEP):
        octet = first + p
        octets = tl.load(rights + octet[:, None], mask=columns[None, :] & (octet < pitch)[:, None], other=0)
        k0 = first * HALVES
        blocks: tl.constexpr = STEP * HALVES // 16
        zero = _values(octets, zeros, n, columns, k0, K, groups, group_size, ONE_GROUP, blocks)
        scale = _values(octets, scales, n, columns, k0, K, groups, group_size, ONE_GROUP, blocks)
        for half in tl.static_range(HALVES):
            k = k0 + _feature(p, half, HALVES)
            left = tl.load(lefts + k[None, :], mask=rows & (k < K)[None, :], other=0.0)
            code = octets
            if HALVES == 2:
                code = (octets >> (4 * half)) & 15
            right = ((code.to(tl.float32) - zero) * scale).to(left.dtype)
            total = tl.dot(left, right, total, input_precision=PRECISION)
    _store(total, out, None, bias, T, N, t, n, tl.program_id(1), out_stride, SPLIT)


@triton.jit(do_not_specialize=["T"])
def _many_rows(  # type: ignore[no-untyped-def]
    x, weight, scale, bias, out, T, N, K, x_stride, out_stride, part_size,
    HALVES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Float weight [N, K]: program (row tile, column tile) walks all of K, part by part."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows, columns = (t < T)[:, None], (n < N)[None, :]
    p = tl.arange(0, STEP)
    lefts = x + t[:, None].to(tl.int64) * x_stride
    rights = weight + n[None, :].to(tl.int64) * K
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, part_size):
        part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for i in range(part_size // STEP):
            k = start + i // HALVES * (HALVES * STEP) + _feature(p, i % HALVES, HALVES)
            left = tl.load(lefts + k[None, :], mask=rows & (k < K)[None, :], other=0.0)
            right = tl.load(rights + k[:, None], mask=columns & (k < K)[:, None], other=0.0)
            part = tl.dot(left, right.to(left.dtype), part, input_precision=PRECISION)
        total += part
    _store(total, out, scale, bias, T, N, t, n, 0, out_stride, False)


@triton.jit(do_not_specialize=["T"])
def _finish(sums, scale, bias, out, T, N, parts, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[t] = (sums[0, t] + sums[1, t] + …) * scale + bias; program (columns, row)."""
    t = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(parts):
        total += tl.load(sums + (part * T + t) * N + n, mask=inside, other=0.0)
    if scale is not None:
        total = total * tl.load(scale + n, mask=inside, other=0.0)
    if bias is not None:
        total = total + tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + t * N + n, total, mask=inside)


@triton.jit
def _dequantise(  # type: ignore[no-untyped-def]
    codes, scales, zeros, out, K, pitch, groups, group_size, HALVES: tl.constexpr, BLOCK: tl.constexpr
):
    """out[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g], rounded to out's dtype; program (BLOCK bytes, row)."""
    n = tl.program_id(1).to(tl.int64)
    octet = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = octet < pitch
    octets = tl.load(codes + n * pitch + octet, mask=inside, other=0)
    for half in tl.static_range(HALVES):
        k = _feature(octet, half, HALVES)
        group = n * groups + k // group_size
        zero = tl.load(zeros + group, mask=inside, other=0).to(tl.float32)
        scale = tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
        code = octets
        if HALVES == 2:
            code = (octets >> (4 * half)) & 15
        tl.store(out + n * K + k, (code.to(tl.float32) - zero) * scale, mask=inside)
