"""Weights in panels: the same matrix, element by element."""

from __future__ import annotations

import pytest
import torch
from heddle.kernels.dense_weight import in_panels

SHAPES = [(1, 1), (3, 5), (8, 2), (31, 64), (24, 577), (5000, 60)]


@pytest.mark.parametrize("layout", [(), (16, 4, 16)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_matrix_and_rows_come_back(n: int, k: int, dtype: torch.dtype, layout: tuple[int, ...]) -> None:
    matrix = torch.randint(-127, 128, (n, k)).to(dtype)
    held = in_panels(matrix.clone(), *layout)
    assert held.shape == (n, k)
    assert torch.equal(held.matrix(), matrix)
    indices = torch.tensor([n - 1, 0, n // 2, n - 1])
    assert torch.equal(held.rows(indices), matrix[indices])
    assert held.rows(indices[:0]).shape == (0, k)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_element_by_element(n: int, k: int) -> None:
    matrix = torch.arange(1, n * k + 1, dtype=torch.float32).view(n, k)
    values = in_panels(matrix.clone()).values
    for row, column in {(0, 0), (n - 1, k - 1), (n // 2, k // 2), (0, k - 1)}:
        assert values[row // 8, column // 2, row % 8, column % 2] == matrix[row, column]
    assert values.count_nonzero() == n * k, "what is beyond the matrix is zero"


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_element_by_element_in_whole_tiles(n: int, k: int) -> None:
    matrix = torch.arange(1, n * k + 1, dtype=torch.float32).view(n, k)
    values = in_panels(matrix.clone(), 16, 4, 16).values
    assert values.shape == (-(-n // 16), -(-k // 64) * 16, 16, 4)
    for row, column in {(0, 0), (n - 1, k - 1), (n // 2, k // 2), (0, k - 1)}:
        assert values[row // 16, column // 4, row % 16, column % 4] == matrix[row, column]
    assert values.count_nonzero() == n * k


def test_no_second_copy_is_made_of_a_weight_that_fits() -> None:
    matrix = torch.randn(64, 128)
    assert in_panels(matrix).values.data_ptr() == matrix.data_ptr()
