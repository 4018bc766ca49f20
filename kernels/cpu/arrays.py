"""How tensors reach the kernels: as numpy arrays over the same memory, without a copy.

A view costs a microsecond and a step makes a thousand of them, so a dense tensor is handed over in the shape it has:
kernels count elements from its beginning.
"""

from __future__ import annotations

import numpy as np
import torch

from ..pool import Pool

NONE = np.empty(0, dtype=np.float32)
"""Stands for a bias, scale or residual that is not there."""

_STAND_INS = {torch.float16: torch.uint16, torch.bfloat16: torch.int16}
"""numba knows no 16-bit floats: their bits come as integers (`vector_ir.FLOAT16`, `vector_ir.BFLOAT16`)."""


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A dense tensor's memory."""
    stand_in = _STAND_INS.get(tensor.dtype)
    return (tensor if stand_in is None else tensor.view(stand_in)).numpy()


def as_floats(tensor: torch.Tensor) -> np.ndarray:
    """Any tensor's values in dense float32; a copy only where it is not so already."""
    return tensor.float().contiguous().numpy()


def optional(tensor: torch.Tensor | None) -> np.ndarray:
    """`as_floats`, or `NONE`."""
    return NONE if tensor is None else as_floats(tensor)


def spread_rows(tensor: torch.Tensor) -> tuple[np.ndarray, int]:
    """A tensor [T, heads, D] in float32 as a flat array, and how far one row lies from the next.

    A view whose rows are dense, as a slice of a fused output's columns, is not copied.
    """
    tensor = tensor.float()
    rows, heads, size = tensor.shape
    step, *dense = tensor.stride()
    if dense != [size, 1]:
        return tensor.contiguous().view(-1).numpy(), heads * size
    return tensor.as_strided(((rows - 1) * step + heads * size,), (1,)).numpy(), step


def pool_array(pool: Pool, dtype: torch.dtype) -> np.ndarray:
    """The whole pool in elements of `dtype`."""
    return pool.memory.view(_STAND_INS.get(dtype, dtype)).numpy()
