"""In which order waiting sequences are considered. Control code: no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from .sequence import Sequence, Status


class QueuePolicy(Protocol):
    """The waiting sequences, and who goes first. A fair order over tenants is another implementation of this.

    Whatever the order, it must let every sequence come first after a bounded number of others.
    """

    def add(self, sequence: Sequence) -> None:
        """It waits: newly submitted, or preempted."""

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer."""

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """So many tokens were computed for it."""

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, the first to be admitted first."""

    def __len__(self) -> int: ...


class Fifo:
    """Preempted sequences first, then by arrival."""

    def __init__(self) -> None:
        self._preempted: dict[int, Sequence] = {}
        self._fresh: dict[int, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        if sequence.status is Status.PREEMPTED:
            self._preempted[sequence.key] = sequence
            by_arrival = sorted(self._preempted.values(), key=lambda waiting: waiting.arrival)
            self._preempted = {waiting.key: waiting for waiting in by_arrival}
        else:
            self._fresh[sequence.key] = sequence

    def remove(self, sequence: Sequence) -> None:
        (self._preempted if sequence.key in self._preempted else self._fresh).pop(sequence.key)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Nobody keeps accounts here."""

    def __iter__(self) -> Iterator[Sequence]:
        yield from list(self._preempted.values())
        yield from list(self._fresh.values())

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh)
