"""Triton's interpreter, with its limits lifted so that it computes what a GPU would.

It runs kernels as numpy, which has no bfloat16, and whose matrix product picks an order of sums by the matrix's shape.
Tensor cores add along K in steps; so does the product here, which lets tests compare bits over numbers of rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_cast = interpreter.InterpreterBuilder.cast_impl
_call_library = interpreter.InterpretedFunction.__call__


def _wide(values: Any) -> np.ndarray:
    if values.dtype == tl.bfloat16:
        return (values.data.astype(np.uint32) << 16).view(np.float32)
    return values.data.astype(np.float32)


def _dot(self: Any, a: Any, b: Any, total: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """total + a @ b, products in float32, added one k after another; those of int8 exactly, in int32."""
    if total.dtype.scalar == tl.int32:
        return interpreter.TensorHandle(
            total.data + a.data.astype(np.int32) @ b.data.astype(np.int32), tl.int32
        )
    left, right, sums = _wide(a), _wide(b), total.data.astype(np.float32)
    with np.errstate(all="ignore"):
        for k in range(left.shape[1]):
            sums += left[:, k : k + 1] * right[k]
    return interpreter.TensorHandle(sums, total.dtype.scalar)


def _rounding_cast(self: Any, source: Any, target: Any) -> Any:
    """To bfloat16 from any dtype by rounding, as hardware does: the interpreter cuts off, and knows float32 only."""
    if target.scalar != tl.bfloat16 or source.dtype.scalar == tl.bfloat16:
        return _cast(self, source, target)
    rounded = torch.from_numpy(np.array(source.data, np.float32)).bfloat16().view(torch.uint16).numpy()
    return interpreter.TensorHandle(rounded, tl.bfloat16)


def _call(helper: Any, *args: Any, **kwargs: Any) -> Any:
    """A helper's names are those of its kernel, set by the launch: setting them again takes a third of the time."""
    if helper.fn.__module__.startswith("heddle."):
        return helper.rewrite()(*args, **kwargs)
    return _call_library(helper, *args, **kwargs)


def set_right() -> None:
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.cast_impl = _rounding_cast
    interpreter.InterpretedFunction.__call__ = _call
    check_overflow(False)


def check_overflow(on: bool) -> None:
    """Whether sums and products of integers are made twice, the second time in 64 bits: for tests that are about it."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=on)
