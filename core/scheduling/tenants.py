"""What the scheduler knows of tenants: their shares, and what each has had, has running and has waiting. No torch."""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ..messages import EngineError, TenantShare
from .block_pool import BlockPool
from .sequence import Sequence

EVERYONE = ""
"""The one account there is where tenants are not told apart."""


@dataclass(eq=False)
class Account:
    """One tenant's."""

    name: str
    weight: float = 1.0
    pool_share: float | None = None
    counter: float = 0.0
    """Its virtual counter: units of service so far over its weight. Never falls."""
    served: float = 0.0
    """Units of service whose rows were computed, over its weight (`PromptTurns`)."""
    running: list[Sequence] = field(default_factory=list)
    """By arrival."""
    waiting: int = 0
    """Sequences in the queue, the preempted ones too."""
    returned: bool = False
    """Its queue was empty, and nothing of it has started since."""
    joined: int = 0
    """When it last came into the queue, among all that did."""
    version: int = 0
    """Changes whenever it comes into the queue or leaves it."""


class Tenants:
    """Accounts by name; shares of slots, of blocks and of the queue. Who was never heard of has weight 1.

    Tenants are active while they have anything running or waiting. A fair share is a part by weight among the
    active ones, so what nobody else wants is anybody's.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_queued: int, told_apart: bool) -> None:
        """`told_apart`: False for first come, first served: all are one."""
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_queued = max_queued
        self._told_apart = told_apart
        self._shares: dict[str, TenantShare] = {}
        self._accounts: dict[str, Account] = {}
        self._leaving: set[str] = set()  # forgotten, with something left to do
        self._active: dict[str, Account] = {}
        self._busy: dict[str, Account] = {}
        self._weights: float | None = None  # of the active ones together; None: count again
        self._unstarted: Counter[str] = Counter()
        self.waiting = 0
        """Sequences in the queue, of all tenants."""

    # ------------------------------------------------------------------ shares

    def set(self, share: TenantShare) -> None:
        """From now on; what it has had so far stays as it was counted."""
        self._shares[share.name] = share
        self._leaving.discard(share.name)
        if share.name in self._accounts:
            self._apply(self._accounts[share.name])

    def forget(self, name: str) -> None:
        """As if it was never heard of; what it has running and waiting goes on."""
        self._shares.pop(name, None)
        if name in self._accounts:
            self._apply(self._accounts[name])
            if name in self._active:
                self._leaving.add(name)
            else:
                del self._accounts[name]

    def account(self, sequence: Sequence) -> Account:
        """Of the sequence's tenant."""
        name = sequence.tenant if self._told_apart else EVERYONE
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(name)
            self._apply(account)
        return account

    def _apply(self, account: Account) -> None:
        share = self._shares.get(account.name, TenantShare(name=account.name))
        account.weight, account.pool_share = share.weight, share.pool_share
        self._weights = None

    @property
    def busy(self) -> Collection[Account]:
        """Those that have anything running."""
        return self._busy.values()

    def alone(self, account: Account) -> bool:
        """No other tenant is active."""
        return len(self._active) <= (account.name in self._active)

    def part(self, account: Account) -> float:
        """Its part by weight among the active ones, itself among them."""
        if self._weights is None:
            self._weights = math.fsum(other.weight for other in self._active.values())
        others = 0.0 if account.name in self._active else account.weight
        return account.weight / (self._weights + others)

    def slots(self, account: Account) -> float:
        """Its fair share of the sequences that run at a time; at least one."""
        return max(1.0, self._max_num_seqs * self.part(account))

    def cap(self, account: Account) -> float:
        """Blocks that it may have while others want some."""
        return math.inf if account.pool_share is None else account.pool_share * self._pool.total

    def blocks(self, account: Account) -> float:
        """Its fair share of the blocks that sequences could have; never more than its cap."""
        return min(self._pool.sharable * self.part(account), self.cap(account))

    def held(self, account: Account) -> int:
        """Blocks in the tables of its running sequences."""
        return self._pool.held[account.name]

    # ------------------------------------------------------------------ the queue's bounds

    def refusal(self, sequence: Sequence) -> EngineError | None:
        """Why a new sequence may not wait, or None.

        While the queue is full, a tenant with less than its fair share of it is still let in; so the queue
        holds at most twice as many.
        """
        share = self._shares.get(sequence.tenant)
        limit = None if share is None else share.queued_requests
        unstarted = self._unstarted[sequence.tenant]
        if limit is not None and unstarted >= limit:
            return EngineError(
                "rate_limit_exceeded",
                f"the limit queued_requests = {limit} of this tenant is reached: {unstarted} of its sequences wait",
            )
        account = self.account(sequence)
        if self.waiting >= self._max_queued and account.waiting >= max(
            1, int(self._max_queued * self.part(account))
        ):
            return EngineError("overloaded", f"{self.waiting} requests are waiting; try again later")
        return None

    def grammar_refusal(self, tenant: str, compiling: Mapping[str, int]) -> EngineError | None:
        """Why one more sequence may not wait for its grammar to be compiled, or None. `compiling`: how many wait for
        that by now, by tenant.

        The rule is the queue's: where as many wait as may, a tenant with less than its part by weight among those who
        wait for one is still let in.
        """
        waiting = sum(compiling.values())
        if not self._told_apart:
            compiling, tenant = {EVERYONE: waiting}, EVERYONE
        weights = {name: self._weight(name) for name in {tenant, *compiling}}
        part = weights[tenant] / math.fsum(weights.values())
        if waiting >= self._max_queued and compiling.get(tenant, 0) >= max(1, int(self._max_queued * part)):
            return EngineError("overloaded", f"{waiting} requests wait for their grammars; try again later")
        return None

    def _weight(self, name: str) -> float:
        share = self._shares.get(name)
        return 1.0 if share is None else share.weight

    # ------------------------------------------------------------------ what each has

    def submitted(self, sequence: Sequence) -> None:
        """It came into the queue for the first time."""
        self._unstarted[sequence.tenant] += 1
        self._waits(self.account(sequence), 1)

    def started(self, sequence: Sequence) -> None:
        """It left the queue and runs."""
        if not sequence.started:
            sequence.started = True
            self._drop_unstarted(sequence)
        account = self.account(sequence)
        account.returned = False
        insort(account.running, sequence, key=lambda other: other.arrival)
        self._busy[account.name] = account
        self._waits(account, -1)

    def preempted(self, sequence: Sequence) -> None:
        """It runs no longer and is in the queue again."""
        self._waits(self.account(sequence), 1)
        self.stopped(sequence)

    def stopped(self, sequence: Sequence) -> None:
        """It runs no longer."""
        account = self.account(sequence)
        account.running.remove(sequence)
        if not account.running:
            del self._busy[account.name]
        self._settle(account)

    def withdrawn(self, sequence: Sequence) -> None:
        """It ended in the queue."""
        if not sequence.started:
            self._drop_unstarted(sequence)
        self._waits(self.account(sequence), -1)

    def _drop_unstarted(self, sequence: Sequence) -> None:
        self._unstarted[sequence.tenant] -= 1
        if not self._unstarted[sequence.tenant]:
            del self._unstarted[sequence.tenant]

    def _waits(self, account: Account, change: int) -> None:
        account.waiting += change
        self.waiting += change
        self._settle(account)

    def _settle(self, account: Account) -> None:
        """Is it active?"""
        if bool(account.waiting or account.running) == (account.name in self._active):
            return
        if account.name in self._active:
            del self._active[account.name]
            if account.name in self._leaving:
                self._leaving.discard(account.name)
                del self._accounts[account.name]
        else:
            self._active[account.name] = account
        self._weights = None

    # ------------------------------------------------------------------ for tests

    def check_integrity(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Recount everything; AssertionError if wrong."""
        running, waiting = list(running), list(waiting)
        unstarted = Counter(sequence.tenant for sequence in waiting if not sequence.started)
        assert self.waiting == len(waiting)
        assert self._unstarted == unstarted, "queued sequences are counted wrongly"
        counts = Counter(id(self.account(sequence)) for sequence in waiting)
        for name, account in self._accounts.items():
            assert account.name == name
            assert account.running == [one for one in running if self.account(one) is account]
            assert account.waiting == counts[id(account)]
            assert (name in self._busy) == bool(account.running)
            assert (name in self._active) == bool(account.running or account.waiting)
        if self._active:
            assert math.isclose(sum(self.part(account) for account in self._active.values()), 1.0)
