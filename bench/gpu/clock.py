"""What times calls on a GPU: CUDA events around replays, the second-level cache emptied before each."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Protocol

import torch

from ...core.engine.accelerator import Accelerator

Call = Callable[[], torch.Tensor]

WARM_UP, LEAST, MOST, SECONDS = 3, 5, 50, 0.05
"""Replays before any counts; how many count at least and at most, and for how long they go on between."""
FLUSH = 256 << 20
"""Bytes written and read before each call: several times the second-level cache of any chip so far. The read leaves
nothing in it that has yet to be written to memory, at the call's expense. All of it takes longer than asking for the
replay does, so that the call finds the device waiting for it."""


class Clock(Protocol):
    """Seconds that the device takes."""

    def alone(self, call: Call) -> float:
        """For one call that finds nothing in the second-level cache."""

    def in_a_row(self, call: Callable[[], object]) -> float:
        """For each of several calls, one behind the other as they are made."""


class EventClock:
    """`Clock` of one GPU. A call `alone` is captured and replayed, so that launching it costs next to nothing."""

    def __init__(self, device: torch.device, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._flush = torch.empty(FLUSH // 4, dtype=torch.int32, device=device)

    def alone(self, call: Call) -> float:
        captured = self._accelerator.capture(call)
        assert captured is not None, "a GPU captures everything"
        for _ in range(WARM_UP):
            captured.replay()
        first = [self._one(captured.replay) for _ in range(LEAST)]
        more = min(MOST, int(SECONDS / max(min(first), 1e-6))) - LEAST
        return statistics.median([*first, *(self._one(captured.replay) for _ in range(more))])

    def _one(self, replay: Callable[[], None]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        self._flush.sum()
        begin.record()
        replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def in_a_row(self, call: Callable[[], object]) -> float:
        for _ in range(WARM_UP):
            call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(LEAST):
            call()
        end.record()
        end.synchronize()
        once = begin.elapsed_time(end) / LEAST
        count = max(LEAST, min(MOST, int(SECONDS * 1e3 / max(once, 1e-3))))
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count / 1e3


def copy_bandwidth(clock: Clock, size: int, device: torch.device) -> float:
    """Bytes a second, read and written together, in a copy of `size` bytes from one place of the device to another."""
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / clock.alone(lambda: target.copy_(source))


def product_rate(clock: Clock, side: int, device: torch.device) -> float:
    """Operations a second in torch's product of two square float16 matrices."""
    left, right = (torch.randn(side, side, device=device).half() for _ in range(2))
    return 2 * side**3 / clock.alone(lambda: left @ right)
