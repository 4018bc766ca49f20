"""Memory as Linux sees it: what there is, what of it this process holds, and giving back what is not used. No torch."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import psutil

_libc = ctypes.CDLL(None, use_errno=True)

LARGEST_KEPT = 32 << 20
"""Bytes of one allocation that `keep_freed` concerns: glibc's limit."""
KEPT = 64 << 20
"""Bytes at the end of the heap that are kept."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later."""


def resident() -> tuple[int, int]:
    """Bytes of this process in RAM, and how many of them are pages of mapped files (programs, libraries)."""
    info = psutil.Process().memory_info()
    return info.rss, getattr(info, "shared", 0)


def available_memory() -> int:
    """Bytes of host memory this process can still take: the machine's, or its control group's where that is
    less."""
    available = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        current = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        held = current - int(stat["file"])  # the kernel gives cached files back
    except (OSError, ValueError, KeyError):  # no control group, or one without a limit ("max")
        return available
    return max(0, min(available, limit - held))


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


def keep_freed() -> None:
    """Keep from now on what this process allocates and frees again: each step needs as much as the one before.

    glibc may otherwise take whatever has more than 128 KiB from the system each time and return it, which costs a fault
    for every page: 50,000 of them in some prompts of 256 tokens of the demo base, 240 ms where the others took 170.
    """
    mallopt = getattr(_libc, "mallopt", None)  # other C libraries go without
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(_M_TRIM_THRESHOLD, KEPT)


def populate(address: int, size: int) -> bool:
    """Have the `size` bytes from `address` on, whole pages of this process, in RAM, as if each was written to; what
    they hold stays. False where the system cannot."""
    return _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) == 0
