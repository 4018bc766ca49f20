"""Everything one model forward is given besides weights and pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.ops import AttentionBatch, LoraBatch


@dataclass(frozen=True)
class ForwardBatch:
    """T rows of any mix of sequences, prefill chunks and decodes alike; tensors on the model's device."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]: of each row in its own sequence."""
    attention: AttentionBatch
    lora: LoraBatch | None
    """None: every row is the base's."""
