"""The ledger of the block pool: who holds which block, and what goes first when blocks run out. No torch.

Every block is in exactly one of four states, so that free + used + cached + adapters = total:

    free       holds nothing
    used       in the tables of one or more sequences (`references` > 0), published in the prefix cache or not
    cached     published in the prefix cache, in no table: idle, taken when room is needed
    adapters   a page of an adapter

Published blocks form trees (a block's parent holds the tokens before it). A table that holds a block holds
all its ancestors too, and a block is taken out only after its children, tails before heads: so a cached block
is always reachable from its head, and every idle block can be taken.

Idle prefix blocks and idle adapters stand in one order, GreedyDual-Size-Frequency (Cherkasova 1998) counted
per block: score = clock + uses * cost to restore one block, the clock being the score of what was evicted
last. The lowest goes first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Evictable(Protocol):
    """Idle adapters, as the pool sees them."""

    @property
    def idle_blocks(self) -> int:
        """Blocks of all idle adapters together."""

    def lowest_score(self) -> float | None:
        """Score of the idle adapter that goes first; None where none is idle."""

    def evict_lowest(self) -> None:
        """Evict that one: calls `BlockPool.give_back` with its blocks."""


class NoAdapters:
    """The `Evictable` of a pool without adapters."""

    idle_blocks = 0

    def lowest_score(self) -> float | None:
        return None

    def evict_lowest(self) -> None:
        raise AssertionError("no adapter is idle")


@dataclass(slots=True)
class _Published:
    """What the prefix cache knows of one block."""

    name: bytes
    parent: int | None
    depth: int
    children: int = 0
    uses: int = 1
    score: float = 0.0
    stamp: int = 0
    """Counts the times it was taken up again: an entry of the heap with an older stamp is void."""


class BlockPool:
    """Block ids are the only currency. Verbs change all or nothing."""

    def __init__(
        self, num_blocks: int, *, prefix_cost: float = 10.0, order: Sequence[int] | None = None
    ) -> None:
        """`prefix_cost`: to compute one block of tokens again, in units of copying one adapter page from host
        memory. `order`: the order in which blocks are first given out (default: ascending)."""
        order = range(num_blocks) if order is None else order
        assert sorted(order) == list(range(num_blocks)), "order is a permutation of the block ids"
        self.total = num_blocks
        self._prefix_cost = prefix_cost
        self._clock = 0.0
        self._free = list(reversed(order))
        self._references = [0] * num_blocks
        self._published: list[_Published | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._idle = 0
        self._heap: list[tuple[float, int, int, int]] = []  # (score, -depth, stamp, block) of idle leaves
        self._adapter_blocks: set[int] = set()
        self._adapters: Evictable = NoAdapters()

    def attach(self, adapters: Evictable) -> None:
        """From now on these adapters' idle blocks count as available."""
        self._adapters = adapters

    # ------------------------------------------------------------------ queries

    @property
    def available(self) -> int:
        """Blocks that could be had now: free, cached, and of idle adapters."""
        return len(self._free) + self._idle + self._adapters.idle_blocks

    def available_beside(self, cached: Sequence[int]) -> int:
        """Blocks that could be had now if the blocks `cached` were in use."""
        return self.available - sum(self._references[block] == 0 for block in cached)

    def free_blocks(self) -> list[int]:
        """Ids that hold nothing."""
        return list(self._free)

    def counts(self) -> dict[str, int]:
        """Blocks in each state; they add up to `total`."""
        free, cached, adapters = len(self._free), self._idle, len(self._adapter_blocks)
        used = self.total - free - cached - adapters
        return {"free": free, "used": used, "cached": cached, "adapters": adapters}

    def lookup(self, name: bytes) -> int | None:
        """The block published under `name`."""
        return self._index.get(name)

    def score(self, cost: float, uses: int) -> float:
        """Where something used `uses` times, whose restoring costs `cost` a block, stands in the order of
        eviction."""
        return self._clock + uses * cost

    # ------------------------------------------------------------------ sequences

    def reserve(self, cached: Sequence[int], count: int) -> list[int] | None:
        """A table: the published blocks `cached` (a path from its head) and `count` fresh ones, all held once
        more.

        None, and nothing changed, where there are too few. May evict what is idle.
        """
        if self.available_beside(cached) < count:
            return None
        for block in cached:
            entry = self._published[block]
            assert entry is not None
            if self._references[block] == 0:
                self._idle -= 1
                entry.stamp += 1
            entry.uses += 1
            self._references[block] += 1
        fresh = self._take(count)
        for block in fresh:
            self._references[block] = 1
        return [*cached, *fresh]

    def publish(self, block: int, name: bytes, parent: int | None) -> int:
        """The tokens of `block`, held and computed, can be found under `name`; `parent` holds the tokens
        before them.

        Returns the block to hold from now on: where the same content is published already, that one, and
        `block` is let go; else `block`.
        """
        known = self._index.get(name)
        if known is not None:
            assert known != block
            entry = self._published[known]
            assert entry is not None
            if self._references[known] == 0:
                self._idle -= 1
                entry.stamp += 1
            self._references[known] += 1
            self.release([block])
            return known
        depth = 0
        if parent is not None:
            above = self._published[parent]
            assert above is not None
            above.children += 1
            depth = above.depth + 1
        assert self._references[block]
        assert self._published[block] is None
        self._index[name] = block
        self._published[block] = _Published(name, parent, depth)
        return block

    def release(self, table: Sequence[int]) -> None:
        """One holder lets go of these blocks: published ones become idle when the last has, others free."""
        for block in reversed(table):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block]:
                continue
            entry = self._published[block]
            if entry is None:
                self._free.append(block)
                continue
            self._idle += 1
            entry.score = self.score(self._prefix_cost, entry.uses)
            if not entry.children:
                self._queue(block, entry)

    # ------------------------------------------------------------------ adapters

    def take_for_adapter(self, count: int) -> list[int] | None:
        """`count` pages; None, and nothing changed, where there are too few. May evict what is idle."""
        if self.available < count:
            return None
        blocks = self._take(count)
        self._adapter_blocks.update(blocks)
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        """An adapter's pages are free again."""
        assert self._adapter_blocks.issuperset(blocks)
        self._adapter_blocks.difference_update(blocks)
        self._free.extend(reversed(blocks))

    # ------------------------------------------------------------------ eviction

    def _take(self, count: int) -> list[int]:
        while len(self._free) < count:
            self._evict_one()
        return [self._free.pop() for _ in range(count)]

    def _evict_one(self) -> None:
        """Free the idle prefix block, or the idle adapter, with the lowest score."""
        leaf = self._lowest_leaf()
        adapter = self._adapters.lowest_score()
        if adapter is not None and (leaf is None or adapter < leaf[0]):
            self._clock = max(self._clock, adapter)
            self._adapters.evict_lowest()
            return
        assert leaf is not None, "available blocks were counted that nobody gives"
        score, block = leaf
        heapq.heappop(self._heap)
        self._clock = max(self._clock, score)
        entry = self._published[block]
        assert entry is not None
        del self._index[entry.name]
        self._published[block] = None
        self._idle -= 1
        self._free.append(block)
        if entry.parent is not None:
            above = self._published[entry.parent]
            assert above is not None
            above.children -= 1
            if not above.children and not self._references[entry.parent]:
                self._queue(entry.parent, above)

    def _queue(self, block: int, entry: _Published) -> None:
        """An idle block has no children: it can be evicted."""
        heapq.heappush(self._heap, (entry.score, -entry.depth, entry.stamp, block))
        if len(self._heap) > 4 * self.total:  # void entries go when they come to the top, or now
            self._heap = [item for item in self._heap if self._is_idle_leaf(item[3], item[2])]
            heapq.heapify(self._heap)

    def _lowest_leaf(self) -> tuple[float, int] | None:
        """Score and id of the idle prefix block that goes first; drops void entries of the heap on the
        way."""
        while self._heap:
            score, _, stamp, block = self._heap[0]
            if self._is_idle_leaf(block, stamp):
                return score, block
            heapq.heappop(self._heap)
        return None

    def _is_idle_leaf(self, block: int, stamp: int) -> bool:
        entry = self._published[block]
        return (
            entry is not None and entry.stamp == stamp and not entry.children and not self._references[block]
        )

    # ------------------------------------------------------------------ for tests

    def check_integrity(self, tables: Iterable[Sequence[int]], adapters: Iterable[Sequence[int]]) -> None:
        """Recount everything from the tables of all sequences and the pages of all adapters; AssertionError
        if wrong."""
        held = Counter(block for table in tables for block in table)
        pages = [block for blocks in adapters for block in blocks]
        assert len(set(pages)) == len(pages), "a page belongs to two adapters"
        assert set(pages) == self._adapter_blocks, "adapters hold other pages than the pool thinks"
        assert self._references == [held[block] for block in range(self.total)], "reference counts are wrong"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        cached = {
            block for block, entry in enumerate(self._published) if entry and not self._references[block]
        }
        assert len(cached) == self._idle
        states = (free, held.keys(), cached, self._adapter_blocks)
        assert sum(map(len, states)) == self.total, "free + used + cached + adapters is not the total"
        assert set().union(*states) == set(range(self.total)), "a block is in two states"
        assert {entry.name: block for block, entry in enumerate(self._published) if entry} == self._index
        children = Counter(entry.parent for entry in self._published if entry and entry.parent is not None)
        waiting = {block for _, _, stamp, block in self._heap if self._is_idle_leaf(block, stamp)}
        for block, entry in enumerate(self._published):
            if entry is None:
                continue
            assert entry.children == children[block]
            if entry.parent is not None:
                assert self._published[entry.parent] is not None, "a head was evicted before its tail"
                assert self._references[entry.parent] or not self._references[block], (
                    "a held block's parent is idle"
                )
            if block in cached and not entry.children:
                assert block in waiting, "an idle leaf cannot be found for eviction"
