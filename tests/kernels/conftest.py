"""Generated cases for every operation, with what they must give in float64; the implementations under test.

Cases keep their own copies of what they put into the pool, so that expected values never come through Heddle's layouts.
All pool memory that a case does not own is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from heddle.kernels import cpu, reference, triton
from heddle.kernels.ops import ADAPTER_FORMS, AdapterTables, AttentionBatch, LoraBatch, Ops
from heddle.kernels.pool import ROW_ALIGN, Pool, PoolLayout

from . import interpreted

interpreted.set_right()

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error, relative to the largest expected value, by the dtype that results are rounded to."""


@pytest.fixture(params=["reference", "cpu", "triton"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """Triton's kernels run under its interpreter, as the suite's first conftest asks for."""
    return {"reference": reference, "cpu": cpu, "triton": triton}[request.param]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def check() -> Callable[..., None]:
    return _check


def _check(got: torch.Tensor, want: torch.Tensor, slack: float = 1.0) -> None:
    """`got` is finite and within its dtype's tolerance of `want` (float64)."""
    assert got.shape == want.shape
    if want.numel() == 0:
        return
    assert torch.isfinite(got).all()
    error = (got.double() - want).abs().max() / want.abs().max().clamp_min(1e-30)
    assert error <= slack * TOLERANCE[got.dtype], f"relative error {error:.2e}"


def _poisoned(layout: PoolLayout, num_blocks: int) -> Pool:
    """A pool that reads as NaN in every float dtype."""
    pool = Pool(layout, num_blocks)
    pool.memory.fill_(0xFF)
    return pool


@dataclass
class AttentionCase:
    """Sequences of (tokens before this step, rows in this step), on shuffled blocks."""

    pool: Pool
    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    batch: AttentionBatch
    keys: list[torch.Tensor] = field(default_factory=list)
    """The whole context of each sequence, as it is in the pool: [length, Hk, D] float64."""
    values: list[torch.Tensor] = field(default_factory=list)

    def expected(self, scale: float) -> torch.Tensor:
        """Attention in float64, one row and head at a time."""
        group = self.q.shape[1] // self.k.shape[1]
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        starts = self.batch.cu_seqlens_q.tolist()
        for s, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            for row in range(starts[s], starts[s + 1]):
                seen = len(keys) - (starts[s + 1] - row) + 1
                for h in range(self.q.shape[1]):
                    scores = keys[:seen, h // group] @ self.q[row, h].double() * scale
                    out[row, h] = scores.softmax(0) @ values[:seen, h // group]
        return out


@pytest.fixture
def attention_case() -> Callable[..., AttentionCase]:
    return _attention_case


def _attention_case(
    lengths: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    block_size: int = 8,
    kv_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
) -> AttentionCase:
    """Contexts are already in the pool; the step's own k and v are there too, ready for `paged_attention`."""
    layout = PoolLayout(3, kv_heads, head_dim, block_size, kv_dtype)
    layer = 1
    needed = [-(-(before + rows) // block_size) for before, rows in lengths]
    pool = _poisoned(layout, sum(needed) + 3)
    order = torch.randperm(pool.num_blocks).tolist()
    tables = torch.zeros((len(lengths), max(needed, default=0) + 2), dtype=torch.int32)
    itemsize = kv_dtype.itemsize
    slots, positions, q, k, v, keys, values = [], [], [], [], [], [], []
    for s, (before, rows) in enumerate(lengths):
        blocks = [order.pop() for _ in range(needed[s])]
        tables[s, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        length = before + rows
        sequence_keys = torch.randn(length, kv_heads, head_dim).to(dtype)
        sequence_values = torch.randn(length, kv_heads, head_dim).to(dtype)
        for j in range(length):
            for half, vectors in enumerate((sequence_keys, sequence_values)):
                for h in range(kv_heads):
                    # block-major memory, written byte by byte as the layout's docstring says
                    place = (half * kv_heads + h) * block_size + j % block_size
                    memory = pool.memory[blocks[j // block_size], layer]
                    start = place * head_dim * itemsize
                    if kv_dtype == torch.int8:
                        codes, scale = _codes(vectors[j, h])
                        memory[start : start + head_dim] = codes.view(torch.uint8)
                        start = 2 * kv_heads * block_size * head_dim + 4 * place
                        memory[start : start + 4] = scale.view(1).view(torch.uint8)
                    else:
                        raw = vectors[j, h].to(kv_dtype).view(torch.uint8)
                        memory[start : start + raw.numel()] = raw
        slots += [blocks[j // block_size] * block_size + j % block_size for j in range(before, length)]
        positions += range(before, length)
        q.append(torch.randn(rows, heads, head_dim).to(dtype))
        k.append(sequence_keys[before:])
        v.append(sequence_values[before:])
        keys.append(_kept(sequence_keys, kv_dtype))
        values.append(_kept(sequence_values, kv_dtype))
    starts = torch.tensor([0, *(rows for _, rows in lengths)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    batch = AttentionBatch(
        block_tables=tables,
        cu_seqlens_q=starts,
        context_lens=torch.tensor([before + rows for before, rows in lengths], dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        max_query_len=max((rows for _, rows in lengths), default=0),
    )
    empty = torch.empty(0, heads, head_dim, dtype=dtype)
    empty_kv = torch.empty(0, kv_heads, head_dim, dtype=dtype)
    return AttentionCase(
        pool, layer, torch.cat([empty, *q]), torch.cat([empty_kv, *k]), torch.cat([empty_kv, *v]),
        torch.tensor(positions, dtype=torch.int64), batch, keys, values,
    )  # fmt: skip


def _codes(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes of vectors [..., D] and the float32 scales [...] that they are to be multiplied with, by float64."""
    scales = (vectors.double().abs().amax(dim=-1) / 127).float()
    return torch.round(vectors.double() / scales.double().unsqueeze(-1)).to(torch.int8), scales


def _kept(vectors: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """What a cache of this dtype makes of vectors [..., D]: float64."""
    if kv_dtype == torch.int8:
        codes, scales = _codes(vectors)
        return codes.double() * scales.double().unsqueeze(-1)
    return vectors.to(kv_dtype).double()


@dataclass
class LoraCase:
    """Adapters on random 16-byte places of a poisoned pool, and which rows take which of them."""

    pool: Pool
    layer: int
    lora: LoraBatch
    weights: list[dict[int, tuple[torch.Tensor, torch.Tensor, float]]]
    """By slot: module -> (A [rank, K], B [N, rank], scale), in float64 as they lie in the pool."""
    pairs: list[tuple[int, int, float]]
    """(row, slot, weight) in the order in which deltas are added."""

    def expected(
        self, out: torch.Tensor, x: torch.Tensor, modules: list[int], offsets: list[int]
    ) -> torch.Tensor:
        want = out.double().clone()
        for row, slot, weight in self.pairs:
            for i, module in enumerate(modules):
                if module in self.weights[slot]:
                    a, b, scale = self.weights[slot][module]
                    want[row, offsets[i] : offsets[i + 1]] += weight * scale * (b @ (a @ x[row].double()))
        return want


@pytest.fixture
def lora_case() -> Callable[..., LoraCase]:
    return _lora_case


def _lora_case(
    segments: list[tuple[int, list[int]]],
    ranks: list[dict[int, int]],
    shapes: dict[int, tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    dtypes: list[torch.dtype] | None = None,
    pair_weights: Callable[[int], float] = lambda pair: 1.0,
) -> LoraCase:
    """`segments`: (slot, its rows); `ranks[slot]`: module -> rank; `shapes`: module -> (N, K); `dtypes`: of each slot's
    A and B, where they differ."""
    layer, num_layers = 1, 2
    layout = PoolLayout(num_layers, 2, 64, 16, torch.float32)  # pages of 32 KiB
    total = sum(
        rank * (-(-size * dtype.itemsize // ROW_ALIGN) + 1)
        for adapter in ranks
        for module, rank in adapter.items()
        for size in shapes[module]
    )
    pool = _poisoned(layout, total * ROW_ALIGN // (layout.block_bytes // 2) + 4)
    free = _places(pool)
    rank_table = torch.zeros((len(ranks) + 1, num_layers, 7), dtype=torch.int32)
    first_row = torch.zeros_like(rank_table)
    scales = torch.full(rank_table.shape, math.nan)
    rows: list[int] = [2**26] * 3  # nobody's
    weights: list[dict[int, tuple[torch.Tensor, torch.Tensor, float]]] = []
    for slot, adapter in enumerate(ranks):
        weights.append({})
        for module, rank in adapter.items():
            n, k = shapes[module]
            own = dtype if dtypes is None else dtypes[slot]
            a, b = (torch.randn(rank, k) / 4).to(own), (torch.randn(n, rank) / 4).to(own)
            scale = 0.25 * (slot + 1) + 0.125 * module
            rank_table[slot, layer, module], first_row[slot, layer, module] = rank, len(rows)
            scales[slot, layer, module] = scale
            rows += [_put(pool, free, row) for row in (*a, *b.T.contiguous())]
            weights[slot][module] = (a.double(), b.double(), scale)
    pairs = [(row, slot) for slot, members in segments for row in members]
    weighted = [(row, slot, pair_weights(i)) for i, (row, slot) in enumerate(pairs)]
    starts = torch.tensor([0, *(len(m) for _, m in segments)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    forms = None
    if dtypes is not None:  # of the slot that nobody has, none at all
        indices = [*(ADAPTER_FORMS.index(own) for own in dtypes), 99]
        forms = torch.tensor(indices, dtype=torch.int32)
    lora = LoraBatch(
        tables=AdapterTables(
            rank_table, first_row, scales, torch.tensor(rows, dtype=torch.int32), dtype, forms=forms
        ),
        pair_rows=torch.tensor([row for row, _ in pairs], dtype=torch.int32),
        pair_weights=torch.tensor([weight for _, _, weight in weighted], dtype=torch.float32),
        starts=starts,
        slots=torch.tensor([slot for slot, _ in segments], dtype=torch.int32),
    )
    return LoraCase(pool, layer, lora, weights, weighted)


def _places(pool: Pool) -> dict[int, int]:
    """Block -> first free byte in it; blocks in random order, each begun at a random multiple of 16."""
    order = torch.randperm(pool.num_blocks).tolist()
    return {block: ROW_ALIGN * int(torch.randint(0, 40, ())) for block in order}


def _put(pool: Pool, free: dict[int, int], row: torch.Tensor) -> int:
    """Write an adapter row where there is room, never across two blocks; its entry for the row table."""
    raw = row.contiguous().view(torch.uint8)
    block = next(b for b, used in free.items() if used + raw.numel() <= pool.layout.block_bytes)
    start = free.pop(block)
    pool.pages()[block, start : start + raw.numel()] = raw
    free[block] = start + -(-raw.numel() // ROW_ALIGN) * ROW_ALIGN  # now last in order: rows are scattered
    return (block * pool.layout.block_bytes + start) // ROW_ALIGN
