"""What happens to each row on its own: norms, rotation with the cache write, gated activation, embedding.

One launch each; every value is read once and written once. A row's sums are made in one program, by a reduction whose
tree is of the row's length alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dense_weight import DenseWeight
from ..pool import KV_SMALLEST, Pool
from .launch import cdiv, launch, next_power_of_2

COLUMNS = 1024
"""Of one program of `silu_mul` and `embedding`."""
WIDE_ROW = 2048
"""Rows of more values are normed by 8 warps instead of 4."""


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    x, residual, weight, out, width, x_stride, residual_stride, eps, BLOCK: tl.constexpr
):
    """One row a program, held in registers; where `residual` is given, x + residual is normed and stored there."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        place = residual + row * residual_stride + column
        total = value + tl.load(place, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(out.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, value * scale * gain, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight"""
    return _norm(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """r = x + residual, written into `residual`; y = r / sqrt(mean(r^2) + eps) * weight"""
    return _norm(x, residual, weight, eps), residual


def _norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        launch(
            _rms_norm, (rows,),
            x, residual, weight, out, width, x.stride(0), 0 if residual is None else residual.stride(0), eps,
            BLOCK=next_power_of_2(width), num_warps=4 if width <= WIDE_ROW else 8,
        )  # fmt: skip
    return out


@triton.jit
def _halves(source, mask, D: tl.constexpr):  # type: ignore[no-untyped-def]
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    return a, tl.load(source + D // 2, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _put(a, b, target, mask, D: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(target, a, mask=mask)
    tl.store(target + D // 2, b, mask=mask)


@triton.jit
def _put_codes(a, b, target, scale, mask, heads, SMALLEST: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Halves a and b [heads, D / 2] of vectors, as int8 codes, and the scale of each vector: to the last bit what torch
    makes of x * (127 / most) and most / 127. Hence the reciprocal, as torch divides a number by a tensor, and divisions
    that are rounded as they should be, which `/` need not be on a GPU."""
    a, b = tl.where(mask, a, 0.0), tl.where(mask, b, 0.0)
    most = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), axis=1)
    ordinary = (tl.abs(a) < float("inf")) & (tl.abs(b) < float("inf"))  # NaN is never below
    finite = tl.min(tl.where(ordinary, 1, 0), axis=1) > 0
    some = finite & (most > SMALLEST)
    factor = tl.where(some, tl.div_rn(1.0, tl.where(some, most, 1.0)) * 127.0, 0.0)[:, None]
    # Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even.
    low = (tl.where(ordinary, a, 0.0) * factor + 12582912.0) - 12582912.0
    high = (tl.where(ordinary, b, 0.0) * factor + 12582912.0) - 12582912.0
    _put(low.to(tl.int8), high.to(tl.int8), target, mask, D)
    tl.store(scale, tl.where(finite, tl.where(some, tl.div_rn(most, 127.0), 0.0), float("nan")), mask=heads)


@triton.jit(do_not_specialize=["layer"])
def _rope_and_write(  # type: ignore[no-untyped-def]
    q, k, v, out, positions, cos_table, sin_table, pool, scales, slot_mapping, q_stride, k_stride, v_stride,
    layer, layer_stride, block_stride,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAD_H: tl.constexpr, PAD_HK: tl.constexpr, PAD_HALF: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Program (t, 0) rotates the query heads of row t, program (t, 1) its keys, and stores them and the values."""
    row = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, PAD_HALF)[None, :]
    inside = half < D // 2
    angle = tl.load(positions + row) * (D // 2) + half
    cos = tl.load(cos_table + angle, mask=inside, other=0.0)
    sin = tl.load(sin_table + angle, mask=inside, other=0.0)
    if tl.program_id(1) == 0:
        head = tl.arange(0, PAD_H)[:, None]
        of_head = (head < H) & inside
        q_a, q_b = _halves(q + row * q_stride + head * D + half, of_head, D)
        rotated = out + (row * H + head) * D + half
        _put(q_a * cos - q_b * sin, q_b * cos + q_a * sin, rotated, of_head, D)
    else:
        kv_head = tl.arange(0, PAD_HK)[:, None]
        mask = (kv_head < HK) & inside
        slot = tl.load(slot_mapping + row)
        place = slot // BLOCK_SIZE * block_stride + layer * layer_stride + slot % BLOCK_SIZE * D
        key = pool + place + kv_head * (BLOCK_SIZE * D) + half
        value = key + HK * BLOCK_SIZE * D
        a, b = _halves(k + row * k_stride + kv_head * D + half, mask, D)
        low, high = a * cos - b * sin, b * cos + a * sin
        v_low, v_high = _halves(v + row * v_stride + kv_head * D + half, mask, D)
        if scales is None:
            _put(low, high, key, mask, D)
            _put(v_low, v_high, value, mask, D)
        else:
            heads = tl.arange(0, PAD_HK)
            first = (
                slot // BLOCK_SIZE * (block_stride // 4)
                + layer * (layer_stride // 4)
                + HK * BLOCK_SIZE * D // 2
            )
            place = scales + first + heads * BLOCK_SIZE + slot % BLOCK_SIZE
            _put_codes(low, high, key, place, mask, heads < HK, SMALLEST, D)
            _put_codes(v_low, v_high, value, place + HK * BLOCK_SIZE, mask, heads < HK, SMALLEST, D)


def rope_and_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: Pool,
    layer: int,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """halves (a, b) of each head of q and k -> (a * cos - b * sin, b * cos + a * sin); k and v -> pool"""
    tokens, heads, dim = q.shape
    kv_heads, layout = k.shape[1], pool.layout
    width = layout.kv_dtype.itemsize
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if tokens:
        launch(
            _rope_and_write, (tokens, 2),
            q, k, v, out, positions, cos, sin, pool.elements(layout.kv_dtype),
            pool.elements(torch.float32) if layout.quantised else None, slot_mapping,
            q.stride(0), k.stride(0), v.stride(0), layer, layout.layer_bytes // width, layout.block_bytes // width,
            H=heads, HK=kv_heads, D=dim, BLOCK_SIZE=layout.block_size,
            PAD_H=next_power_of_2(heads), PAD_HK=next_power_of_2(kv_heads), PAD_HALF=next_power_of_2(dim // 2),
            SMALLEST=KV_SMALLEST, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _silu_mul(gate_up, out, width, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """y = g / (1 + exp(-g)) * u for the halves g, u of each row"""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        launch(
            _silu_mul, (rows, cdiv(width, COLUMNS)),
            gate_up, out, width, gate_up.stride(0), BLOCK=COLUMNS, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _embedding(token_ids, weight, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(weight + tl.load(token_ids + row) * width + column, mask=inside, other=0.0)
    tl.store(out + row * width + column, value.to(tl.float32), mask=inside)


def embedding(
    token_ids: torch.Tensor, weight: DenseWeight, absmax: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """y[t] = weight[token_ids[t]] (* absmax[token_ids[t]] * (1 / 127))"""
    if absmax is not None:
        codes = embedding(token_ids, weight, None, torch.float32)
        return (codes * absmax[token_ids].unsqueeze(1) * (1 / 127)).to(dtype)
    rows, width = token_ids.shape[0], weight.shape[1]
    out = torch.empty((rows, width), dtype=dtype, device=weight.values.device)
    if rows:
        launch(
            _embedding,
            (rows, cdiv(width, COLUMNS)),
            token_ids,
            weight.values,
            out,
            width,
            BLOCK=COLUMNS,
            num_warps=4,
        )
    return out
