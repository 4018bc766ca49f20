"""A fair order of waiting sequences over tenants: the Virtual Token Counter. Control code: no torch.

Sheng, Cao, Li et al., "Fairness in Serving Large Language Models" (arXiv 2401.00588): every tenant has a counter
of the service it was given, weighted by what it costs and divided by the tenant's weight; whoever waits and has
the least goes first. A tenant that comes back is lifted to the least counter of those that wait, or, where none
does, to the counter of who left the queue last: being away earns nothing. Whatever is left over goes to whoever
wants it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from .queue_policy import Fifo
from .sequence import Sequence, Status
from .tenants import Account, Tenants

INPUT_UNITS, OUTPUT_UNITS = 1.0, 2.0
"""Service in units of one prompt token computed, the paper's weights. Prompt tokens found in the cache cost
nothing; a block of an adapter that is copied to the device costs what `RestoreCost` says it takes."""

Entry = tuple[float, int, int, int, Account]
"""What tenants are ordered by: the counter; of equals first who has come back, and before all who has nothing
running; then who has waited longer. An entry with another `version` than its account's is void; one that is lower
stands for the account as it was, and is brought up to date when it comes to the top."""


class FairQueue:
    """Within a tenant: preempted sequences first, then by arrival. A tenant's preempted sequences wait at their
    tenant's place, and are not charged again."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._queues: dict[str, Fifo] = {}  # of the tenants that wait
        self._heap: list[Entry] = []
        self._last: Account | None = None  # who left the queue last, when it became empty
        self._joins = 0
        self._size = 0
        self._held_back: set[str] = set()

    def add(self, sequence: Sequence) -> None:
        account = self._tenants.account(sequence)
        queue = self._queues.get(account.name)
        if queue is None:
            self._lift(account)
            queue = self._queues[account.name] = Fifo()
            self._joins += 1
            account.joined = self._joins
            account.version += 1
            account.returned = sequence.status is Status.WAITING
            heapq.heappush(self._heap, _entry(account))
        queue.add(sequence)
        self._size += 1

    def remove(self, sequence: Sequence) -> None:
        account = self._tenants.account(sequence)
        queue = self._queues[account.name]
        queue.remove(sequence)
        self._size -= 1
        if not len(queue):
            del self._queues[account.name]
            account.version += 1
            self._last = account

    def charge(self, sequence: Sequence, units: float) -> None:
        account = self._tenants.account(sequence)
        account.counter += units / account.weight

    def hold_back(self, sequence: Sequence) -> None:
        self._held_back.add(self._tenants.account(sequence).name)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of counters as they are charged meanwhile; a tenant whose first sequence is passed over
        goes on with its next."""
        self._held_back.clear()
        _first(self._heap)
        heap = self._heap.copy()
        walks: dict[str, Iterator[Sequence]] = {}
        while (account := _first(heap)) is not None:
            if account.name not in walks:
                walks[account.name] = iter(self._queues[account.name])
            sequence = None if account.name in self._held_back else next(walks[account.name], None)
            if sequence is None:
                heapq.heappop(heap)
            else:
                yield sequence

    def __len__(self) -> int:
        return self._size

    def check_integrity(self) -> None:
        """AssertionError where a tenant that waits cannot be found, or the first has not the least. For tests."""
        valid = Counter(entry[4].name for entry in self._heap if entry[3] == entry[4].version)
        assert valid == Counter(self._queues.keys())
        assert self._size == sum(len(queue) for queue in self._queues.values())
        accounts = {self._tenants.account(one).name: self._tenants.account(one) for one in self}
        assert accounts.keys() == self._queues.keys()
        least = _first(self._heap)
        assert least is None or least.counter == min(account.counter for account in accounts.values())

    def _lift(self, account: Account) -> None:
        least = _first(self._heap) or self._last
        if least is not None:
            account.counter = max(account.counter, least.counter)


def _entry(account: Account) -> Entry:
    return account.counter, _rank(account), account.joined, account.version, account


def _rank(account: Account) -> int:
    return bool(account.running) if account.returned else 2


def _first(heap: list[Entry]) -> Account | None:
    """The account that goes first; drops void entries and brings old ones up to date on the way."""
    while heap:
        counter, rank, _, version, account = heap[0]
        if version != account.version:
            heapq.heappop(heap)
        elif counter < account.counter or rank < _rank(account):
            heapq.heapreplace(heap, _entry(account))
        else:
            return account
    return None
