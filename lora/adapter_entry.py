"""What residency knows of one adapter, and the words for it. Control code: no torch."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum

from .adapter_memory import AdapterSize, AdapterState, HostAdapter


class Placing(Enum):
    """How far a sequence's adapters are on their way to the device."""

    READY = "ready"
    LOADING = "loading"
    """Some come to host memory now."""
    COPYING = "copying"
    """All have their blocks; pages are being copied."""
    NO_ROOM = "no room"
    """Blocks, slots or host memory are taken by what may not be given up for it."""


@dataclass(eq=False)
class Placement:
    """Its blocks and table slot; usable once all pages are copied."""

    blocks: list[int]
    slot: int
    host: HostAdapter | None
    """What the pages come from; None once all are copied."""
    copied: int = 0


@dataclass(eq=False)
class Adapter:
    """One digest. Whoever changes place, leases or pinned calls `DevicePlaces.reconsider` after."""

    digest: str
    path: str
    measured: AdapterSize | None = None
    pinned: bool = False
    requested: bool = False
    """A load was asked for and has not ended."""
    forgotten: bool = False
    """No new sequence may lease it; it goes with its last lease."""
    error: str | None = None
    place: Placement | None = None
    leases: set[int] = field(default_factory=set)
    """Keys of the sequences that hold it."""
    running: int = 0
    """How many of these are being computed."""
    uses: int = 0
    score: float = 0.0
    """Its place in the order of eviction, while idle or wanted."""
    idle: bool = False
    """It is counted among the idle ones."""

    @property
    def on_device(self) -> bool:
        return self.place is not None and self.place.host is None

    @property
    def size(self) -> AdapterSize:
        """Only of an adapter that was measured: every leased, pinned, loading or placed one was."""
        assert self.measured is not None
        return self.measured

    @property
    def needed(self) -> bool:
        """Somebody waits for it to come to the device."""
        return not self.on_device and (self.requested or bool(self.leases))

    def state(self, in_host: bool, loading: bool) -> AdapterState:
        """For the outside. `in_host`: it has a host copy; `loading`: one is being made."""
        return AdapterState(
            digest=self.digest,
            residency="device" if self.on_device else "host" if in_host else "disk",
            loading=loading or self.requested or (self.place is not None and not self.on_device),
            error=self.error,
            pinned=self.pinned,
            blocks=0 if self.place is None else len(self.place.blocks),
            size=0 if self.measured is None else self.measured.blocks,
            in_use=len(self.leases),
        )


class Either:
    """The union of two containers, without building it."""

    def __init__(self, first: Container[str], second: Container[str]) -> None:
        self._first, self._second = first, second

    def __contains__(self, digest: object) -> bool:
        return digest in self._first or digest in self._second


def short(digest: str) -> str:
    """A digest for messages."""
    return digest[:19]
