"""Exact conversions between float32, float16 and bfloat16 in numpy, which has no bfloat16.

A bfloat16 array is a uint16 array of its bits. Number forms go by their safetensors names: F32, F16, BF16.
"""

from __future__ import annotations

from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

FloatForm = Literal["F32", "F16", "BF16"]
Array = NDArray[np.generic]

NUMPY: dict[FloatForm, np.dtype[np.generic]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
"""How each form is held."""

_INF_BITS: dict[FloatForm, int] = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}


def magnitude_bits(values: Array, form: FloatForm) -> int:
    """The largest magnitude in `values` as bits without the sign. They order like the magnitudes; NaN above
    all."""
    if values.size == 0:
        return 0
    if form == "F32":
        return int((values.view(np.uint32) & np.uint32(0x7FFFFFFF)).max())
    return int((values.view(np.uint16) & np.uint16(0x7FFF)).max())


def is_finite(bits: int, form: FloatForm) -> bool:
    """Whether a magnitude from `magnitude_bits` is a number: neither infinite nor NaN."""
    return bits < _INF_BITS[form]


def magnitude(bits: int, form: FloatForm) -> float:
    """The value of a magnitude from `magnitude_bits`."""
    raw = np.array([bits], dtype=np.uint32 if form == "F32" else np.uint16)
    return float(to_float32(raw.view(NUMPY[form]), form)[0])


def to_float32(values: Array, form: FloatForm) -> NDArray[np.float32]:
    """Exact widening; an F32 array is returned as it is."""
    if form == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return cast(NDArray[np.float32], values.astype(np.float32, copy=False))


def convert(values: Array, form: FloatForm, to: FloatForm) -> Array:
    """Round once, to nearest and ties to even. Raises OverflowError if a finite value has no finite
    counterpart."""
    if form == to:
        return values
    wide = to_float32(values, form)
    if to == "F32":
        return wide
    if to == "F16":
        with np.errstate(over="ignore"):
            narrow: Array = wide.astype(np.float16)
    else:
        bits = wide.view(np.uint32)
        narrow = (
            (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        ).astype(np.uint16)
    if not is_finite(magnitude_bits(narrow, to), to):
        raise OverflowError(f"{float(np.abs(wide).max()):g} is beyond the range of {to}")
    return narrow
