"""What an adapter is checked against: the base's shapes and identity. Control code: no torch."""

from __future__ import annotations

import msgspec

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linears an adapter can change, in the order that tables use."""


class BaseModel(msgspec.Struct, frozen=True, kw_only=True):
    """The base as adapters see it."""

    name: str
    """Served name, for messages and receipts."""
    fingerprint: str
    """`sha256:` over architecture, shapes and tokenizer; the same for every number form of one model."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    shapes: dict[str, tuple[int, int]]
    """Module name of MODULES -> (out_features, in_features), equal in all layers."""
    tied_embeddings: bool = False
    folder: str | None = None
    """The checkpoint's local folder, where copies of its embeddings that adapters bring along can be
    compared. None: an adapter with such copies is refused."""
