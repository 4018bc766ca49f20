"""The operations on a CPU."""

from __future__ import annotations

from ..reference import (
    add_lora,
    add_rms_norm,
    embedding,
    linear,
    linear_int8,
    linear_invariant,
    paged_attention,
    rms_norm,
    rope_and_write_kv,
    silu_mul,
)

ROWS_INVARIANT = False

__all__ = [
    "ROWS_INVARIANT",
    "add_lora",
    "add_rms_norm",
    "embedding",
    "linear",
    "linear_int8",
    "linear_invariant",
    "paged_attention",
    "rms_norm",
    "rope_and_write_kv",
    "silu_mul",
]
