"""Speed of the CPU kernels: linear layers in GOP/s beside torch, the other operations in microseconds.

    python bench/cpu_ops.py [threads]

Shapes are those of the demo base (hidden 576, 9 heads, 3 of keys and values, head_dim 64, intermediate 1536, vocabulary
49152). Each figure is the best of a few short runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from heddle.kernels import cpu
from heddle.kernels.ops import AdapterTables, AttentionBatch, LoraBatch
from heddle.kernels.pool import Pool, PoolLayout

LAYOUT = PoolLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, kv_dtype=torch.float32)
HEADS = 9


def seconds(call: Callable[[], object], repetitions: int = 7) -> float:
    """Seconds of one call in the best of some short runs: what else the machine does only adds."""
    call()
    times = []
    for _ in range(repetitions):
        count, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < 0.02:
            call()
            count += 1
        times.append(elapsed / count)
    return min(times)


def linears() -> None:
    print(
        f"{'GOP/s':<14} {'rows':>5} {'int8':>8} {'w8a8':>8} {'float16':>8} {'float32':>8} {'torch float32':>14}"
    )
    for k, n in ((576, 576), (576, 1536), (1536, 576), (576, 49152)):
        weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        scale, half = torch.rand(n), torch.randn(n, k).half()
        single = half.float()
        codes, held_half, held_single = cpu.hold(weight), cpu.hold(half), cpu.hold(single.clone())
        for rows in (1, 4, 16, 64, 256):
            x, work = torch.randn(rows, k).clamp(-5, 5), 2e-9 * rows * k * n
            speeds = [
                work / seconds(call)
                for call in (
                    lambda: cpu.linear_int8(x, codes, scale, None),  # noqa: B023
                    lambda: cpu.linear_w8a8(x, codes, scale, None, 6.0),  # noqa: B023
                    lambda: cpu.linear_invariant(x, held_half, None),  # noqa: B023
                    lambda: cpu.linear_invariant(x, held_single, None),  # noqa: B023
                    lambda: F.linear(x, single),  # noqa: B023
                )
            ]
            print(f"{k:>5} x {n:<6} {rows:>5} " + " ".join(f"{s:>8.1f}" for s in speeds), flush=True)


def attention(rows: int, context: int, sequences: int) -> Callable[[], object]:
    """One layer's call: `sequences` of `rows` new rows each, `context` tokens long at the end."""
    blocks = -(-context // LAYOUT.block_size)
    pool = Pool(LAYOUT, sequences * blocks)
    pool.memory.view(-1).view(torch.float32).normal_()
    batch = AttentionBatch(
        block_tables=torch.randperm(sequences * blocks).to(torch.int32).view(sequences, blocks),
        cu_seqlens_q=torch.arange(0, sequences * rows + 1, rows, dtype=torch.int32),
        context_lens=torch.full((sequences,), context, dtype=torch.int32),
        slot_mapping=torch.empty(0, dtype=torch.int64),
    )
    q = torch.randn(sequences * rows, HEADS, LAYOUT.head_dim)
    return lambda: cpu.paged_attention(q, pool, 3, batch, 0.125)


def lora(segments: int, rows: int, rank: int, dtype: torch.dtype) -> Callable[[], object]:
    """One layer's q, k and v: `segments` adapters of `rank`, `rows` rows each."""
    modules, sizes, k = [0, 1, 2], [576, 192, 192], 576
    pool = Pool(LAYOUT, segments * 2 + 1)
    pool.elements(dtype).copy_(torch.randn(pool.elements(dtype).shape) / 100)
    starts, entries, place = torch.zeros(segments, 1, 7, dtype=torch.int32), [0] * 0, 0
    for slot in range(segments):
        for module, size in zip(modules, sizes, strict=True):
            starts[slot, 0, module] = len(entries)
            for length in [k] * rank + [size] * rank:
                entries.append(place)
                place += -(-length * dtype.itemsize // 16)
    tables = AdapterTables(
        ranks=torch.full((segments, 1, 7), rank, dtype=torch.int32),
        first_row=starts,
        scales=torch.ones(segments, 1, 7),
        rows=torch.tensor(entries, dtype=torch.int32),
        dtype=dtype,
    )
    total = segments * rows
    batch = LoraBatch(
        tables=tables,
        pair_rows=torch.arange(total, dtype=torch.int32),
        pair_weights=torch.ones(total),
        starts=torch.arange(0, total + 1, rows, dtype=torch.int32),
        slots=torch.arange(segments, dtype=torch.int32),
    )
    x, out = torch.randn(total, k), torch.zeros(total, sum(sizes))
    return lambda: cpu.add_lora(out, x, pool, 0, modules, [0, 576, 768, 960], batch)


def others(rows: int) -> dict[str, Callable[[], object]]:
    x, residual, weight = torch.randn(rows, 576), torch.randn(rows, 576), torch.ones(576)
    gate_up, fused = torch.randn(rows, 3072), torch.randn(rows, 960)
    q, k, v = (t.unflatten(1, (-1, 64)) for t in fused.split([576, 192, 192], dim=1))
    pool, slots, table = Pool(LAYOUT, rows), torch.arange(rows) * LAYOUT.block_size, torch.randn(rows, 32)
    return {
        "add_rms_norm": lambda: cpu.add_rms_norm(x, residual, weight, 1e-5),
        "silu_mul": lambda: cpu.silu_mul(gate_up),
        "rope_and_write_kv": lambda: cpu.rope_and_write_kv(
            q, k, v, torch.arange(rows), table, table, pool, 2, slots
        ),
    }


def report(name: str, call: Callable[[], object]) -> None:
    print(f"{name:<55} {1e6 * seconds(call):>9.1f} us", flush=True)


def main() -> None:
    threads = cpu.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    torch.set_num_threads(threads)  # for the column beside
    print(f"{threads} threads")
    linears()
    report("attention, 16 decodes at 128", attention(1, 128, 16))
    report("attention, 16 decodes at 1024", attention(1, 1024, 16))
    report("attention, prefill of 512", attention(512, 512, 1))
    for dtype in (torch.float32, torch.float16):
        name = str(dtype).removeprefix("torch.")
        report(f"LoRA q,k,v, 16 rows of 16 adapters, rank 8, {name}", lora(16, 1, 8, dtype))
        report(f"LoRA q,k,v, 16 rows of 1 adapter, rank 16, {name}", lora(1, 16, 16, dtype))
        report(f"LoRA q,k,v, 512 rows of 1 adapter, rank 8, {name}", lora(1, 512, 8, dtype))
    for rows in (1, 16, 512):
        for name, call in others(rows).items():
            report(f"{name}, {rows} rows", call)


if __name__ == "__main__":
    main()
