"""The operations on a CPU: float32 arithmetic, every output's order of sums fixed by its own row.

Tensors are read and written in place; 16-bit activations are widened to float32 and rounded back once. All calls come
from one thread, which shares its work among `set_num_threads` of them.
"""

from __future__ import annotations

from .attention import paged_attention
from .embedding import embedding
from .linear_int8 import linear_int8
from .linear_w4 import linear_w4
from .linear_w8a8 import linear_w8a8
from .linears import linear, linear_invariant
from .lora import add_lora
from .norm_rope import add_rms_norm, rms_norm, rope_and_write_kv, silu_mul
from .team import set_num_threads
from .weights import hold, hold_packed, room

ROWS_INVARIANT = True
READS_ANY_FORM = True

__all__ = [
    "READS_ANY_FORM",
    "ROWS_INVARIANT",
    "add_lora",
    "add_rms_norm",
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
    "set_num_threads",
    "silu_mul",
]
