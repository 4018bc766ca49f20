"""Weights as the products here read them: in panels, in large pages."""

from __future__ import annotations

import torch

from .. import large_pages, packed_weight
from ..dense_weight import in_panels
from ..packed_weight import PackedWeight

hold = in_panels


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
