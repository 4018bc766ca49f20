"""A weight of one number an element: the matrix itself, or its elements in the order a CPU's products read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PANEL, PAIR = 8, 2
"""Out-features and in-features whose elements lie together in a panel."""
_CHUNK = 1 << 18
"""Elements reordered at a time, so that no second copy of a weight shows in memory."""


@dataclass(frozen=True)
class DenseWeight:
    """A matrix [N, K] in float or int8."""

    values: torch.Tensor
    """[N, K]; or in panels [ceil(N / P), ceil(K / I), P, I], where element (n, k) is values[n // P, k // I, n % P,
    k % I] and what lies beyond N and K is zero. So one vector holds P outputs' weights for I inputs: `PANEL` and
    `PAIR`, or as many as an instruction multiplies at once; there may be more zeros beyond K."""
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def matrix(self) -> torch.Tensor:
        """[N, K]; a copy where the values lie in panels."""
        if self.values.dim() == 2:
            return self.values
        n, k = self.shape
        return self.values.transpose(1, 2).flatten(2).flatten(0, 1)[:n, :k]

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix, for int64 indices [T]: [T, K]."""
        if self.values.dim() == 2:
            return self.values[indices]
        panel = self.values.shape[2]
        return self.values[indices // panel, :, indices % panel].flatten(1)[:, : self.shape[1]]


def in_panels(matrix: torch.Tensor, panel: int = PANEL, inputs: int = PAIR, whole: int = 1) -> DenseWeight:
    """`matrix` [N, K] in panels of `panel` x `inputs`, K filled up to a multiple of `whole` times as many: in its own
    memory where nothing has to be filled up, so give it up."""
    n, k = matrix.shape
    panels, groups = -(-n // panel), -(-k // (inputs * whole)) * whole
    if (panels * panel, groups * inputs) != (n, k):
        padded = matrix.new_zeros((panels * panel, groups * inputs))
        padded[:n, :k] = matrix
        matrix = padded
    blocks = matrix.contiguous().view(panels, panel, groups, inputs)
    for part in blocks.split(max(1, _CHUNK // (panel * inputs * max(1, groups)))):
        moved = part.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        part.view(moved.shape).copy_(moved)
    return DenseWeight(blocks.view(panels, groups, panel, inputs), (n, k))
