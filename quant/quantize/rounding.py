"""Rounding to nearest: a grid of evenly spaced values for each group, and the codes of weights on it.

Grids are AutoGPTQ 0.7.1's (`Quantizer.find_params`), with three differences, each for the file's sake. Scales are
rounded to float16, in which files hold them, before codes are chosen by them. A zero point of 0 is avoided: the
original GPTQ format stores zero - 1, and readers disagree on what a stored -1 means. A symmetric grid is so for a
group of positive weights too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SMALLEST = 2.0**-24
"""The smallest positive float16; no scale is less."""


@dataclass(frozen=True)
class Rounded:
    """A weight [N, K] in codes: code j of row n stands for (code - zeros[n, g]) * scales[n, g], g = groups[j]."""

    codes: torch.Tensor
    """uint8 [N, K]"""
    scales: torch.Tensor
    """float32 [N, G], exact in float16."""
    zeros: torch.Tensor
    """uint8 [N, G]"""
    groups: torch.Tensor
    """int32 [K]: the group of each in-feature."""

    def values(self) -> torch.Tensor:
        """float32 [N, K]"""
        groups = self.groups.long()
        return (self.codes.float() - self.zeros.float()[:, groups]) * self.scales[:, groups]

    def rows(self, first: int, last: int) -> Rounded:
        """Of some outputs alone."""
        part = slice(first, last)
        return Rounded(self.codes[part], self.scales[part], self.zeros[part], self.groups)


def find_grid(values: torch.Tensor, bits: int, *, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The grid from the least to the largest of values float32 [..., g]: scales and zeros, float32 [...].

    Symmetric: from -a to a, a the largest absolute value, zero in the middle of the codes (at 2^(bits - 1), so
    that a itself is half a step out of reach). Else from min(values, 0) to max(values, 0), zero wherever 0 is.
    """
    top = 2**bits - 1
    least, largest = values.amin(dim=-1).clamp(max=0.0), values.amax(dim=-1).clamp(min=0.0)
    if symmetric:
        largest = torch.maximum(-least, largest)
        least = -largest
    nothing = largest == least
    least, largest = torch.where(nothing, -1.0, least), torch.where(nothing, 1.0, largest)
    scales = _stored((largest - least) / top)
    if symmetric:
        return scales, torch.full_like(scales, 2.0 ** (bits - 1))
    zeros = torch.round(-least / scales)
    at_zero = zeros < 1  # nothing to speak of is negative: codes 1 to top do
    scales = torch.where(at_zero, _stored(largest / (top - 1)), scales)
    return scales, zeros.clamp(1, top)


def to_codes(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest codes, ties to even; float32, of the shape that the three broadcast to."""
    return (torch.round(values / scales) + zeros).clamp_(0, 2**bits - 1)


def round_to_nearest(weight: torch.Tensor, bits: int, group_size: int, *, symmetric: bool) -> Rounded:
    """Each weight of float32 [N, K] on its group's grid, none in view of another; -1: one group a row."""
    size = weight.shape[1] if group_size == -1 else group_size
    groups = weight.unflatten(1, (-1, size))
    scales, zeros = find_grid(groups, bits, symmetric=symmetric)
    codes = to_codes(groups, scales.unsqueeze(2), zeros.unsqueeze(2), bits).flatten(1)
    return Rounded(codes.to(torch.uint8), scales, zeros.to(torch.uint8), in_order(weight.shape[1], size))


def in_order(features: int, size: int) -> torch.Tensor:
    """`Rounded.groups` of neighbours: int32 [features]."""
    return torch.arange(features, dtype=torch.int32) // size


def _stored(scales: torch.Tensor) -> torch.Tensor:
    return scales.clamp(min=SMALLEST).half().float()
