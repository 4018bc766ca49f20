"""The operations in Triton: for CUDA and, where TRITON_INTERPRET=1 is set before Triton is imported, for CPU tensors.

Not run on a GPU yet: the kernels are tested under Triton's interpreter and compiled for four chips.
"""

from __future__ import annotations

from ..reference import hold, hold_packed, room
from . import lora, tiles
from .attention import paged_attention
from .elementwise import add_rms_norm, embedding, rms_norm, rope_and_write_kv, silu_mul
from .linear_w8a8 import linear_w8a8
from .linears import linear, linear_int8, linear_invariant, linear_w4
from .lora import add_lora
from .sampling import choose_tokens

ROWS_INVARIANT = True
READS_ANY_FORM = False
BUILT_FOR_ROWS = (*(tile.rows for tile in tiles.FEW), lora.FEW_PAIRS + 1)
"""Numbers of rows, each on one adapter, of which each reaches kernels that the others do not."""

__all__ = [
    "BUILT_FOR_ROWS",
    "READS_ANY_FORM",
    "ROWS_INVARIANT",
    "add_lora",
    "add_rms_norm",
    "choose_tokens",
    "embedding",
    "hold",
    "hold_packed",
    "linear",
    "linear_int8",
    "linear_invariant",
    "linear_w4",
    "linear_w8a8",
    "paged_attention",
    "rms_norm",
    "room",
    "rope_and_write_kv",
    "silu_mul",
]
