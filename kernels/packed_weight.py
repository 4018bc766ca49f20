"""A weight in 4 or 8 bit codes, a scale and a zero for each group: the one layout of every packed form.

And the same codes in panels, the order in which a CPU's products read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .dense_weight import PANEL

BLOCK = 16
"""In-features that are packed together, and what group sizes are multiples of."""
WORD_BITS = 32
"""Of what holds one output's codes in panels."""
PLACES = {4: (0, 8, 16, 24, 4, 12, 20, 28), 8: (0, 8, 16, 24)}
"""Where in such a word its codes begin, by their bits: one mask gives four neighbours, a byte each."""
_CHUNK = 1 << 20
"""Codes unpacked at a time, so that no unpacked copy of a weight shows in memory."""


@dataclass(frozen=True)
class PackedWeight:
    """Rows of codes; code j of row n stands for (code - zeros[n, g]) * scales[n, g], g = j // group_size."""

    codes: torch.Tensor
    """uint8 [N, K * bits / 8]; or in panels, see there. In 8 bit one code a byte. In 4 bit byte 8 b + i holds codes
    16 b + i (its low half) and 16 b + 8 + i (its high half), so that 8 bytes unpack into two vectors without a
    shuffle."""
    scales: torch.Tensor
    """float [N, G], G = ceil(K / group_size); as the checkpoint has them."""
    zeros: torch.Tensor
    """uint8 [N, G]"""
    order: torch.Tensor | None
    """int64 [K]: code j belongs to the input's feature order[j] (act-order); None: to feature j."""
    bits: int
    group_size: int
    """A multiple of 16, except that one group may hold all of K."""
    panels_of: int | None = None
    """N, where the rows lie in panels of 8, the last filled up with zeros: scales and zeros are then
    [ceil(N / 8), G, 8], and codes [ceil(N / 8), K / C, 8] words of C = 32 / bits codes each, as int32: code C w + i of
    row 8 p + j is in the bits from PLACES[bits][i] on of word [p, w, j]."""

    @property
    def out_features(self) -> int:
        return self.codes.shape[0] if self.panels_of is None else self.panels_of

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * ((8 if self.panels_of is None else WORD_BITS) // self.bits)

    @property
    def nbytes(self) -> int:
        order = 0 if self.order is None else self.order.nbytes
        return self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes + order

    def values(self) -> torch.Tensor:
        """What the codes stand for, in their own order: float32 [N, K], each rounded once."""
        codes, scales, zeros = self._rows()
        group = torch.arange(codes.shape[1], device=codes.device) // self.group_size
        return (codes.float() - zeros.float()[:, group]) * scales.float()[:, group]

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes uint8 [N, K], scales and zeros [N, G]."""
        n = self.panels_of
        if n is None:
            return unpack(self.codes, self.bits), self.scales, self.zeros
        codes = torch.stack([self.codes >> place & 2**self.bits - 1 for place in PLACES[self.bits]], dim=3)
        scales, zeros = (part.transpose(1, 2).flatten(0, 1)[:n] for part in (self.scales, self.zeros))
        return codes.to(torch.uint8).transpose(1, 2).flatten(2).flatten(0, 1)[:n], scales, zeros


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


def in_panels(
    weight: PackedWeight, room: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
) -> PackedWeight:
    """The same weight with its rows in panels, in memory from `room`."""
    n, k = weight.out_features, weight.in_features
    panels, step = -(-n // PANEL), max(1, _CHUNK // (PANEL * k)) * PANEL
    per_word = WORD_BITS // weight.bits
    held = room((panels, k // per_word, PANEL), torch.int32)
    for first in range(0, n, step):
        codes = _filled_up(unpack(weight.codes[first : first + step], weight.bits))
        words = codes.view(-1, PANEL, k // per_word, per_word).transpose(1, 2)
        held[first // PANEL :][: len(words)] = sum(
            words[..., i].to(torch.int32) << place for i, place in enumerate(PLACES[weight.bits])
        )
    scales, zeros = (
        room((panels, part.shape[1], PANEL), part.dtype).copy_(
            _filled_up(part).unflatten(0, (panels, PANEL)).transpose(1, 2)
        )
        for part in (weight.scales, weight.zeros)
    )
    return replace(weight, codes=held, scales=scales, zeros=zeros, panels_of=n)


def _filled_up(rows: torch.Tensor) -> torch.Tensor:
    """With rows of zeros up to a multiple of `PANEL`."""
    missing = -len(rows) % PANEL
    return torch.cat([rows, rows.new_zeros((missing, rows.shape[1]))]) if missing else rows
