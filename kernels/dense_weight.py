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
    """[N, K]; or in panels [ceil(N / 8), ceil(K / 2), 8, 2], where element (n, k) is values[n // 8, k // 2, n % 8,
    k % 2] and what lies beyond N and K is zero. So one vector holds eight outputs' weights for one pair of inputs."""
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
        (n, k), (panels, pairs, *_) = self.shape, self.values.shape
        return self.values.transpose(1, 2).reshape(panels * PANEL, pairs * PAIR)[:n, :k]

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix, for int64 indices [T]: [T, K]."""
        if self.values.dim() == 2:
            return self.values[indices]
        return self.values[indices // PANEL, :, indices % PANEL].flatten(1)[:, : self.shape[1]]


def in_panels(matrix: torch.Tensor) -> DenseWeight:
    """`matrix` [N, K] in panels: in its own memory where N and K are multiples of 8 and 2, so give it up."""
    n, k = matrix.shape
    panels, pairs = -(-n // PANEL), -(-k // PAIR)
    if (panels * PANEL, pairs * PAIR) != (n, k):
        padded = matrix.new_zeros((panels * PANEL, pairs * PAIR))
        padded[:n, :k] = matrix
        matrix = padded
    blocks = matrix.contiguous().view(panels, PANEL, pairs, PAIR)
    for part in blocks.split(max(1, _CHUNK // (PANEL * PAIR * max(1, pairs)))):
        moved = part.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        part.view(moved.shape).copy_(moved)
    return DenseWeight(blocks.view(panels, pairs, PANEL, PAIR), (n, k))
