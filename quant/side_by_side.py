"""Linears of one input that cannot be one matrix, because their number forms differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .base import LinearMethod


class SideBySide:
    """Applies its parts one after another and joins their outputs."""

    def __init__(self, parts: Sequence[LinearMethod]) -> None:
        self.parts = tuple(parts)
        self.weight_bytes = sum(part.weight_bytes for part in parts)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.apply(x) for part in self.parts], dim=1)

    def dequantize(self) -> torch.Tensor:
        return torch.cat([part.dequantize() for part in self.parts])
