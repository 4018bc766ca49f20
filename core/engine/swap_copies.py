"""A step's memory moves on the device: blocks out to host memory, back in, and copied within the pool."""

from __future__ import annotations

import time

import torch

from ...kernels.pool import Pool
from ..scheduling.plan import StepPlan
from .accelerator import Accelerator

SLAB_BYTES = 64 << 20
"""Host memory is taken in pieces of this size, when their first slot is written."""


class SwapCopies:
    """Swap space's memory: slot s is row s % n of slab s // n, n slots to a slab, the last one as short as it may
    be."""

    def __init__(self, pool: Pool, num_slots: int, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._pages = pool.pages()  # uint8 [blocks, block_bytes]
        self._num_slots = num_slots
        self._slab_slots = max(1, SLAB_BYTES // self._pages.shape[1])
        self._slabs: dict[int, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Host memory taken so far."""
        return sum(slab.nbytes for slab in self._slabs.values())

    def clear(self) -> None:
        """Nothing lies in it any more: give its memory back."""
        self._slabs.clear()

    def move(self, plan: StepPlan) -> float:
        """Do the plan's moves, in the order that they need: a block that is copied out may be filled again in
        the same step. Returns the seconds that copies to and from host memory took."""
        began = time.perf_counter()
        for swap in plan.swap_out:
            self._slot(swap.host_slot).copy_(self._pages[swap.block], non_blocking=True)
        for swap in plan.swap_in:
            self._pages[swap.block].copy_(self._slot(swap.host_slot), non_blocking=True)
        seconds = 0.0
        if plan.swap_out or plan.swap_in:
            self._accelerator.synchronize()
            seconds = time.perf_counter() - began
        for source, target in plan.copies:
            self._pages[target].copy_(self._pages[source])
        return seconds

    def _slot(self, slot: int) -> torch.Tensor:
        index, row = divmod(slot, self._slab_slots)
        slab = self._slabs.get(index)
        if slab is None:
            shape = (min(self._slab_slots, self._num_slots - index * self._slab_slots), self._pages.shape[1])
            slab = self._slabs[index] = self._accelerator.pinned(*shape)
        return slab[row]
