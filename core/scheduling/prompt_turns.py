"""Whose prompts get the rows that decodes leave of a step. Control code: no torch."""

from __future__ import annotations

from collections.abc import Iterable

from .sequence import Sequence
from .tenants import Account, Tenants


class PromptTurns:
    """The tenant that was given the least service goes first, and takes what is left; then the next.

    What a prompt costs is charged to `FairQueue`'s counter when the sequence starts; here it counts row by row,
    so a long prompt leaves every other step to another tenant's. A tenant that comes back begins at the least of
    those that run. Within a tenant by arrival, what runs before what waits.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._floor = 0.0
        self._due: list[Sequence] = []

    def begin(self, due: Iterable[Sequence]) -> None:
        """A new step, in which these running sequences, by arrival, owe tokens of their prompts."""
        self._due = list(due)
        self._floor = min(map(self._served, self._tenants.busy), default=self._floor)

    def next(self, before: Sequence | None = None) -> Sequence | None:
        """Take the next; `before`: only one that goes before this waiting sequence."""
        if not self._due:
            return None
        accounts = [self._tenants.account(sequence) for sequence in self._due]
        first = min(range(len(accounts)), key=lambda index: self._served(accounts[index]))
        if before is not None:
            account = self._tenants.account(before)
            if self._served(accounts[first]) >= self._served(account):
                if account not in accounts:
                    return None
                first = accounts.index(account)
        return self._due.pop(first)

    def drop(self, sequence: Sequence) -> None:
        """It does not run any more."""
        if sequence in self._due:
            self._due.remove(sequence)

    def served(self, sequence: Sequence, units: float) -> None:
        """So much is done for it in this step."""
        account = self._tenants.account(sequence)
        account.served = self._served(account) + units / account.weight

    def _served(self, account: Account) -> float:
        return max(account.served, self._floor)
