"""How tensors reach the kernels: as flat numpy arrays over the same memory."""

from __future__ import annotations

import numpy as np
import torch

NONE = np.empty(0, dtype=np.float32)
"""Stands for a bias or scale that is not there."""

_AS_INTEGER = {torch.float16: torch.uint16, torch.bfloat16: torch.int16}


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A dense tensor's memory as a flat array; float16 as uint16 and bfloat16 as int16, which numba can name."""
    kind = _AS_INTEGER.get(tensor.dtype)
    flat = tensor.view(-1)
    return (flat if kind is None else flat.view(kind)).numpy()


def rows_of(tensor: torch.Tensor) -> tuple[np.ndarray, int]:
    """A flat float32 array and the distance from one row to the next, for a tensor [rows, …] of any float dtype.

    A view whose rows are dense (a slice of a fused output's columns) is not copied.
    """
    tensor = tensor.float()
    if tensor.is_contiguous():
        return tensor.view(-1).numpy(), tensor.stride(0)
    length = tensor[0].numel()
    if not tensor[0].is_contiguous():
        return tensor.contiguous().view(-1).numpy(), length
    step = tensor.stride(0)
    return tensor.as_strided(((tensor.shape[0] - 1) * step + length,), (1,)).numpy(), step


def optional(tensor: torch.Tensor | None) -> np.ndarray:
    """A float32 vector, or `NONE`."""
    return NONE if tensor is None else tensor.float().contiguous().numpy()
