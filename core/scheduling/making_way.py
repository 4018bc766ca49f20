"""Who gives its place up for whom, when slots or blocks run out. Control code: no torch.

Among sequences of one tenant it is always the youngest. Between tenants it is the one that is most over its fair
share, of slots or of blocks. A tenant whose queue was empty takes its place at once, at the cost of those over their
share: up to half of its share of slots, one at least, and up to its share of blocks. One that always has something
waiting gets what becomes free, in the order of the queue; it takes a place only from a tenant that had
`LEAST_SERVICE` tokens more for each of its sequences. Else two that both always have more would push each other out
with every step.

A sequence that gave way is left in peace by other tenants until it has had `LEAST_SERVICE` tokens more, twice as
many each time: one that makes n tokens gives way to others at most log2(n) times.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from .block_pool import BlockPool
from .fair_queue import OUTPUT_UNITS
from .sequence import Sequence
from .tenants import Account, Tenants

LEAST_SERVICE = 16
"""Tokens between one time that a place is taken and the next."""


class MakingWay:
    """Only chooses: to preempt is the scheduler's."""

    def __init__(self, tenants: Tenants, pool: BlockPool) -> None:
        self._tenants = tenants
        self._pool = pool

    @staticmethod
    def protect(sequence: Sequence) -> None:
        """It gives its place up now."""
        least = LEAST_SERVICE << min(sequence.preemptions, 30)
        sequence.preemptions += 1
        sequence.protected_until = len(sequence.output_token_ids) + least

    def for_growth(self, running: Ordered[Sequence]) -> Sequence:
        """A running sequence finds no block: who gives way, perhaps that one itself.

        The youngest of the tenant most over its share of blocks; of those that are protected only where all
        are, and then the youngest of all. So the oldest of all gives way less and less often, and ends.
        """
        candidates = [
            (
                self._tenants.held(account) / self._tenants.blocks(account),
                account.running[-1].arrival,
                account,
            )
            for account in self._tenants.busy
            if not account.running[-1].protected
        ]
        if not candidates:
            return running[-1]
        return max(candidates, key=lambda candidate: candidate[:2])[2].running[-1]

    def beyond_cap(self, account: Account, blocks: int) -> bool:
        """With so many blocks more a tenant would have more than its `pool_share`, while another tenant waits.
        One sequence of a tenant may always run: else it might never."""
        if account.pool_share is None or not account.running or self._tenants.waiting == account.waiting:
            return False
        return self._tenants.held(account) + blocks > self._tenants.cap(account)

    def claims_slot(self, account: Account) -> bool:
        """This tenant has less than half its share of slots, and another more than its share."""
        return self._lacks_slot(account) and any(
            self._spares_slot(account, other, len(other.running)) for other in self._tenants.busy
        )

    def for_waiting(
        self, sequence: Sequence, slot: bool, blocks: int, need: int, step: int
    ) -> list[Sequence] | None:
        """Who gives way so that `sequence` starts; None where that would not be enough, or not fair. Nobody where
        it lacks nothing but room for running ones to grow, and others will make way for that.

        `slot`: it lacks one. `blocks`: what it lacks, of `need` that its tenant will hold more of.
        """
        account = self._tenants.account(sequence)
        if slot and not self._lacks_slot(account):
            return None
        fair = self._tenants.held(account) + need <= self._tenants.blocks(account)
        running = {other: len(other.running) for other in self._tenants.busy if other is not account}
        held = {other: self._tenants.held(other) for other in running}
        left: dict[Account, list[Sequence]] = {}
        chosen: list[Sequence] = []
        for other in running:
            if any(
                self._excess(account, other, running[other], held[other], one, fair) for one in {slot, False}
            ):
                left[other] = [one for one in other.running if not one.protected and one.started_at != step]
        while True:
            excess = {
                other: self._excess(account, other, running[other], held[other], slot, fair)
                for other, ones in left.items()
                if ones
            }
            most = max(excess, key=lambda other: excess[other], default=None)
            if most is not None and not excess[most]:
                most = None
            if not slot and blocks <= 0 and (chosen or most):
                return chosen
            if most is None:
                return None
            victim = left[most].pop()
            gives = sum(not self._pool.shared(block) for block in victim.block_table)
            chosen.append(victim)
            slot = False
            blocks -= gives
            held[most] -= gives
            running[most] -= 1

    def _excess(
        self, account: Account, other: Account, running: int, held: int, slot: bool, fair: bool
    ) -> float:
        """How far `other` is over what it may keep from `account`, as a ratio to it; 0 where it is not."""
        if slot:
            spares = self._spares_slot(account, other, running)
            return running / self._tenants.slots(other) if spares else 0.0
        if other.pool_share is not None and running > 1 and held > self._tenants.cap(other):
            return held / self._tenants.cap(other)
        if not fair or not _may_take(account, other):
            return 0.0
        share = self._tenants.blocks(other)
        return held / share if held > share else 0.0

    def _lacks_slot(self, account: Account) -> bool:
        return len(account.running) + 1 <= max(1.0, self._tenants.slots(account) / 2)

    def _spares_slot(self, account: Account, other: Account, running: int) -> bool:
        return (
            other is not account and running - 1 >= self._tenants.slots(other) and _may_take(account, other)
        )


def _may_take(account: Account, other: Account) -> bool:
    """It comes back to the queue, or was given much less; and `other` does not go before it."""
    behind = other.counter - account.counter
    if other.waiting and behind < 0:
        return False
    return account.returned or behind * other.weight >= LEAST_SERVICE * OUTPUT_UNITS * len(other.running)
