"""Where each adapter lies, who holds it, and how it moves. Control code: no torch.

The ways of an adapter:

    disk  --loaded by a worker thread-->  host  --copied, some pages each tick-->  device
                                          host  <-----------evicted-------------  device
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any, Literal

from .adapter_entry import Adapter, Either, Placing, short
from .adapter_memory import AdapterMemory, AdapterState, Blocks, ResidencyError
from .arena import Arena
from .device_places import DevicePlaces
from .host_copies import HostCopies
from .promises import Lease, Promises

HOST_COST, DISK_COST = 1.0, 5.0
"""What bringing one block back costs, from its host copy and from disk; `BlockPool`'s `token_cost` has this unit."""


class Residency:
    """One engine's adapters, by digest. Called from the engine's thread only, between steps."""

    def __init__(
        self,
        *,
        memory: AdapterMemory[Any],
        blocks: Blocks,
        num_slots: int,
        num_rows: int,
        host_bytes: int,
        blocks_per_tick: int = 64,
        on_loaded: Callable[[], None] | None = None,
        executor: Executor | None = None,
    ) -> None:
        """`num_slots`, `num_rows`: the fixed arena of `ops.AdapterTables`. `host_bytes`: budget of host
        copies. `blocks_per_tick`: pages copied to the device between two steps at most. `on_loaded`: called
        from a worker thread whenever a host load ended, so that a sleeping engine loop wakes. `executor`: for
        tests; None: two threads."""
        self._blocks = blocks
        self._adapters: dict[str, Adapter] = {}
        self._changed: dict[str, None] = {}
        self._told: dict[str, AdapterState] = {}
        self._arena = Arena(num_slots, num_rows)
        self._promises = Promises(memory, blocks.total, self._arena, self._adapters)
        self._copies = HostCopies(
            memory.load_host, host_bytes, self._is_needed, on_loaded or (lambda: None), executor
        )
        self.places = DevicePlaces(memory, blocks, self._arena, self._restore_cost, self._touch)
        """What the pool asks for idle adapters (`block_pool.Evictable`)."""
        self._blocks_per_tick = blocks_per_tick
        self._requests: dict[str, None] = {}
        self._ended_loads: list[tuple[str, ResidencyError | None]] = []
        self._failed: list[str] = []

    # ------------------------------------------------------------------ the engine's calls

    def know(self, digest: str, path: str, pinned: bool = False) -> None:
        """`digest` may be used from now on; its file lies at `path`. Clears an earlier failure. Idempotent.

        A pin that cannot be given is left out: the adapter's state says so.
        """
        adapter = self._adapters.setdefault(digest, Adapter(digest, path))
        adapter.path, adapter.error, adapter.forgotten = path, None, False
        self._blocks.revive(digest)
        self._touch(adapter)
        if pinned and not adapter.pinned:
            try:
                self.pin(digest, True)
            except ResidencyError:
                self._touch(adapter)

    def forget(self, digest: str) -> None:
        """No new lease on `digest`; what it takes is freed at once, or with the last lease. Unknown:
        ignored."""
        adapter = self._adapters.get(digest)
        if adapter is None:
            return
        adapter.forgotten = True
        self._end_request(
            adapter, ResidencyError("adapter_not_found", f"adapter {short(digest)} was removed")
        )
        self._promises.unpin(adapter)
        self.places.reconsider(adapter)
        if not adapter.leases:
            self._remove(adapter)

    def load(self, digest: str) -> None:
        """Ask for `digest` on the device; `drain_loads` tells when it is there, or why not.

        Raises ResidencyError: `adapter_not_found`, `adapter_failed`, `capacity_exceeded`.
        """
        adapter = self._usable(digest, "adapter_not_found")
        self._promises.refuse_too_large((digest,))
        if adapter.on_device:
            self._ended_loads.append((digest, None))
            return
        adapter.requested = True
        self._requests[digest] = None
        self._touch(adapter)
        if adapter.place is None:
            self._fetch(adapter)

    def evict(self, digest: str, to: Literal["host", "disk"] = "host") -> None:
        """Off the device at once, and out of host memory with to="disk". Ends a `load` that is under way.
        With to="host" the host copy stays, if there is one: the budget may have taken it.

        Raises ResidencyError: `adapter_not_found`, `adapter_in_use` where a sequence holds it.
        """
        adapter = self._find(digest, "adapter_not_found")
        if adapter.leases:
            raise ResidencyError(
                "adapter_in_use",
                f"adapter {short(digest)} is held by {len(adapter.leases)} running or queued requests",
            )
        self._end_request(adapter, ResidencyError("adapter_cold", f"adapter {short(digest)} was evicted"))
        if adapter.place is not None:
            self.places.displace(adapter)
        if to == "disk":
            self._copies.drop(digest)
        self.places.reconsider(adapter)

    def pin(self, digest: str, pinned: bool) -> None:
        """Pinned: never evicted by pressure. Loads nothing.

        Raises ResidencyError: `adapter_not_found`, `adapter_failed`, `pin_limit` where pins would take more
        than half of the pool, or room that an accepted sequence was promised.
        """
        adapter = self._find(digest, "adapter_not_found")
        if pinned and not adapter.pinned:
            self._promises.pin(adapter)
            self._end_hopeless_requests()
        elif not pinned:
            self._promises.unpin(adapter)
        self.places.reconsider(adapter)

    def state(self, digest: str) -> AdapterState:
        """Where it is now. Raises ResidencyError `adapter_not_found`."""
        return self._state(self._find(digest, "adapter_not_found"))

    def drain_changes(self) -> list[AdapterState]:
        """States that changed since the last call; of one that is gone: on disk, held by nobody."""
        changes = []
        for digest in self._changed:
            adapter = self._adapters.get(digest)
            state = AdapterState(digest=digest, residency="disk") if adapter is None else self._state(adapter)
            if self._told.get(digest) != state:
                changes.append(state)
            if adapter is None:
                self._told.pop(digest, None)
            else:
                self._told[digest] = state
        self._changed.clear()
        return changes

    def drain_loads(self) -> list[tuple[str, ResidencyError | None]]:
        """Digests whose `load` ended since the last call; None: it came to the device."""
        ended, self._ended_loads = self._ended_loads, []
        return ended

    def tick(self) -> None:
        """Between steps, before `Scheduler.schedule`: take in ended host loads, copy the next pages on."""
        for digest, error in self._copies.finished():
            adapter = self._adapters[digest]
            if error is not None:
                adapter.error = f"adapter {short(digest)} could not be loaded: {error}"
                self._failed.append(digest)
                self._end_request(adapter, ResidencyError("adapter_failed", adapter.error))
            self.places.reconsider(adapter)
        for adapter in self.places.copy(self._blocks_per_tick):
            self._end_request(adapter, None)
        self._changed.update(dict.fromkeys(self._copies.trim()))

    @property
    def busy(self) -> bool:
        """`tick` has something to do at once; else, without a plan, wait for a command or `on_loaded`."""
        return self.places.copying or self._copies.has_news

    @property
    def loading(self) -> bool:
        """A host load is under way: `on_loaded` will be called."""
        return self._copies.any_loading

    def stats(self) -> dict[str, int]:
        """Counters and gauges."""
        arena = self._arena
        return {
            "adapter_loads": self.places.loads,
            "adapter_evictions": self.places.evictions,
            "host_copy_bytes": self._copies.nbytes,
            "blocks_pinned": self._promises.pinned_on_device(),
            "adapter_slots_used": arena.num_slots - arena.free_slots,
            "adapter_rows_used": arena.num_rows - arena.free_rows,
        }

    def close(self) -> None:
        """End the worker threads; nothing may be called afterwards."""
        self._copies.close()

    # ------------------------------------------------------------------ the scheduler's questions

    def refusal(self, digests: Sequence[str]) -> ResidencyError | None:
        """Why no sequence with these adapters can be taken: one is unknown or failed; they are too large."""
        try:
            for digest in digests:
                self._usable(digest, "model_not_found")
            self._promises.refuse_too_large(digests)
        except ResidencyError as refusal:
            return refusal
        return None

    def room(self, digests: Iterable[str]) -> int:
        """Blocks left of the pool beside these adapters and all pinned ones, for one sequence alone."""
        return self._promises.room(digests)

    def fits_arena(self, digests: Iterable[str]) -> bool:
        """These adapters and all pinned ones can have table slots and rows together."""
        return self._promises.fits_arena(digests)

    def on_device(self, digests: Iterable[str]) -> bool:
        return all(self._adapters[digest].on_device for digest in digests)

    def slots(self, digests: Iterable[str]) -> tuple[int, ...]:
        """Table slots of adapters on the device, in that order."""
        places = [self._adapters[digest].place for digest in digests]
        return tuple(place.slot for place in places if place is not None)

    @property
    def requests(self) -> Collection[str]:
        """What `load` asked for and is not on the device yet, in order."""
        return self._requests.keys()

    def failed_leases(self) -> list[tuple[int, str]]:
        """Sequences that hold an adapter whose load failed since the last call, each with the message."""
        adapters = [self._adapters[digest] for digest in self._failed if digest in self._adapters]
        self._failed.clear()
        return [(key, adapter.error or "") for adapter in adapters for key in sorted(adapter.leases)]

    # ------------------------------------------------------------------ the scheduler's verbs

    def lease(self, key: int, digests: Iterable[str], blocks: int) -> None:
        """Sequence `key` holds these adapters until `release`, and was promised `blocks` of the pool beside
        them.

        Their way to host memory begins, as far as its budget allows. `refusal` must have said None.
        """
        assert key not in self._promises.leases
        lease = self._promises.leases[key] = Lease(frozenset(digests), blocks)
        for adapter in self._of(lease):
            adapter.leases.add(key)
            adapter.uses += 1
            self.places.reconsider(adapter)
            if adapter.place is None:
                self._fetch(adapter)

    def release(self, key: int) -> None:
        """Sequence `key` has ended."""
        for adapter in self._of(self._promises.leases.pop(key)):
            adapter.leases.remove(key)
            self.places.reconsider(adapter)
            if adapter.forgotten and not adapter.leases:
                self._remove(adapter)

    def hold(self, key: int) -> None:
        """Sequence `key` is computed from now on; its adapters are on the device and stay there until
        `unhold`."""
        for adapter in self._of(self._promises.leases[key]):
            assert adapter.on_device
            adapter.running += 1

    def unhold(self, key: int) -> None:
        """Sequence `key` is no longer computed: preempted, or about to be released."""
        for adapter in self._of(self._promises.leases[key]):
            adapter.running -= 1

    def place(
        self, digests: Iterable[str], beside: int, spare: Container[str] | None, urgent: bool = False
    ) -> Placing:
        """Bring adapters on towards the device for one sequence: all of them, with `beside` blocks to spare,
        or none.

        `spare`: digests of sequences that go before it, which keep their places and host copies; None:
        whatever somebody waits for is kept. `urgent`: its host loads start even beyond the budget of host
        copies.
        """
        adapters = [self._adapters[digest] for digest in dict.fromkeys(digests)]
        missing = [adapter for adapter in adapters if adapter.place is None]
        keep = None if spare is None else Either({adapter.digest for adapter in adapters}, spare)
        loading = True
        for adapter in missing:
            loading &= self._fetch(adapter, keep, urgent)
        if any(adapter.digest not in self._copies for adapter in missing):
            return Placing.LOADING if loading else Placing.NO_ROOM
        if missing:
            sizes = [adapter.size for adapter in missing]
            blocks = beside + sum(size.blocks for size in sizes)
            victims = () if keep is None else self.places.wanted(keep)
            if not self.places.make_room(blocks, victims, len(sizes), sum(size.rows for size in sizes)):
                return Placing.NO_ROOM
            for adapter in missing:
                host = self._copies.get(adapter.digest)
                assert host is not None
                self.places.place(adapter, host)
        return Placing.READY if all(adapter.on_device for adapter in adapters) else Placing.COPYING

    def give_way(self, blocks: int, spare: Container[str] = ()) -> bool:
        """See to it that so many blocks are available, at the cost of adapters that only queued and preempted
        sequences want, those in `spare` excepted. False, and nothing changed, where that is not enough."""
        return self.places.make_room(blocks, self.places.wanted(spare))

    # ------------------------------------------------------------------ inside

    def _find(self, digest: str, code: str) -> Adapter:
        adapter = self._adapters.get(digest)
        if adapter is None or adapter.forgotten:
            raise ResidencyError(code, f"adapter {short(digest)} is not known")
        return adapter

    def _usable(self, digest: str, code: str) -> Adapter:
        """Known, and measured; raises ResidencyError `adapter_failed` where its file could not be read."""
        adapter = self._find(digest, code)
        if adapter.error is None:
            try:
                self._promises.measure(adapter)
            finally:
                self._touch(adapter)
        else:
            raise ResidencyError("adapter_failed", adapter.error)
        return adapter

    def _of(self, lease: Lease) -> list[Adapter]:
        return [self._adapters[digest] for digest in sorted(lease.digests)]

    def _fetch(self, adapter: Adapter, keep: Container[str] | None = None, urgent: bool = False) -> bool:
        """Its host copy is there or on its way; False where the copies in `keep` leave no room for it."""
        digest = adapter.digest
        if digest in self._copies or self._copies.loading(digest):
            return True
        dropped = self._copies.start(digest, adapter.path, adapter.size, keep, urgent)
        if dropped is None:
            return False
        self._changed.update(dict.fromkeys([digest, *dropped]))
        return True

    def _remove(self, adapter: Adapter) -> None:
        if adapter.place is not None:
            self.places.displace(adapter)
        self._copies.drop(adapter.digest)
        self._blocks.retire(adapter.digest)
        del self._adapters[adapter.digest]

    def _end_request(self, adapter: Adapter, refusal: ResidencyError | None) -> None:
        if adapter.requested:
            adapter.requested = False
            del self._requests[adapter.digest]
            self._ended_loads.append((adapter.digest, refusal))

    def _end_hopeless_requests(self) -> None:
        """A pin has taken room: loads under way for which too little is left end."""
        for digest in list(self._requests):
            try:
                self._promises.refuse_too_large((digest,))
            except ResidencyError as refusal:
                self._end_request(self._adapters[digest], refusal)
                self._touch(self._adapters[digest])

    def _is_needed(self, digest: str) -> bool:
        return digest in self._adapters and self._adapters[digest].needed

    def _restore_cost(self, adapter: Adapter) -> float:
        return HOST_COST if adapter.digest in self._copies else DISK_COST

    def _touch(self, adapter: Adapter) -> None:
        self._changed[adapter.digest] = None

    def _state(self, adapter: Adapter) -> AdapterState:
        return adapter.state(adapter.digest in self._copies, self._copies.loading(adapter.digest))

    # ------------------------------------------------------------------ for tests

    def check_integrity(self, leases: Iterable[int], running: Iterable[int]) -> None:
        """Recount everything from the keys of all live sequences and of those being computed; AssertionError
        if wrong."""
        assert self._promises.leases.keys() == set(leases), "a lease is lost, or outlived its sequence"
        computed = [self._promises.leases[key].digests for key in running]
        for digest, adapter in self._adapters.items():
            assert adapter.digest == digest
            assert adapter.running == sum(digest in digests for digests in computed)
            assert adapter.leases or not adapter.forgotten, "a removed adapter stays"
            assert adapter.requested == (digest in self._requests)
        self._promises.check_integrity()
        self.places.check_integrity(self._adapters.values())
        self._copies.check_integrity()
