"""The block pool of an engine: its layout, its memory, and the order its blocks are given out in."""

from __future__ import annotations

import random

import torch

from ...kernels.large_pages import LARGE_PAGE
from ...kernels.pool import Pool, PoolLayout
from ..config import EngineConfig
from ..errors import EngineStartError
from ..model.config import ModelConfig
from .adapter_memory import MAX_POOL_BYTES
from .host_memory import available_memory, populate


def pool_layout(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> PoolLayout:
    """How the pool is cut into blocks. Raises `EngineStartError` where they cannot hold an adapter's row."""
    kv_dtype = torch.int8 if config.kv_cache_dtype == "int8" else dtype
    layout = PoolLayout(model.num_layers, model.num_kv_heads, model.head_dim, config.block_size, kv_dtype)
    longest_row = max(max(shape) for shape in model.linear_shapes.values()) * dtype.itemsize
    if layout.block_bytes < longest_row:
        raise EngineStartError(
            f"--block-size {config.block_size}: a block of {layout.block_bytes} bytes cannot hold "
            f"an adapter's longest row, which takes {longest_row}; take more tokens in one block"
        )
    return layout


def allocate_pool(layout: PoolLayout, size: int, device: torch.device, *, spare: int = 0) -> Pool:
    """A pool of at most `size` bytes, of which `spare` blocks are given to nobody.

    Raises `EngineStartError` where that leaves none, or is too much for the machine.
    """
    num_blocks = min(size, MAX_POOL_BYTES) // layout.block_bytes - spare
    if num_blocks < 1:
        raise EngineStartError(
            f"the pool's {size} bytes hold no block: one takes {layout.block_bytes} bytes "
            f"({layout.block_size} tokens in {layout.num_layers} layers); raise --pool-memory"
        )
    try:
        return Pool(layout, num_blocks, device, spare=spare)
    except (RuntimeError, OSError) as error:
        raise EngineStartError(f"there is no room for a pool of {size} bytes; lower --pool-memory") from error


def pool_notes(size: int) -> list[str]:
    """What the user should know of a pool of `size` bytes."""
    if size <= MAX_POOL_BYTES:
        return []
    return [f"the pool takes {MAX_POOL_BYTES} of {size} bytes: adapter tables reach no further"]


def block_order(config: EngineConfig, count: int) -> list[int] | None:
    """In tests blocks are given out in random order, so that nothing can depend on neighbours in memory."""
    return random.Random(config.seed).sample(range(count), count) if config.check_invariants else None


class PoolPages:
    """Takes memory for a CPU's pool before it is written to, one large page after another.

    A page that is written to for the first time is zeroed by the system, 3 to 7 ms for 2 MiB: of a prompt of 256 tokens
    over the demo base that was 17 ms of 170. So whoever has nothing else to do does it ahead.
    """

    def __init__(self, pool: Pool) -> None:
        whole = pool.memory.numel() // LARGE_PAGE * LARGE_PAGE  # the rest may share its page with others
        self._next = pool.memory.data_ptr()
        self._end = self._next + (whole if pool.memory.device.type == "cpu" else 0)

    def take_one(self) -> bool:
        """False when there is none left to take, or not twice as much memory as they need."""
        missing = self._end - self._next
        if missing and available_memory() >= 2 * missing and populate(self._next, LARGE_PAGE):
            self._next += LARGE_PAGE
            return True
        return False
