"""Write one safetensors file tensor by tensor, never holding more than one in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .cache import Progress
from .errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def write_safetensors(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: str,
    read: Callable[[str], np.ndarray],
    progress: Progress,
) -> None:
    """Write `read(name)` (float32) as `dtype` for every name, in the order of `shapes`.

    Raises `CheckpointError` where a value does not fit `dtype` or a tensor has another shape than announced.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [total, total + size]}
        total += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    done = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            values = read(name)
            if values.shape != shape:
                raise CheckpointError(f"tensor {name} has shape {values.shape}, its file announced {shape}")
            done += file.write(_encoded(name, values, dtype))
            progress("converting the weights", done, total)


def _encoded(name: str, values: np.ndarray, dtype: str) -> bytes:
    import numpy as np

    if not np.isfinite(values).all():
        raise CheckpointError(f"tensor {name} holds values that are not finite")
    if dtype == "BF16":
        # only written from bfloat16 sources (and norms made from them): the upper half of the float32,
        # rounded to even
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    with np.errstate(over="ignore"):  # found by the next line
        narrow = values.astype("<f2" if dtype == "F16" else "<f4")
    if not np.isfinite(narrow).all():
        raise CheckpointError(f"tensor {name} holds values beyond the range of float16")
    return narrow.tobytes()
