"""This process' memory as Linux sees it: what is resident, and giving back what is not used. No torch."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import psutil

_libc = ctypes.CDLL(None, use_errno=True)


def resident() -> tuple[int, int]:
    """Bytes of this process in RAM, and how many of them are pages of mapped files (programs, libraries)."""
    info = psutil.Process().memory_info()
    return info.rss, getattr(info, "shared", 0)


def resident_part(address: int, size: int) -> int:
    """How many of the `size` bytes from `address` on are in RAM: memory never written to is not (mincore(2))."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + size - begin
    pages = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
    if _libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_void_p(pages.ctypes.data)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return min(size, int((pages & 1).sum()) * mmap.PAGESIZE)


def give_back() -> None:
    """Return to the system what was allocated and freed again.

    glibc keeps it otherwise: after loading, that is as much as the largest temporaries.
    """
    trim = getattr(_libc, "malloc_trim", None)  # other C libraries go without
    if trim is not None:
        trim(0)
