"""Memory in large pages: nothing is taken before it is written, and nobody has another's."""

from __future__ import annotations

import itertools

import psutil
import pytest
import torch
from heddle.kernels import cpu, large_pages
from heddle.kernels.large_pages import LARGE_PAGE, lazy_zeros, room


def test_memory_is_taken_when_it_is_written() -> None:
    before = psutil.Process().memory_info().rss
    memory = lazy_zeros((64, LARGE_PAGE))
    assert psutil.Process().memory_info().rss - before < LARGE_PAGE
    memory[0].fill_(1)
    taken = psutil.Process().memory_info().rss - before
    assert LARGE_PAGE <= taken < 4 * LARGE_PAGE
    assert int(memory[1:3].sum()) == 0


def test_it_begins_with_a_large_page() -> None:
    assert lazy_zeros((3, 5)).data_ptr() % LARGE_PAGE == 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 3), (1,), (7, 5), (3, 2, 8, 2)])
def test_rooms_do_not_overlap(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = [torch.randint(-99, 99, shape).to(dtype) for _ in range(3)]
    rooms = [room(shape, dtype) for _ in given]
    for one, values in zip(rooms, given, strict=True):
        assert not one.any()
        assert one.data_ptr() % 64 == 0
        one.copy_(values)
    for one, values in zip(rooms, given, strict=True):
        assert one.is_contiguous()
        assert torch.equal(one, values)


def test_more_than_a_chunk_and_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "CHUNK", 4096)
    given = [torch.randint(-99, 99, (size,), dtype=torch.int8) for size in (4000, 90, 10_000, 1, 4096)]
    rooms = [room((len(one),), torch.int8).copy_(one) for one in given]
    for one, values in zip(rooms, given, strict=True):
        assert torch.equal(one, values)


def test_weights_lie_one_after_another() -> None:
    rooms = [cpu.room((64, 64), torch.int8, torch.device("cpu")) for _ in range(8)]
    held = [cpu.hold(matrix).values for matrix in rooms]
    steps = [after.data_ptr() - before.data_ptr() for before, after in itertools.pairwise(held)]
    assert steps.count(64 * 64) >= len(steps) - 1, "but for where a chunk ends"
