"""The block pool's memory: one allocation, block-major, and the views that kernels read it through.

Layout of one block (sizes in bytes, one row a layer):

    layer 0   | K [kv_heads, block_size, head_dim] | V [kv_heads, block_size, head_dim] |   layer_bytes
    layer 1   | K                                  | V                                  |   layer_bytes
    ...

Where K and V are int8, what they are to be multiplied with follows them in the layer, float32, one for each token and
head: | K scales [kv_heads, block_size] | V scales [kv_heads, block_size] |.

A block that belongs to an adapter is a plain page of `block_bytes` = num_layers * layer_bytes instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .large_pages import lazy_zeros

ROW_ALIGN = 16
"""Bytes: every adapter row starts at a multiple of this."""
SCALE_BYTES = 4
KV_SMALLEST = 1e-36
"""A vector whose largest value is not above this is zero in an int8 cache: 127 / it might be no float32."""


@dataclass(frozen=True)
class PoolLayout:
    """Sizes that fix the pool's geometry."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: torch.dtype

    @property
    def quantised(self) -> bool:
        """K and V are int8 codes with a scale for each token and head.

        A vector x is codes * scale, with scale = max |x| / 127 and codes = round(x * (127 / max |x|)), ties to even.
        One that holds what is no finite number has NaN for its scale.
        """
        return self.kv_dtype == torch.int8

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one block in one layer; where there are scales, they begin here."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * self.kv_dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of one block in one layer, rounded up to 16."""
        scales = 2 * self.num_kv_heads * self.block_size * SCALE_BYTES if self.quantised else 0
        return -(-(self.kv_bytes + scales) // ROW_ALIGN) * ROW_ALIGN

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


class Pool:
    """`memory`: uint8 [num_blocks + spare, num_layers, layer_bytes], contiguous, the only KV and LoRA memory there is.

    Blocks from `num_blocks` on are given to nobody: rows that only pad a step write there.
    """

    def __init__(
        self, layout: PoolLayout, num_blocks: int, device: torch.device | str = "cpu", *, spare: int = 0
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (num_blocks + spare, layout.num_layers, layout.layer_bytes)
        if torch.device(device).type == "cpu":
            self.memory = lazy_zeros(shape)
        else:
            self.memory = torch.zeros(shape, dtype=torch.uint8, device=device)

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V of one layer, each [blocks, kv_heads, block_size, head_dim] of `kv_dtype`, strided."""
        lay = self.layout
        typed = self.memory[:, layer].view(lay.kv_dtype)  # [blocks, layer elements]
        half = lay.num_kv_heads * lay.block_size * lay.head_dim
        shape = (lay.num_kv_heads, lay.block_size, lay.head_dim)
        return typed[:, :half].unflatten(1, shape), typed[:, half : 2 * half].unflatten(1, shape)

    def kv_scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the scales of K and V of one layer, float32 [blocks, kv_heads, block_size]; only if `quantised`."""
        lay = self.layout
        assert lay.quantised
        typed = self.memory[:, layer].view(torch.float32)
        first, half = lay.kv_bytes // SCALE_BYTES, lay.num_kv_heads * lay.block_size
        keys, values = typed[:, first : first + half], typed[:, first + half : first + 2 * half]
        return keys.unflatten(1, (-1, lay.block_size)), values.unflatten(1, (-1, lay.block_size))

    def pages(self) -> torch.Tensor:
        """uint8 [blocks, block_bytes]: the pool as adapter pages; one row is one copy."""
        return self.memory.flatten(1)

    def elements(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole pool as one flat vector of `dtype`; an adapter row at byte b starts at element b // itemsize."""
        return self.memory.view(-1).view(dtype)
