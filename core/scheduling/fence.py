"""Keeps room for one sequence that has waited too long for its adapters. Control code: no torch.

While the fence is up, a sequence that goes after its owner is admitted only if the owner still fits beside
everything that was admitted since, each at its full size. What ran before ends in bounded time; so the owner
starts in bounded time, and whatever leaves it its room flows on.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...lora.residency import Residency


@dataclass(frozen=True)
class Need:
    """What somebody takes of the pool: adapters, and blocks beside them."""

    digests: tuple[str, ...]
    blocks: int


class Fence:
    """At most one owner at a time: the first in the queue whose patience has run out. It stays the owner until it
    has its room, unless another of the same tenant comes to go before it."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._owner: tuple[int | str, Need] | None = None
        self._tenant: str | None = None
        self._admitted: dict[int, Need] = {}

    def is_open(self, tenant: str) -> bool:
        """Nobody owns it, or another of this tenant does."""
        return self._owner is None or self._tenant == tenant

    def raise_for(self, owner: int | str, need: Need, tenant: str | None = None) -> None:
        """Keep room for `owner` (a sequence's key, of `tenant`, or a digest that is to be loaded)."""
        if self._owner is None or self._owner[0] != owner:
            self._admitted.clear()
        self._owner, self._tenant = (owner, need), tenant

    def lower(self, owner: int | str) -> bool:
        """`owner` has its room, or gave up. True: the fence was its."""
        if self._owner is None or self._owner[0] != owner:
            return False
        self._owner = None
        self._admitted.clear()
        return True

    def lets(self, need: Need) -> bool:
        """Room for the owner would be left."""
        if self._owner is None:
            return True
        needs = [self._owner[1], need, *self._admitted.values()]
        digests = {digest for other in needs for digest in other.digests}
        blocks = sum(other.blocks for other in needs)
        return blocks <= self._residency.room(digests) and self._residency.fits_arena(digests)

    def admitted(self, key: int, need: Need) -> None:
        """A sequence that goes after the owner has been admitted."""
        if self._owner is not None:
            self._admitted[key] = need

    def ended(self, key: int) -> None:
        """This sequence has ended."""
        self._admitted.pop(key, None)
        self.lower(key)
