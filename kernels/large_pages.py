"""Memory of a CPU in large pages, where the system gives them: weights and the pool.

A step reads a hundred megabytes and more from end to end. In pages of 4 KiB that is a look-up in the page tables for
every one of them, through two levels of tables in a virtual machine, and hardware fetches ahead only within a page.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

LARGE_PAGE = 2 << 20
"""Bytes; x86-64's and most others' too."""
CHUNK = 16 << 20
"""Bytes that `room` maps at a time."""
CACHE_LINE = 64
"""Bytes; each tensor begins with one."""


def lazy_zeros(shape: tuple[int, ...]) -> torch.Tensor:
    """uint8 zeros whose pages take memory when they are first written to. Raises OSError where there is no room."""
    size = math.prod(shape)
    memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -mapped.data_ptr() % LARGE_PAGE
    return mapped[begin : begin + size].view(shape)


class _Chunk:
    """What is left of the memory that was mapped last. What was given out keeps it alive."""

    def __init__(self) -> None:
        self.left = torch.empty(0, dtype=torch.uint8)


_chunk = _Chunk()


def room(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in large pages, for what is read in every step: one tensor behind the other. Not for several threads at
    once. Raises OSError where there is no room."""
    count = math.prod(shape) * dtype.itemsize
    size = -(-count // CACHE_LINE) * CACHE_LINE
    if len(_chunk.left) < size:
        _chunk.left = lazy_zeros((max(CHUNK, size),))
    taken, _chunk.left = _chunk.left[:count], _chunk.left[size:]
    return taken.view(dtype).view(shape)
