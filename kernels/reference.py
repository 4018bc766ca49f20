"""Every operation in plain torch: to read, to test against, and the CUDA path until faster kernels exist.

Sums are float32 and results are rounded to the output's dtype once. Nothing here promises an order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .dense_weight import DenseWeight
from .ops import ADAPTER_FORMS, W8A8_SMALLEST, AdapterTables, AttentionBatch, Choices, LoraBatch
from .packed_weight import PackedWeight
from .pool import KV_SMALLEST, ROW_ALIGN, Pool

ROWS_INVARIANT = False
READS_ANY_FORM = True


def room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory like any other."""
    return torch.empty(shape, dtype=dtype, device=device)


def hold(matrix: torch.Tensor) -> DenseWeight:
    """The matrix as it is."""
    return DenseWeight(matrix, (matrix.shape[0], matrix.shape[1]))


def hold_packed(weight: PackedWeight) -> PackedWeight:
    """The weight as it is."""
    return weight


def linear(x: torch.Tensor, weight: DenseWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]"""
    return F.linear(x, weight.matrix().to(x.dtype), None if bias is None else bias.to(x.dtype))


def linear_invariant(x: torch.Tensor, weight: DenseWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]

    One row at a time, each at the same alignment, so that T cannot matter.
    """
    out = x.new_empty((x.shape[0], weight.shape[0]))
    for t in range(x.shape[0]):
        out[t] = linear(x[t : t + 1].clone(), weight, bias)[0]
    return out


def linear_int8(
    x: torch.Tensor, weight: DenseWeight, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """y[t, n] = scale[n] * sum_k x[t, k] * weight[n, k] + bias[n]"""
    y = F.linear(x.float(), weight.matrix().float()) * scale
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def linear_w8a8(
    x: torch.Tensor, weight: DenseWeight, scale: torch.Tensor, bias: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """y[t, n] = scale[n] * (s[t] * sum_k codes[t, k] * weight[n, k] + sum_j x[t, j] * weight[n, j]) + bias[n]"""
    wide, matrix = x.float(), weight.matrix()
    ordinary = wide.abs() < (threshold or torch.inf)  # NaN is never below
    inside, outliers = wide.masked_fill(~ordinary, 0), wide.masked_fill(ordinary, 0)
    largest = inside.abs().amax(dim=1, keepdim=True)
    codes = torch.round(inside * torch.where(largest > W8A8_SMALLEST, 127 / largest, 0))
    sums = (codes.double() @ matrix.double().T).float()  # float64 holds every sum of integers here exactly
    y = (sums * (largest / 127) + F.linear(outliers, matrix.float())) * scale
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def linear_w4(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """y[t, n] = sum_j x[t, order[j]] * (codes[n, j] - zeros[n, g]) * scales[n, g] + bias[n]"""
    ordered = x if weight.order is None else x[:, weight.order]
    y = F.linear(ordered.float(), weight.values())
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def embedding(
    token_ids: torch.Tensor, weight: DenseWeight, absmax: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """y[t] = weight[token_ids[t]] (* absmax[token_ids[t]] * (1 / 127))"""
    rows = weight.rows(token_ids)
    if absmax is not None:
        rows = rows.float() * absmax[token_ids].unsqueeze(1) * (1 / 127)
    return rows.to(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight"""
    wide = x.float()
    mean = wide.square().mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean + eps) * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """r = x + residual; y = r / sqrt(mean(r^2) + eps) * weight"""
    total = x + residual
    return rms_norm(total, weight, eps), total


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
    cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, D / 2]
    key_cache, value_cache = pool.kv(layer)  # [blocks, Hk, block_size, D]
    block = slot_mapping // pool.layout.block_size
    offset = slot_mapping % pool.layout.block_size
    if pool.layout.quantised:
        key_scales, value_scales = pool.kv_scales(layer)  # [blocks, Hk, block_size]
        rotated = _rotate(k.float(), cos, sin)
        key_cache[block, :, offset], key_scales[block, :, offset] = _quantised(rotated)
        value_cache[block, :, offset], value_scales[block, :, offset] = _quantised(v.float())
    else:
        key_cache[block, :, offset] = _rotate(k, cos, sin).to(key_cache.dtype)
        value_cache[block, :, offset] = v.to(value_cache.dtype)
    return _rotate(q, cos, sin)


def _quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors x float32 [..., D] as int8 codes and their scales [...]; `PoolLayout.quantised` says how."""
    largest = x.abs().amax(dim=-1)  # NaN where one is
    finite, zero = largest.isfinite(), largest.new_zeros(())
    scales = torch.where(largest > KV_SMALLEST, largest / 127, zero).masked_fill(~finite, torch.nan)
    factors = torch.where(finite & (largest > KV_SMALLEST), 127 / largest, zero).unsqueeze(-1)
    return torch.round(x.masked_fill(~finite.unsqueeze(-1), 0) * factors).to(torch.int8), scales


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] rotated by halves; cos and sin [T, 1, D / 2] float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def paged_attention(
    q: torch.Tensor, pool: Pool, layer: int, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """out[i, h] = softmax_j(scale * q[i, h] . k[j, h']) @ v[:, h'] over j up to row i's own position"""
    key_cache, value_cache = pool.kv(layer)
    key_scales, value_scales = pool.kv_scales(layer) if pool.layout.quantised else (None, None)
    group = q.shape[1] // pool.layout.num_kv_heads
    starts = batch.cu_seqlens_q.tolist()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)

    def context_of(
        cache: torch.Tensor, scales: torch.Tensor | None, sequence: int, length: int
    ) -> torch.Tensor:
        """The first `length` tokens of a sequence, one copy a query head: float32 [H, length, D]."""
        blocks = batch.block_tables[sequence, : -(-length // pool.layout.block_size)].long()
        vectors = cache[blocks].float()
        if scales is not None:
            vectors *= scales[blocks].unsqueeze(-1)
        tokens = vectors.transpose(1, 2).flatten(0, 1)[:length]  # [length, Hk, D]
        return tokens.repeat_interleave(group, dim=1).transpose(0, 1)

    for sequence, length in enumerate(batch.context_lens.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        if first == last:
            continue
        keys = context_of(key_cache, key_scales, sequence, length)
        values = context_of(value_cache, value_scales, sequence, length)
        own = torch.arange(length - (last - first), length, device=q.device)  # positions of the rows
        hidden = torch.arange(length, device=q.device) > own.unsqueeze(1)  # [rows, length]
        scores = (q[first:last].float().transpose(0, 1) @ keys.transpose(1, 2)) * scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        # A later row's NaN times its weight 0 would be NaN: only what a row really sees may reach it.
        broken = ~values.isfinite()
        result = weights @ values.masked_fill(broken, 0)
        result = result.masked_fill(weights @ broken.float() > 0, torch.nan)
        out[first:last] = result.transpose(0, 1).to(q.dtype)
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """y = g / (1 + exp(-g)) * u for the halves g, u of each row"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


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
    tables = lora.tables
    columns = list(modules)
    slots = lora.slots.long()
    ranks = tables.ranks[slots, layer][:, columns].tolist()
    first_rows = tables.first_row[slots, layer][:, columns].tolist()
    scales = tables.scales[slots, layer][:, columns]  # [G, modules], stays on the device
    if tables.forms is None:
        dtypes = [tables.dtype] * len(slots)
    else:
        dtypes = [ADAPTER_FORMS[form] for form in tables.forms[slots].tolist()]
    starts = lora.starts.tolist()
    for segment in range(len(starts) - 1):
        pairs = slice(starts[segment], starts[segment + 1])
        rows = lora.pair_rows[pairs].long()
        for i, (rank, first) in enumerate(zip(ranks[segment], first_rows[segment], strict=True)):
            if rank == 0 or len(rows) == 0:
                continue
            begin, end = offsets[i], offsets[i + 1]
            a = _adapter_rows(pool, tables, first, rank, x.shape[1], dtypes[segment])  # [rank, K]
            b = _adapter_rows(
                pool, tables, first + rank, rank, end - begin, dtypes[segment]
            )  # [rank, N]: B transposed
            factor = lora.pair_weights[pairs] * scales[segment, i]
            sums = (x[rows].float() @ a.T) * factor.unsqueeze(1)  # [rows, rank]
            out[rows, begin:end] = (out[rows, begin:end].float() + sums @ b).to(out.dtype)


def _adapter_rows(
    pool: Pool, tables: AdapterTables, first: int, count: int, length: int, dtype: torch.dtype
) -> torch.Tensor:
    """Entries first to first + count of the row table, fetched from the pool: float32 [count, length]."""
    elements = pool.elements(dtype)
    starts = tables.rows[first : first + count].long() * ROW_ALIGN // dtype.itemsize
    return elements[starts.unsqueeze(1) + torch.arange(length, device=elements.device)].float()


def choose_tokens(logits: torch.Tensor, choices: Choices) -> torch.Tensor:
    """argmax, or the id at `points` of the cumulative weights that min_p, top_k and top_p keep: int32 [R]"""
    out = torch.where(logits.isfinite().all(dim=1), logits.argmax(dim=1), -1).to(torch.int32)
    temperatures, best = choices.temperatures.tolist(), out.tolist()
    for row, temperature in enumerate(temperatures):
        if temperature == 0 or best[row] < 0:
            continue
        weights = torch.exp((logits[row] - logits[row].max()) / temperature)
        order = torch.sort(weights, descending=True, stable=True).indices
        count = int((weights >= choices.min_ps[row]).sum())
        top_k = int(choices.top_ks[row])
        if 0 < top_k < count:
            count = top_k
        if choices.top_ps[row] < 1:
            sums = weights[order[:count]].double().cumsum(0)
            count = min(count, int(torch.searchsorted(sums, choices.top_ps[row] * sums[-1])) + 1)
        kept = order[:count].sort().values
        sums = weights[kept].double().cumsum(0)
        place = int(torch.searchsorted(sums, choices.points[row] * sums[-1], right=True))
        out[row] = kept[min(place, count - 1)]
    return out
