"""Where every byte is, as the engine reports it. Control code: no torch."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class MemoryPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that memory is used for."""

    part: str
    bytes: int
    weights: int | None = None
    """Of a part of the model: the numbers it stands for."""
    bytes_per_weight: float | None = None
    blocks: int | None = None
    """Of a part of the pool."""
    budget: int | None = None
    """Of host memory: the most `bytes` may come to."""

    @classmethod
    def of_model(cls, part: str, size: int, weights: int) -> MemoryPart:
        """`size` bytes that stand for `weights` numbers."""
        return cls(part=part, bytes=size, weights=weights, bytes_per_weight=round(size / weights, 4))


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of one engine. What is true of each list: its parts add up to the total beside it."""

    device: str
    quantization: str
    quantization_reason: str
    """What in the checkpoint or the settings decided on that number form."""
    weight_bytes: int
    weights: list[MemoryPart]
    """Projections, embedding, head, norms, rotary tables."""
    pool_bytes: int
    pool: list[MemoryPart]
    """The one allocation of KV and adapters, by what its blocks hold now."""
    block_bytes: int
    blocks_total: int
    blocks_free: int
    blocks_used: int
    blocks_cached: int
    blocks_adapters: int
    table_bytes: int
    """Where each adapter's rows lie: a fixed arena on the device."""
    host: list[MemoryPart]
    """Host memory that has a budget of its own."""
    process_bytes: int
    """The engine process' resident memory (VmRSS)."""
    process: list[MemoryPart]
    """What `process_bytes` is made of, as far as that is known; the last part is what is not accounted for."""
    device_bytes: int = 0
    """Used on the accelerator, by whomever; 0 where the device is the CPU."""
    accelerator: list[MemoryPart] = []
    """What `device_bytes` is made of; the last part is what is not accounted for."""


def total(parts: Iterable[MemoryPart]) -> int:
    """Bytes of all of them."""
    return sum(part.bytes for part in parts)


def with_rest(parts: Iterable[MemoryPart], name: str, everything: int) -> list[MemoryPart]:
    """`parts`, and under `name` what is missing to `everything`."""
    known = list(parts)
    return [*known, MemoryPart(part=name, bytes=everything - total(known))]
