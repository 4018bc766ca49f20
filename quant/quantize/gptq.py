"""GPTQ: weights rounded column by column, what a column loses made up for by those that are still to come.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
arXiv 2210.17323; order of columns, damping and files are AutoGPTQ 0.7.1's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..base import QuantError
from .rounding import Rounded, find_grid, in_order, to_codes

BLOCK = 128
"""Columns whose losses are gathered before the columns after them are corrected, in one product."""


class Hessian:
    """2 X^T X / n over inputs X [n, K] that come in parts: how much each pair of in-features matters."""

    def __init__(self, features: int) -> None:
        self._sum = torch.zeros((features, features))
        self._rows = 0

    def add(self, x: torch.Tensor) -> None:
        """Take in float32 [..., K]."""
        rows = x.reshape(-1, x.shape[-1])
        self._sum.addmm_(rows.t(), rows)
        self._rows += rows.shape[0]

    def value(self) -> torch.Tensor:
        """float32 [K, K]"""
        return self._sum * (2 / self._rows)


@dataclass(frozen=True)
class Settings:
    """How to round."""

    bits: int
    group_size: int
    """Divides K; -1: one group a row."""
    act_order: bool = False
    """Columns with the largest activations first, while most others can still make up for them."""
    symmetric: bool = True
    damp: float = 0.01
    """Added to the Hessian's diagonal, as a share of its mean."""


def quantize(weight: torch.Tensor, hessian: torch.Tensor, settings: Settings) -> Rounded:
    """Round float32 [N, K] so that |x (W - W')^T|^2 over the inputs x behind `hessian` [K, K] stays small.

    In the order of columns j: q_j = round(w_j), then every later column k loses (w_j - q_j) U_jk / U_jj, where
    U is the upper Cholesky factor of the inverse of the damped Hessian. A group's grid is chosen when its first
    column is reached, from its columns as they are by then. Rows do not see each other, so linears of one input
    can be rounded as one. In-features whose inputs were always zero have no say: their weights become zero.

    Raises QuantError where the Hessian has no inverse even so (inputs that are not finite).
    """
    size = weight.shape[1] if settings.group_size == -1 else settings.group_size
    features, importance = weight.shape[1], hessian.diagonal()
    dead = importance == 0
    weight, hessian = weight.float().masked_fill(dead, 0.0), hessian.clone()
    hessian.diagonal()[dead] = 1.0
    groups = in_order(features, size)
    order = None
    if settings.act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
        weight, hessian = weight[:, order], hessian[order][:, order]
    codes, scales, zeros = _round_columns(weight, inverse_factor(hessian, settings.damp), size, settings)
    if order is not None:
        place = order.argsort()
        codes, groups = codes[:, place], groups[place]
    return Rounded(codes.to(torch.uint8), scales, zeros.to(torch.uint8), groups)


def inverse_factor(hessian: torch.Tensor, damp: float) -> torch.Tensor:
    """U, upper triangular with U^T U = (H + damp * mean(diagonal) * 1)^-1: float32 [K, K], computed in float64."""
    factor = hessian.double()
    factor.diagonal().add_(damp * factor.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(factor)
    if not failed:
        factor = torch.cholesky_inverse(factor)
        factor, failed = torch.linalg.cholesky_ex(factor, upper=True)
    if failed or not factor.isfinite().all():
        raise QuantError(
            f"the Hessian of {len(hessian)} inputs is not positive definite with damping {damp}: "
            "use a larger --damp or more calibration text"
        )
    return factor.float()


def _round_columns(
    weight: torch.Tensor, factor: torch.Tensor, size: int, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], scales and zeros [N, G], float32 all."""
    weight = weight.t().contiguous()  # a column's values side by side
    codes, scales, zeros = torch.empty_like(weight), [], []
    for first, last in _blocks(len(weight), size):
        block, own = weight[first:last], factor[first:last, first:last]
        losses = torch.empty_like(block)
        for j in range(last - first):
            if (first + j) % size == 0:
                group = weight[first + j : first + j + size].t()
                scale, zero = find_grid(group, settings.bits, symmetric=settings.symmetric)
                scales.append(scale)
                zeros.append(zero)
            code = to_codes(block[j], scale, zero, settings.bits)
            codes[first + j] = code
            losses[j] = (block[j] - (code - zero) * scale) / own[j, j]
            block[j:].addr_(own[j, j:], losses[j], alpha=-1)
        weight[last:].addmm_(factor[first:last, last:].t(), losses, alpha=-1)
    return codes.t(), torch.stack(scales, dim=1), torch.stack(zeros, dim=1)


def _blocks(columns: int, size: int) -> Iterator[tuple[int, int]]:
    """Bounds of blocks none of which begins or ends amid a group, except within one larger than a block.

    So a group's columns are all up to date when its grid is chosen.
    """
    span = max(size, BLOCK // size * size)
    for start in range(0, columns, span):
        end = min(start + span, columns)
        for first in range(start, end, BLOCK):
            yield first, min(first + BLOCK, end)
