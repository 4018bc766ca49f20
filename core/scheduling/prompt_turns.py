"""Whose prompts get the rows that decodes leave of a step. Control code: no torch."""

from __future__ import annotations

from collections.abc import Iterable

from .sequence import Sequence
from .tenants import Account, Tenants


class PromptTurns:
    """A virtual counter of prompt rows for each tenant: the least goes first, each in turn takes what is left.

    So a long prompt leaves every other step to another tenant's, and does not hold it up. A tenant whose
    prompts come again begins at the least of those under way (see `FairQueue`, where the idea is from). Within
    a tenant by arrival, what runs before what waits.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._floor = 0.0
        self._due: list[Sequence] = []

    def begin(self, due: Iterable[Sequence]) -> None:
        """A new step, in which these running sequences, by arrival, owe tokens of their prompts."""
        self._due = list(due)
        if self._due:
            self._floor = min(self._rows(self._tenants.account(sequence)) for sequence in self._due)

    def next(self, before: Sequence | None = None) -> Sequence | None:
        """Take the next; `before`: only one that goes before this waiting sequence."""
        if not self._due:
            return None
        accounts = [self._tenants.account(sequence) for sequence in self._due]
        first = min(range(len(accounts)), key=lambda index: self._rows(accounts[index]))
        if before is not None:
            account = self._tenants.account(before)
            if self._rows(accounts[first]) >= self._rows(account):
                if account not in accounts:
                    return None
                first = accounts.index(account)
        return self._due.pop(first)

    def drop(self, sequence: Sequence) -> None:
        """It does not run any more."""
        if sequence in self._due:
            self._due.remove(sequence)

    def served(self, sequence: Sequence, rows: int) -> None:
        """So many rows of it are in the step."""
        account = self._tenants.account(sequence)
        account.prompt_rows = self._rows(account) + rows / account.weight

    def _rows(self, account: Account) -> float:
        return max(account.prompt_rows, self._floor)
