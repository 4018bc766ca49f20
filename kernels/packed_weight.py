"""A weight in 4 or 8 bit codes, a scale and a zero for each group: the one layout of every packed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 16
"""In-features that are packed together, and what group sizes are multiples of."""


@dataclass(frozen=True)
class PackedWeight:
    """Rows of codes; code j of row n stands for (code - zeros[n, g]) * scales[n, g], g = j // group_size."""

    codes: torch.Tensor
    """uint8 [N, K * bits / 8]. In 8 bit one code a byte. In 4 bit byte 8 b + i holds codes 16 b + i (its low
    half) and 16 b + 8 + i (its high half), so that 8 bytes unpack into two vectors without a shuffle."""
    scales: torch.Tensor
    """float [N, G], G = ceil(K / group_size); as the checkpoint has them."""
    zeros: torch.Tensor
    """uint8 [N, G]"""
    order: torch.Tensor | None
    """int64 [K]: code j belongs to the input's feature order[j] (act-order); None: to feature j."""
    bits: int
    group_size: int
    """A multiple of 16, except that one group may hold all of K."""

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        order = 0 if self.order is None else self.order.nbytes
        return self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes + order

    def values(self) -> torch.Tensor:
        """What the codes stand for, in their own order: float32 [N, K], each rounded once."""
        codes = unpack(self.codes, self.bits).float()
        group = torch.arange(codes.shape[1], device=codes.device) // self.group_size
        return (codes - self.zeros.float()[:, group]) * self.scales.float()[:, group]


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [N, K] -> `PackedWeight.codes`; K is a multiple of 16."""
    if bits == 8:
        return codes
    halves = codes.view(codes.shape[0], -1, 2, BLOCK // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """`PackedWeight.codes` -> uint8 [N, K]"""
    if bits == 8:
        return packed
    blocks = packed.view(packed.shape[0], -1, BLOCK // 2)
    return torch.stack([blocks & 15, blocks >> 4], dim=2).flatten(1)
