"""One quantised linear as the tools' files have it: names, shapes and dtypes of its tensors, all but the bias."""

from __future__ import annotations

import torch

from ..int8 import ROW_FORMAT
from ..packing import awq_words, words
from .rounding import Rounded


def gptq_tensors(rounded: Rounded, bits: int) -> dict[str, torch.Tensor]:
    """As AutoGPTQ 0.7.1: qweight int32 [K * bits / 32, N], qzeros int32 [G, N * bits / 32] (each zero less one),
    scales float16 [G, N], g_idx int32 [K].
    """
    stored = (rounded.zeros - 1) & (2**bits - 1)
    return {
        "qweight": words(rounded.codes, bits).t().contiguous(),
        "qzeros": words(stored.t(), bits),
        "scales": rounded.scales.t().half().contiguous(),
        "g_idx": rounded.groups,
    }


def awq_tensors(rounded: Rounded) -> dict[str, torch.Tensor]:
    """As AutoAWQ's gemm: qweight int32 [K, N / 8], qzeros int32 [G, N / 8], scales float16 [G, N]."""
    return {
        "qweight": awq_words(rounded.codes.t()),
        "qzeros": awq_words(rounded.zeros.t()),
        "scales": rounded.scales.t().half().contiguous(),
    }


def int8_tensors(quantized: torch.Tensor, absmax: torch.Tensor) -> dict[str, torch.Tensor]:
    """As transformers saves bitsandbytes' linears: weight int8 [N, K], SCB float32 [N], weight_format uint8."""
    return {
        "weight": quantized,
        "SCB": absmax,
        "weight_format": torch.tensor(ROW_FORMAT, dtype=torch.uint8),
    }
