"""What the kernel says of an engine process' memory, once it has loaded and warmed up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from heddle.core.client import EngineClient
from heddle.core.config import EngineConfig
from heddle.core.engine.engine import Engine
from heddle.core.memory import MemoryReport

from ..quant.packers import edit, quantize_model
from .conftest import save_tiny

POOL = {"pool_memory": 16 << 20}
OVERHEAD = 8 << 20
"""Beside the weights: Python's objects for each tensor, a block of the pool that the warm-up writes to, libraries'
pages that one number form needs and another does not, and the unevenness of the kernel's own count."""


@dataclass(frozen=True)
class Memory:
    """Of one engine process, in bytes."""

    resident: int
    """VmRSS"""
    peak: int
    """VmHWM"""
    report: MemoryReport


def status(pid: int | str, field: str) -> int:
    """A field of /proc/PID/status that is given in kB, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def pool_taken(report: MemoryReport) -> int:
    """Bytes of the pool that are in RAM."""
    return next(part.bytes for part in report.process if part.part.startswith("pool"))


async def _start(folder: Path, settings: dict[str, Any]) -> Memory:
    client = EngineClient(EngineConfig(model=str(folder), num_threads=1, **POOL, **settings))
    try:
        await client.start()
        assert client.pid is not None
        report = await client.memory()
        taken = -1  # an idle engine takes it page by page, where the system lets it
        while taken < (taken := pool_taken(report)):
            await asyncio.sleep(1)
            report = await client.memory()
        return Memory(status(client.pid, "VmRSS"), status(client.pid, "VmHWM"), report)
    finally:
        await client.close()


def started(*engines: tuple[Path, dict[str, Any]]) -> list[Memory]:
    """Start an engine process for each folder and its settings, all at once, and look at them from outside."""

    async def start_all() -> list[Memory]:
        return await asyncio.gather(*(_start(folder, settings) for folder, settings in engines))

    return asyncio.run(start_all())


def empty(folder: Path) -> Path:
    """A model of a few kB, for an engine that holds next to nothing; all kernels are compiled and on disk then.

    A process that compiles keeps the compiler; those that are measured are to find everything compiled.
    """
    for form in ("int8", "gptq"):
        reference = save_tiny(folder / form)
        if form == "gptq":
            quantize_model(reference, folder / form, form)
        edit(folder / form, in_float16)
        Engine(EngineConfig(model=str(folder / form), quantization=form, block_size=128, **POOL)).close()
    return folder / "int8"


def in_float16(tensors: dict[str, torch.Tensor]) -> None:
    """Every float of a checkpoint, as those that are measured have it: kernels are compiled by number types."""
    tensors |= {name: tensor.half() for name, tensor in tensors.items() if tensor.is_floating_point()}
