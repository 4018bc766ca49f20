"""The block pool's memory: one allocation, block-major, and the views that kernels read it through.

Layout of one block (sizes in bytes, one row a layer):

    layer 0   | K [kv_heads, block_size, head_dim] | V [kv_heads, block_size, head_dim] |   layer_bytes
    layer 1   | K                                  | V                                  |   layer_bytes
    ...

A block that belongs to an adapter is a plain page of `block_bytes` = num_layers * layer_bytes instead.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch

ROW_ALIGN = 16
"""Bytes: every adapter row starts at a multiple of this."""


@dataclass(frozen=True)
class PoolLayout:
    """Sizes that fix the pool's geometry."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: torch.dtype

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one block in one layer, rounded up to 16."""
        raw = 2 * self.num_kv_heads * self.block_size * self.head_dim * self.kv_dtype.itemsize
        return -(-raw // ROW_ALIGN) * ROW_ALIGN

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


class Pool:
    """`memory`: uint8 [num_blocks, num_layers, layer_bytes], contiguous, the only KV and LoRA memory there is."""

    def __init__(self, layout: PoolLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (num_blocks, layout.num_layers, layout.layer_bytes)
        if torch.device(device).type == "cpu":
            self.memory = _lazy_zeros(shape)
        else:
            self.memory = torch.zeros(shape, dtype=torch.uint8, device=device)

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V of one layer, each [num_blocks, kv_heads, block_size, head_dim] of `kv_dtype`, strided."""
        lay = self.layout
        typed = self.memory[:, layer].view(lay.kv_dtype)  # [num_blocks, layer elements]
        half = lay.num_kv_heads * lay.block_size * lay.head_dim
        shape = (self.num_blocks, lay.num_kv_heads, lay.block_size, lay.head_dim)
        return typed[:, :half].unflatten(1, shape[1:]), typed[:, half : 2 * half].unflatten(1, shape[1:])

    def pages(self) -> torch.Tensor:
        """uint8 [num_blocks, block_bytes]: the pool as adapter pages; one row is one copy."""
        return self.memory.view(self.num_blocks, -1)

    def elements(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole pool as one flat vector of `dtype`; an adapter row at byte b starts at element b // itemsize."""
        return self.memory.view(-1).view(dtype)


def _lazy_zeros(shape: tuple[int, ...]) -> torch.Tensor:
    """uint8 zeros whose pages take memory when they are first written to. Raises OSError where there is no room."""
    memory = mmap.mmap(-1, math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(shape)
