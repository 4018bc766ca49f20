"""Integers of 4 or 8 bit out of the int32 words that GPTQ and AWQ files keep them in, and into them."""

from __future__ import annotations

import torch

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ's gemm order: column j of 8 is at this nibble, counted from the lowest (0 to 7 pack to 0x75316420)."""


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, C * 32 / bits]: each word's integers, from its lowest bits on."""
    octets = words.contiguous().view(torch.uint8)  # little-endian, as every machine torch runs on
    if bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], dim=2).flatten(1)


def awq_fields(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, C * 8]: each word's eight integers, brought into the order of columns."""
    places = fields(words, 4).view(words.shape[0], -1, len(AWQ_PLACES))
    return places[:, :, list(AWQ_PLACES)].flatten(1)


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [R, C] -> int32 [R, C * bits / 32]: what `fields` reads."""
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return codes.clone(memory_format=torch.contiguous_format).view(torch.int32)


def awq_words(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [R, C], below 16 -> int32 [R, C / 8]: what `awq_fields` reads."""
    octets = codes.reshape(codes.shape[0], -1, len(AWQ_PLACES))
    placed = torch.empty_like(octets)
    placed[:, :, list(AWQ_PLACES)] = octets
    return words(placed.flatten(1), 4)
