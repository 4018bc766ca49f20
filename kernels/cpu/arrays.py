"""How tensors reach the kernels: over the same memory, without a copy.

Making numpy's view of a tensor costs a microsecond, and a step would make two thousand of them. So the operations on
a step's path pass addresses, from which `array_at` makes an array again, inside the compiled code. Whoever passes an
address keeps the tensor until the call returns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from ..dense_weight import DenseWeight
from .compiled import inner
from .digits import QUAD
from .vector_ir import CACHE_LINE

NONE = np.empty(0, dtype=np.float32)
"""Stands for a bias or scale that is not there."""

_STAND_INS = {torch.float16: torch.uint16, torch.bfloat16: torch.int16}
"""numba knows no 16-bit floats: their bits come as integers (`vector_ir.FLOAT16`, `vector_ir.BFLOAT16`)."""

KINDS: dict[torch.dtype, np.generic] = {
    torch.float32: np.float32(0),
    torch.int8: np.int8(0),
    torch.float16: np.uint16(0),
    torch.bfloat16: np.int16(0),
}
"""By dtype, the value whose type tells `array_at` what lies at an address."""
TILED = np.uint8(0)
"""The same of int8 weights in panels as `digits` multiplies them."""


def kind(weight: DenseWeight) -> np.generic:
    """That of a weight in panels."""
    tiled = weight.dtype is torch.int8 and weight.values.shape[3] == QUAD
    return TILED if tiled else KINDS[weight.dtype]


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in dense float32; the tensor itself where it is so already."""
    if tensor.dtype is torch.float32 and tensor.is_contiguous():
        return tensor
    return tensor.float().contiguous()


def dense_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A tensor [T, heads, D] in float32 whose rows are dense, and how far one lies from the next, in elements.

    A view that is a slice of a fused output's columns is such already.
    """
    step, *within = tensor.stride()
    if tensor.dtype is not torch.float32 or within != [tensor.shape[2], 1]:
        tensor = tensor.float().contiguous()
        step = tensor.shape[1] * tensor.shape[2]
    return tensor, step


@intrinsic
def array_at(typingctx: Any, address: Any, like: Any, shape: Any) -> Any:
    """The array of `shape` (a tuple) that lies densely at `address`, of elements like the scalar `like`."""
    kind = types.Array(like, len(shape), "C")

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        data = b.inttoptr(args[0], context.get_data_type(like).as_pointer())
        sizes = cgutils.unpack_tuple(b, args[2])
        itemsize = context.get_constant(types.intp, like.bitwidth // 8)
        strides = [itemsize]
        for size in sizes[:0:-1]:
            strides.insert(0, b.mul(strides[0], size))
        array = make_array(kind)(context, b)
        populate_array(array, data=data, shape=sizes, strides=strides, itemsize=itemsize, meminfo=None)
        return array._getvalue()

    return kind(types.int64, like, types.UniTuple(types.intp, len(shape))), generate


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A dense tensor's memory."""
    stand_in = _STAND_INS.get(tensor.dtype)
    return (tensor if stand_in is None else tensor.view(stand_in)).numpy()


def as_floats(tensor: torch.Tensor) -> np.ndarray:
    """Any tensor's values in dense float32; a copy only where it is not so already."""
    return dense(tensor).numpy()


def optional(tensor: torch.Tensor | None) -> np.ndarray:
    """`as_floats`, or `NONE`."""
    return NONE if tensor is None else as_floats(tensor)


def address(tensor: torch.Tensor | None) -> int:
    """Where a dense tensor lies; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


@inner
def aligned(count):  # type: ignore[no-untyped-def]
    """Room for so many int8, flat, from the beginning of a cache line on."""
    values = np.empty(count + CACHE_LINE, np.int8)
    start = -values.ctypes.data % CACHE_LINE
    return values[start : start + count]
