"""What happens to each row on its own: norms, rotary embedding with the write into the pool, the gated activation."""

from __future__ import annotations

import numpy as np
import torch

from ..pool import KV_SMALLEST, SCALE_BYTES, Pool
from .arrays import KINDS, address, array_at, dense, dense_rows
from .compiled import compiled, inner
from .exponential import exp
from .products import dot
from .recording import empty, launch
from .team import share
from .vector_ir import copy, load, rotate, store

PART_VALUES = 16384
"""Values in one part of the work: about 5 microseconds of one core."""


@inner
def _norm_rows(part, parts, out, total, x, residual, weight, eps, size, rows):  # type: ignore[no-untyped-def]
    """out = norm(x), or with a residual: total = x + residual, out = norm(total)."""
    for t in range(rows * part // parts, rows * (part + 1) // parts):
        here, row = t * size, x
        if residual.size:
            for i in range(here, here + size):
                store(total, i, load(x, i) + load(residual, i))
            row = total
        square = dot(row, here, row, here, size)
        factor = np.float32(1.0) / np.sqrt(square / np.float32(size) + eps)
        for i in range(size):
            store(out, here + i, load(row, here + i) * factor * load(weight, i))


@compiled
def _norm_all(words, parts, out, total, x, residual, weight, eps, size, rows):  # type: ignore[no-untyped-def]
    real, count = np.float32(0), rows * size
    share(
        words, parts, _norm_rows,
        (
            array_at(out, real, (count,)), array_at(total, real, (count,)), array_at(x, real, (count,)),
            array_at(residual, real, (count if residual else 0,)), array_at(weight, real, (size,)),
            np.float32(eps), size, rows,
        ),
    )  # fmt: skip


@inner
def _silu_rows(part, parts, out, x, size, rows):  # type: ignore[no-untyped-def]
    one = np.float32(1.0)
    for t in range(rows * part // parts, rows * (part + 1) // parts):
        for i in range(size):
            gate = load(x, 2 * t * size + i)
            store(out, t * size + i, gate / (one + exp(-gate)) * load(x, (2 * t + 1) * size + i))


@compiled
def _silu_all(words, parts, out, x, size, rows):  # type: ignore[no-untyped-def]
    real = np.float32(0)
    values = array_at(out, real, (rows * size,)), array_at(x, real, (2 * rows * size,))
    share(words, parts, _silu_rows, (values[0], values[1], size, rows))


@inner
def _rope_rows(  # type: ignore[no-untyped-def]
    part, parts, out, q, q_step, k, k_step, v, v_step, positions, cos, sin, pool, slots, num_heads, kv_heads,
    head_dim, block_size, block_step, layer_at, value_at, rows,
):  # fmt: skip
    half = head_dim // 2
    for t in range(rows * part // parts, rows * (part + 1) // parts):
        angle_at = positions[t] * half
        for h in range(num_heads):
            at = (t * num_heads + h) * head_dim
            rotate(out, at, q, t * q_step + h * head_dim, cos, sin, angle_at, half)
        block, offset = slots[t] // block_size, slots[t] % block_size
        for h in range(kv_heads):
            place = block * block_step + layer_at + (h * block_size + offset) * head_dim
            rotate(pool, place, k, t * k_step + h * head_dim, cos, sin, angle_at, half)
            copy(pool, place + value_at, v, t * v_step + h * head_dim, head_dim)


@inner
def _quantise(codes, at, scales, scale_at, x, x_at, size):  # type: ignore[no-untyped-def]
    """codes[at + i] and scales[scale_at]: the vector x[x_at + i] as `PoolLayout.quantised` has it."""
    most, finite = np.float32(0.0), True
    for i in range(size):
        value = abs(load(x, x_at + i))
        finite = finite and value < np.inf  # NaN is never below
        most = max(most, value)
    scale, factor = np.float32(0.0), np.float32(0.0)
    if not finite:
        scale = np.float32(np.nan)
    elif most > np.float32(KV_SMALLEST):
        scale, factor = most / np.float32(127.0), np.float32(127.0) / most
    scales[scale_at] = scale
    for i in range(size):
        codes[at + i] = np.int8(np.rint(load(x, x_at + i) * factor)) if finite else np.int8(0)


@inner
def _rope_rows_int8(  # type: ignore[no-untyped-def]
    part, parts, out, q, q_step, k, k_step, v, v_step, positions, cos, sin, codes, scales, slots, num_heads, kv_heads,
    head_dim, block_size, block_step, layer_at, rows,
):  # fmt: skip
    half, value_at = head_dim // 2, kv_heads * block_size * head_dim
    rotated = np.empty(head_dim, np.float32)
    for t in range(rows * part // parts, rows * (part + 1) // parts):
        angle_at = positions[t] * half
        for h in range(num_heads):
            at = (t * num_heads + h) * head_dim
            rotate(out, at, q, t * q_step + h * head_dim, cos, sin, angle_at, half)
        block, offset = slots[t] // block_size, slots[t] % block_size
        for h in range(kv_heads):
            layer, place = block * block_step + layer_at, h * block_size + offset
            key_scale = (layer + 2 * value_at) // SCALE_BYTES + place
            rotate(rotated, 0, k, t * k_step + h * head_dim, cos, sin, angle_at, half)
            at = layer + place * head_dim
            _quantise(codes, at, scales, key_scale, rotated, 0, head_dim)
            value_scale, from_v = key_scale + kv_heads * block_size, t * v_step + h * head_dim
            _quantise(codes, at + value_at, scales, value_scale, v, from_v, head_dim)


@compiled
def _rope_all_int8(  # type: ignore[no-untyped-def]
    words, parts, out, q, q_step, k, k_step, v, v_step, positions, cos, sin, num_angles, pool, pool_size,
    slots, num_heads, kv_heads, head_dim, block_size, block_step, layer_at, rows,
):  # fmt: skip
    real, integer = np.float32(0), np.int64(0)
    share(
        words, parts, _rope_rows_int8,
        (
            array_at(out, real, (rows * num_heads * head_dim,)), array_at(q, real, (rows * q_step,)), q_step,
            array_at(k, real, (rows * k_step,)), k_step, array_at(v, real, (rows * v_step,)), v_step,
            array_at(positions, integer, (rows,)), array_at(cos, real, (num_angles,)),
            array_at(sin, real, (num_angles,)), array_at(pool, np.int8(0), (pool_size,)),
            array_at(pool, real, (pool_size // SCALE_BYTES,)), array_at(slots, integer, (rows,)), num_heads, kv_heads,
            head_dim, block_size, block_step, layer_at, rows,
        ),
    )  # fmt: skip


@compiled
def _rope_all(  # type: ignore[no-untyped-def]
    words, parts, out, q, q_step, k, k_step, v, v_step, positions, cos, sin, num_angles, pool, kind, pool_size,
    slots, num_heads, kv_heads, head_dim, block_size, block_step, layer_at, value_at, rows,
):  # fmt: skip
    real, integer = np.float32(0), np.int64(0)
    share(
        words, parts, _rope_rows,
        (
            array_at(out, real, (rows * num_heads * head_dim,)), array_at(q, real, (rows * q_step,)), q_step,
            array_at(k, real, (rows * k_step,)), k_step, array_at(v, real, (rows * v_step,)), v_step,
            array_at(positions, integer, (rows,)), array_at(cos, real, (num_angles,)),
            array_at(sin, real, (num_angles,)), array_at(pool, kind, (pool_size,)),
            array_at(slots, integer, (rows,)), num_heads, kv_heads, head_dim, block_size, block_step, layer_at,
            value_at, rows,
        ),
    )  # fmt: skip


def _parts(rows: int, size: int) -> int:
    return max(1, min(rows, rows * size // PART_VALUES))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight"""
    return _norm(x, None, weight, eps)[0].to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """r = x + residual; y = r / sqrt(mean(r^2) + eps) * weight"""
    if x.dtype != torch.float32:  # the sum is rounded to the rows' own dtype before it is normed
        total = x + residual
        return rms_norm(total, weight, eps), total
    return _norm(x, residual, weight, eps)


def _norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, size = x.shape
    out = empty(rows, size)
    total = out if residual is None else empty(rows, size)
    if rows:
        x, weight, residual = dense(x), dense(weight), None if residual is None else dense(residual)
        launch(
            _norm_all, _parts(rows, size), out.data_ptr(), total.data_ptr(), x.data_ptr(), address(residual),
            weight.data_ptr(), eps, size, rows,
        )  # fmt: skip
    return out, total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """y = g / (1 + exp(-g)) * u for the halves g, u of each row"""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty(rows, size)
    if rows:
        values = dense(gate_up)
        launch(_silu_all, _parts(rows, 4 * size), out.data_ptr(), values.data_ptr(), size, rows)
    return out if gate_up.dtype is torch.float32 else out.to(gate_up.dtype)


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
    rows, num_heads, head_dim = q.shape
    layout = pool.layout
    out = empty(rows, num_heads, head_dim)
    if rows:
        assert positions.dtype == slot_mapping.dtype == torch.int64
        assert cos.dtype == sin.dtype == torch.float32
        itemsize = layout.kv_dtype.itemsize
        (queries, q_step), (keys, k_step), (values, v_step) = dense_rows(q), dense_rows(k), dense_rows(v)
        if layout.quantised:
            launch(
                _rope_all_int8, _parts(rows, num_heads * head_dim), out.data_ptr(), queries.data_ptr(), q_step,
                keys.data_ptr(), k_step, values.data_ptr(), v_step, positions.data_ptr(), cos.data_ptr(),
                sin.data_ptr(), cos.numel(), pool.memory.data_ptr(), pool.memory.numel(), slot_mapping.data_ptr(),
                num_heads, layout.num_kv_heads, head_dim, layout.block_size, layout.block_bytes,
                layer * layout.layer_bytes, rows,
            )  # fmt: skip
            return out if q.dtype is torch.float32 else out.to(q.dtype)
        launch(
            _rope_all, _parts(rows, num_heads * head_dim), out.data_ptr(), queries.data_ptr(), q_step,
            keys.data_ptr(), k_step, values.data_ptr(), v_step, positions.data_ptr(), cos.data_ptr(),
            sin.data_ptr(), cos.numel(), pool.memory.data_ptr(), KINDS[layout.kv_dtype],
            pool.memory.numel() // itemsize, slot_mapping.data_ptr(), num_heads, layout.num_kv_heads, head_dim,
            layout.block_size, layout.block_bytes // itemsize, layer * (layout.layer_bytes // itemsize),
            layout.num_kv_heads * layout.block_size * head_dim, rows,
        )  # fmt: skip
    return out if q.dtype is torch.float32 else out.to(q.dtype)
