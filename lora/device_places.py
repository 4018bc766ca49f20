"""Adapters on the device: their blocks, slots and rows, and who gives way to whom. No torch.

An adapter with blocks of the pool is *placed*: usable when all its pages are copied. Placed adapters are

    running   a sequence that is being computed holds it: never touched
    wanted    queued or preempted sequences hold it, or a load asked for it: given up only for a sequence that
              goes before all of those, or so that a running one can go on
    idle      nobody holds it: evicted in the pool's order when room is needed
    pinned    not evicted by pressure, whatever else it is

Blocks, slot and rows of an evicted adapter may be reused at once: a step in flight names only running
adapters.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import count
from typing import Any

from .adapter_entry import Adapter, Placement
from .adapter_memory import AdapterMemory, Blocks, HostAdapter
from .arena import Arena


class DevicePlaces:
    """Who is placed; at the same time the `Evictable` that the pool asks for idle adapters."""

    def __init__(
        self,
        memory: AdapterMemory[Any],
        blocks: Blocks,
        arena: Arena,
        restore_cost: Callable[[Adapter], float],
        changed: Callable[[Adapter], None],
    ) -> None:
        """`restore_cost`: what bringing one block of an adapter back costs; `changed`: told of every
        change."""
        self._memory = memory
        self._blocks = blocks
        self._arena = arena
        self._restore_cost = restore_cost
        self._changed = changed
        self._placed: dict[int, Adapter] = {}  # by slot
        self._copying: dict[int, Adapter] = {}  # by slot, in the order they were placed
        self._idle_heap: list[tuple[float, int, Adapter]] = []
        self._ticket = count()
        self._idle_count = self._idle_rows = 0
        self.idle_blocks = 0
        """Blocks of all idle adapters together."""
        self.loads = 0
        """Adapters brought to the device so far."""
        self.evictions = 0
        """Adapters taken off it so far."""
        self.blocks_placed = 0
        """Blocks that adapters were given so far, to be copied to."""

    # ------------------------------------------------------------------ the pool's view

    def lowest_score(self) -> float | None:
        """Score of the idle adapter that goes first; None where none is idle."""
        heap = self._idle_heap
        while heap:
            if _counts(heap[0]):
                return heap[0][0]
            heapq.heappop(heap)
        return None

    def evict_lowest(self) -> None:
        """Evict that one."""
        assert self.lowest_score() is not None
        self.displace(heapq.heappop(self._idle_heap)[2])

    # ------------------------------------------------------------------ in

    @property
    def copying(self) -> bool:
        """`copy` has pages to copy."""
        return bool(self._copying)

    def place(self, adapter: Adapter, host: HostAdapter) -> None:
        """Give it blocks, a slot and rows, of which `make_room` has seen to it that there are enough; queue
        its pages."""
        blocks = self._blocks.take_for_adapter(adapter.size.blocks)
        assert blocks is not None
        self.blocks_placed += len(blocks)
        slot, moves = self._arena.take(adapter.size.rows)
        for move in moves:
            if self._placed[move.slot].on_device:  # else its rows are not written yet
                self._memory.move_rows(move.slot, move.first_row, move.num_rows, move.to)
        adapter.place = Placement(blocks, slot, host)
        self._placed[slot] = self._copying[slot] = adapter
        self.reconsider(adapter)

    def copy(self, limit: int) -> list[Adapter]:
        """Copy at most `limit` pages, first come first served; returns the adapters that are usable now: those whose
        pages have all arrived."""
        complete = []
        for slot, adapter in list(self._copying.items()):
            if limit <= 0:
                break
            place = adapter.place
            assert place is not None
            assert place.host is not None
            if pages := place.blocks[place.copied : place.copied + limit]:
                self._memory.copy_pages(place.host, place.copied, pages)
            place.copied += len(pages)
            limit -= len(pages)
            if place.copied < len(place.blocks):
                break
            if not self._memory.arrived(place.host):
                continue
            self._memory.write_tables(place.host, place.blocks, slot, self._arena.first_row(slot))
            place.host = None
            del self._copying[slot]
            self.loads += 1
            self.reconsider(adapter)
            complete.append(adapter)
        return complete

    # ------------------------------------------------------------------ out

    def displace(self, adapter: Adapter) -> None:
        """Give its blocks, slot and rows back."""
        place = adapter.place
        assert place is not None
        assert not adapter.running
        if place.host is not None:
            self._memory.settle()  # pages may be on their way into blocks that are somebody else's at once
        self.evictions += place.host is None
        adapter.place = None
        del self._placed[place.slot]
        self._copying.pop(place.slot, None)
        self.reconsider(adapter)
        self._blocks.give_back(place.blocks)
        self._arena.give(place.slot)

    def make_room(self, blocks: int, wanted: Iterable[Adapter] = (), slots: int = 0, rows: int = 0) -> bool:
        """See to it that so many blocks are available, and so many slots and rows free, by evicting `wanted`
        ones (see `wanted`), and idle ones for slots and rows. False, and nothing changed, where that is not
        enough."""
        arena, pool = self._arena, self._blocks
        if pool.available >= blocks and arena.free_slots >= slots and arena.free_rows >= rows:
            return True
        victims = sorted(wanted, key=lambda adapter: (-adapter.score, adapter.digest))
        if (
            pool.available + sum(adapter.size.blocks for adapter in victims) < blocks
            or arena.free_slots + self._idle_count + len(victims) < slots
            or arena.free_rows + self._idle_rows + sum(adapter.size.rows for adapter in victims) < rows
        ):
            return False
        while pool.available < blocks:
            self.displace(victims.pop())
        while arena.free_slots < slots or arena.free_rows < rows:
            if self.lowest_score() is not None:
                self.evict_lowest()
            else:
                self.displace(victims.pop())
        return True

    def within_reach(self, spare: Container[str]) -> int:
        """Blocks that could be made available at the cost of wanted adapters, those in `spare` excepted."""
        return self._blocks.available + sum(adapter.size.blocks for adapter in self.wanted(spare))

    def wanted(self, spare: Container[str]) -> Iterable[Adapter]:
        """Placed adapters that are wanted, but those in `spare`."""
        for adapter in self._placed.values():
            if not (adapter.idle or adapter.running or adapter.pinned or adapter.digest in spare):
                yield adapter

    def reconsider(self, adapter: Adapter) -> None:
        """After any change of place, leases or pin: is it idle, and where does it stand in the
        order?"""
        self._changed(adapter)
        idle = adapter.on_device and not (adapter.leases or adapter.pinned)
        if idle != adapter.idle:
            sign = 1 if idle else -1
            adapter.idle = idle
            self.idle_blocks += sign * adapter.size.blocks
            self._idle_rows += sign * adapter.size.rows
            self._idle_count += sign
        if adapter.place is not None:
            adapter.score = self._blocks.score(self._restore_cost(adapter), adapter.uses)
        if idle:
            heapq.heappush(self._idle_heap, (adapter.score, next(self._ticket), adapter))
            if (
                len(self._idle_heap) > 4 * len(self._placed) + 64
            ):  # void entries go when they come to the top, or now
                self._idle_heap = [entry for entry in self._idle_heap if _counts(entry)]
                heapq.heapify(self._idle_heap)

    # ------------------------------------------------------------------ for tests

    def pages(self) -> list[Sequence[int]]:
        """Blocks of every placed adapter."""
        return [adapter.place.blocks for adapter in self._placed.values() if adapter.place is not None]

    def check_integrity(self, adapters: Iterable[Adapter]) -> None:
        """Recount from the adapters themselves; AssertionError where something is lost."""
        idle = []
        placed = {adapter.place.slot: adapter for adapter in adapters if adapter.place is not None}
        assert placed == self._placed
        assert len(placed) == self._arena.num_slots - self._arena.free_slots
        assert self._copying == {slot: adapter for slot, adapter in placed.items() if not adapter.on_device}
        for adapter in adapters:
            assert adapter.on_device or not adapter.running, "a sequence runs without its adapter"
            assert adapter.idle == (adapter.on_device and not (adapter.leases or adapter.pinned))
            assert not (adapter.on_device and adapter.requested), "a load that has ended goes on"
            if adapter.idle:
                idle.append(adapter.size)
                assert any(entry[2] is adapter and _counts(entry) for entry in self._idle_heap)
        assert self.idle_blocks == sum(size.blocks for size in idle)
        assert (self._idle_count, self._idle_rows) == (len(idle), sum(size.rows for size in idle))
        self._arena.check_integrity()


def _counts(entry: tuple[float, int, Adapter]) -> bool:
    """This entry of the idle heap still says how things are: the adapter was not taken up again since."""
    score, _, adapter = entry
    return adapter.idle and adapter.score == score
