"""Rotary positions: frequencies and the table of their cosines and sines."""

from __future__ import annotations

import math

import torch

from .config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions: float32 [head_dim / 2].

    The steps and their float32 roundings are those of transformers, because at position 10,000 one unit in
    the last place is already a thousandth of a radian. `linear` divides all (Position Interpolation, Chen
    2023); `llama3` divides those whose wavelength is beyond the original context, keeps the short ones, and
    blends in between (Llama 3.1, `apply_scaling`).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type != "llama3":
        return plain
    context = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    share = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - share) * plain / rope.factor + share * plain
    long = wavelengths > context / rope.low_freq_factor
    short = wavelengths < context / rope.high_freq_factor
    return torch.where(long, plain / rope.factor, torch.where(short, plain, blended))


def cos_sin_table(rope: Rope, head_dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * frequency, each float32 [positions, head_dim / 2]."""
    angles = torch.arange(positions, dtype=torch.float32).unsqueeze(1) * inverse_frequencies(rope, head_dim)
    return angles.cos(), angles.sin()
