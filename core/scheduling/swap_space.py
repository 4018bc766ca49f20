"""Host memory for sequences that gave way: numbered slots, each as large as a block of the pool. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


class SwapSpace:
    """Who has which slot is up to the caller; lower slots are given out first, so that little is touched."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._touched = 0  # slots from here on were never given out
        self._returned: list[int] = []  # a heap

    @property
    def used(self) -> int:
        """Slots that are given out."""
        return self._touched - len(self._returned)

    def take(self, count: int) -> list[int] | None:
        """`count` slots; None, and nothing changed, where there are too few."""
        if self.used + count > self.num_slots:
            return None
        again = min(count, len(self._returned))
        slots = [heapq.heappop(self._returned) for _ in range(again)]
        fresh = range(self._touched, self._touched + count - again)
        self._touched = fresh.stop
        return [*slots, *fresh]

    def give(self, slots: Sequence[int]) -> None:
        """These slots are free again."""
        for slot in slots:
            heapq.heappush(self._returned, slot)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """AssertionError where a slot is lost, or held twice. For tests."""
        slots = [slot for some in held for slot in some]
        assert sorted([*slots, *self._returned]) == list(range(self._touched)), "a swap slot is lost"
        assert self._touched <= self.num_slots
