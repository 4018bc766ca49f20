"""Puts an engine's memory report together: weights by part, pool by use, host memory, and the process around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...kernels.ops import AdapterTables
from ...kernels.pool import Pool
from ..memory import MemoryPart, MemoryReport, total, with_rest
from ..model.llama import LlamaModel
from .host_memory import resident, resident_part

REST = "not accounted for"


def memory_report(
    model: LlamaModel,
    pool: Pool,
    tables: AdapterTables,
    blocks: Mapping[str, int],
    pinned_blocks: int,
    host: Sequence[MemoryPart],
) -> MemoryReport:
    """`blocks`: by state, as `BlockPool.counts`; of those of adapters, `pinned_blocks` are pinned. `host`: the
    parts of host memory with a budget."""
    size = pool.layout.block_bytes
    weights = model.parts()
    arena = sum(t.nbytes for t in (tables.ranks, tables.first_row, tables.scales, tables.rows))
    uses = {
        "KV in use": blocks["used"],
        "KV cached": blocks["cached"],
        "adapters": blocks["adapters"] - pinned_blocks,
        "pinned adapters": pinned_blocks,
        "free": blocks["free"],
    }
    in_pool = [MemoryPart(part=use, bytes=count * size, blocks=count) for use, count in uses.items()]
    if spare := len(pool.memory) - pool.num_blocks:
        in_pool.append(MemoryPart(part="padding rows", bytes=spare * size, blocks=spare))
    everything, files = resident()
    process = [part for part in host if part.bytes]
    process.append(MemoryPart(part="files mapped (program, libraries)", bytes=files))
    accelerator: list[MemoryPart] = []
    device_bytes = 0
    if pool.memory.is_cuda:
        free, there = torch.cuda.mem_get_info(pool.memory.device)
        device_bytes = there - free
        held = {"weights": total(weights), "pool": pool.memory.nbytes, "adapter tables": arena}
        known = [MemoryPart(part=name, bytes=count) for name, count in held.items()]
        accelerator = with_rest(
            known, f"{REST} (context, kernels, activations, other programs)", device_bytes
        )
    else:
        touched = resident_part(pool.memory.data_ptr(), pool.memory.nbytes)
        held = {"weights": total(weights), "pool, as far as it was written": touched, "adapter tables": arena}
        process = [*(MemoryPart(part=name, bytes=count) for name, count in held.items()), *process]
    return MemoryReport(
        device=str(model.device),
        quantization=model.quantization,
        quantization_reason=model.quantization_reason,
        weight_bytes=total(weights),
        weights=weights,
        pool_bytes=pool.memory.nbytes,
        pool=in_pool,
        block_bytes=size,
        blocks_total=pool.num_blocks,
        blocks_free=blocks["free"],
        blocks_used=blocks["used"],
        blocks_cached=blocks["cached"],
        blocks_adapters=blocks["adapters"],
        table_bytes=arena,
        host=list(host),
        process_bytes=everything,
        process=with_rest(process, f"{REST} (interpreter, compiled kernels, activations)", everything),
        device_bytes=device_bytes,
        accelerator=accelerator,
    )
