"""Weights as the products here read them: in panels, in large pages."""

from __future__ import annotations

import torch

from .. import dense_weight, large_pages, packed_weight
from ..dense_weight import DenseWeight
from ..packed_weight import PackedWeight
from .digits import QUAD, TILE_INPUTS, TILE_OUTPUTS, X86_DIGITS


def hold(matrix: torch.Tensor) -> DenseWeight:
    """The same weight, to be multiplied with. `matrix` is given up."""
    if X86_DIGITS and matrix.dtype is torch.int8:
        return dense_weight.in_panels(matrix, TILE_OUTPUTS, QUAD, TILE_INPUTS // QUAD)
    return dense_weight.in_panels(matrix)


def room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a matrix that is to be held."""
    return (
        large_pages.room(shape, dtype)
        if device.type == "cpu"
        else torch.empty(shape, dtype=dtype, device=device)
    )


def hold_packed(weight: PackedWeight) -> PackedWeight:
    """The same weight, to be multiplied with."""
    return packed_weight.in_panels(weight, large_pages.room)
