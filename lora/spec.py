"""A checked adapter as plain data: which linears it changes and by how much. Control code: no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from .base import MODULES

Part = Literal["A", "B"]


class Delta(msgspec.Struct, frozen=True):
    """One adapted linear: y += scale * (x @ A.T) @ B.T with A [rank, in_features] and B [out_features,
    rank]."""

    layer: int
    module: int
    """Index in `base.MODULES`."""
    rank: int
    scale: float
    """A float32 value: alpha / rank, or as the adapter's config says."""

    @property
    def key(self) -> str:
        """`layers.0.q_proj`: how canonical files name it."""
        return f"layers.{self.layer}.{MODULES[self.module]}"


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a checked adapter is, without its weights."""

    digest: str
    """`sha256:` over the weights and what shapes them (place, rank, scale); see `canonical`."""
    deltas: list[Delta]
    """Ordered by layer and module."""
    tensors: list[tuple[str, str]]
    """Names in the adapter's own file of A and B of each delta."""
    rank: int
    """The largest."""
    target_modules: list[str]
    """Names of the adapted modules, in the order of `base.MODULES`."""
    matched: int
    """Tensors of the file that were understood: all of them."""
    total: int
    warnings: list[str]
    base_model: str
    """Served name of the base it was checked against."""
    size_bytes: int
    """Of A and B together as they are in the file."""
    dtype: str
    """Number form in the file: F32, F16 or BF16; several joined by `+`."""
    max_abs: float
    """The largest magnitude in A and B."""
