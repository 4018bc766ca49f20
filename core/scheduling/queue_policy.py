"""In which order waiting sequences are considered. Control code: no torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from .sequence import Sequence, Status

BATCH = 16
"""Sequences that a pass over a queue takes out at first; most passes end after a few."""


class QueuePolicy(Protocol):
    """The waiting sequences, and who goes first: `FairQueue`, and `Fifo` within a tenant.

    Whatever the order, it must let every sequence come first after a bounded number of others.
    """

    def add(self, sequence: Sequence) -> None:
        """It waits: newly submitted, or preempted."""

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer."""

    def charge(self, sequence: Sequence, units: float) -> None:
        """So much was done for it, in units of one prompt token computed."""

    def hold_back(self, sequence: Sequence) -> None:
        """Nobody who may not overtake it is considered any more in the pass under way."""

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, the first to be admitted first. The sequence considered last may be removed, and
        others added, meanwhile."""

    def __len__(self) -> int: ...


class Fifo:
    """Preempted sequences first, then by arrival; nobody overtakes who is held back."""

    def __init__(self) -> None:
        self._preempted: dict[int, Sequence] = {}
        self._fresh: dict[int, Sequence] = {}
        self._held_back = False

    def add(self, sequence: Sequence) -> None:
        if sequence.status is Status.PREEMPTED:
            self._preempted[sequence.key] = sequence
            by_arrival = sorted(self._preempted.values(), key=lambda waiting: waiting.arrival)
            self._preempted = {waiting.key: waiting for waiting in by_arrival}
        else:
            self._fresh[sequence.key] = sequence

    def remove(self, sequence: Sequence) -> None:
        (self._preempted if sequence.key in self._preempted else self._fresh).pop(sequence.key)

    def charge(self, sequence: Sequence, units: float) -> None:
        """Nobody keeps accounts here."""

    def hold_back(self, sequence: Sequence) -> None:
        self._held_back = True

    def __iter__(self) -> Iterator[Sequence]:
        self._held_back = False
        for waiting in (self._preempted, self._fresh):
            for sequence in _walk(waiting):
                yield sequence
                if self._held_back:
                    return

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh)


def _walk(waiting: dict[int, Sequence]) -> Iterator[Sequence]:
    """In order, taken out in batches that double: a long queue is not copied for its first."""
    passed, size = 0, BATCH
    while batch := list(islice(waiting.values(), passed, passed + size)):
        for sequence in batch:
            yield sequence
            passed += sequence.key in waiting
        size *= 2
