"""What was promised of the pool: pins, and the room of every accepted sequence. Control code: no torch.

A sequence is accepted only if it can run alone beside its adapters and all pins; a pin is given only if all
accepted sequences still can. So whoever waits does not wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .adapter_entry import Adapter, short
from .adapter_memory import AdapterMemory, AdapterSize, ResidencyError
from .arena import Arena
from .errors import AdapterCorrupt, AdapterInvalid
from .host_copies import describe


@dataclass(frozen=True)
class Lease:
    """One sequence holds these adapters, and may come to need `blocks` of the pool beside them."""

    digests: frozenset[str]
    blocks: int


class Promises:
    """Pins and leases, counted against the pool and the arena."""

    def __init__(
        self, memory: AdapterMemory[Any], total_blocks: int, arena: Arena, adapters: Mapping[str, Adapter]
    ) -> None:
        self._memory = memory
        self._total = total_blocks
        self._arena = arena
        self._adapters = adapters
        self._pinned: dict[str, Adapter] = {}
        self.leases: dict[int, Lease] = {}
        """By sequence key."""

    def measure(self, adapter: Adapter) -> AdapterSize:
        """Its size, read once: the file of a digest never changes. Raises ResidencyError `adapter_failed`."""
        if adapter.measured is None:
            try:
                adapter.measured = self._memory.measure(adapter.path)
            except (OSError, ValueError, AdapterCorrupt, AdapterInvalid) as error:
                adapter.error = f"adapter {short(adapter.digest)} could not be read: {describe(error)}"
                raise ResidencyError("adapter_failed", adapter.error) from error
        return adapter.measured

    def room(self, digests: Iterable[str]) -> int:
        """Blocks left of the pool beside these adapters and all pinned ones; negative where these are too
        large."""
        return self._total - sum(adapter.size.blocks for adapter in self._with_pins(digests))

    def pinned_on_device(self) -> int:
        """Blocks that pinned adapters hold now."""
        return sum(
            len(adapter.place.blocks) for adapter in self._pinned.values() if adapter.place is not None
        )

    def fits_arena(self, digests: Iterable[str]) -> bool:
        """These adapters and all pinned ones have slots and rows together."""
        union = self._with_pins(digests)
        rows = sum(adapter.size.rows for adapter in union)
        return len(union) <= self._arena.num_slots and rows <= self._arena.num_rows

    def refuse_too_large(self, digests: Iterable[str]) -> None:
        """Raise ResidencyError `capacity_exceeded` where these adapters cannot be on the device together."""
        digests = dict.fromkeys(digests)
        if self.room(digests) < 0 or not self.fits_arena(digests):
            blocks = sum(self._adapters[digest].size.blocks for digest in digests)
            raise ResidencyError(
                "capacity_exceeded",
                f"adapter {', '.join(map(short, digests))} takes {blocks} blocks of memory: "
                f"more than the pool's {self._total} less its pins",
            )

    def pin(self, adapter: Adapter) -> None:
        """Raises ResidencyError `pin_limit` beyond half of pool or arena, or where an accepted sequence needs
        the room."""
        size = self.measure(adapter)
        pinned = self._pinned.values()
        blocks = size.blocks + sum(other.size.blocks for other in pinned)
        rows = size.rows + sum(other.size.rows for other in pinned)
        arena, half = self._arena, self._total // 2
        if blocks > half or rows > arena.num_rows // 2 or len(pinned) + 1 > arena.num_slots // 2:
            raise ResidencyError(
                "pin_limit",
                f"with adapter {short(adapter.digest)} pinned, pins would take {blocks} blocks of memory; "
                f"they may take half of the pool: {half}",
            )
        for lease in self.leases.values():
            digests = {adapter.digest, *lease.digests}
            if self.room(digests) < lease.blocks or not self.fits_arena(digests):
                raise ResidencyError(
                    "pin_limit",
                    f"adapter {short(adapter.digest)} cannot be pinned now: a running request needs its room",
                )
        adapter.pinned = True
        self._pinned[adapter.digest] = adapter

    def unpin(self, adapter: Adapter) -> None:
        adapter.pinned = False
        self._pinned.pop(adapter.digest, None)

    def _with_pins(self, digests: Iterable[str]) -> list[Adapter]:
        union = dict(self._pinned)
        for digest in digests:
            union[digest] = self._adapters[digest]
        return list(union.values())

    def check_integrity(self) -> None:
        """AssertionError where a pin or a lease is not as the adapters say, or a promise cannot be kept."""
        assert self._pinned == {
            digest: adapter for digest, adapter in self._adapters.items() if adapter.pinned
        }
        assert sum(adapter.size.blocks for adapter in self._pinned.values()) <= self._total // 2
        for digest, adapter in self._adapters.items():
            assert adapter.leases == {key for key, lease in self.leases.items() if digest in lease.digests}
        for lease in self.leases.values():
            assert self.room(lease.digests) >= lease.blocks
            assert self.fits_arena(lease.digests)
