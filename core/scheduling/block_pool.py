"""The ledger of the block pool: who holds which block, and what goes first when blocks run out. No torch.

Every block is in exactly one of four states, so that free + used + cached + adapters = total:

    free       holds nothing
    used       in the tables of one or more sequences (`references` > 0), published in the prefix cache or not
    cached     published in the prefix cache, in no table: idle, taken when room is needed
    adapters   a page of an adapter

Published blocks form trees (a block's parent holds the tokens before it). A table that holds a block holds
all its ancestors too, and a block is taken out only after its children, tails before heads: so a cached block
is always reachable from its head, and every idle block can be taken. A full block is shared by who holds it;
a part (the last, partly filled block of a sequence) is still written to by its one holder, and others read
it by a copy. What was published of a block stays true, since tokens are only ever added behind it.

Idle prefix blocks and idle adapters stand in one order, GreedyDual-Size-Frequency (Cherkasova 1998) counted
per block: score = clock + uses * cost to restore one block, the clock being the score of what was evicted
last. The lowest goes first. KV of an adapter that is gone, which nobody can ask for any more, goes before all.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from .prefix_index import Content, PrefixIndex

GONE = -1.0
"""Score of KV that nobody can ask for: below every other."""


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

    content: Content
    parent: int | None
    depth: int
    children: int = 0
    uses: int = 1
    score: float = 0.0
    stamp: int = 0
    """Changes whenever it is taken up or ranked again: an entry of the heap with another stamp is void."""


class BlockPool:
    """Block ids are the only currency. Verbs change all or nothing."""

    def __init__(
        self, num_blocks: int, *, token_cost: float = 1.0, order: Sequence[int] | None = None
    ) -> None:
        """`token_cost`: to compute one token again, in units of copying one adapter page from host memory.
        `order`: the order in which blocks are first given out (default: ascending)."""
        order = range(num_blocks) if order is None else order
        assert sorted(order) == list(range(num_blocks)), "order is a permutation of the block ids"
        self.total = num_blocks
        self._token_cost = token_cost
        self._clock = 0.0
        self._free = list(reversed(order))
        self._references = [0] * num_blocks
        self._published: list[_Published | None] = [None] * num_blocks
        self._index = PrefixIndex()
        self._gone: set[str] = set()  # adapters that are gone and have left KV behind
        self._idle = 0
        self._heap: list[tuple[float, int, int, int]] = []  # (score, -depth, stamp, block) of idle leaves
        self._stamps = count()
        self._adapter_blocks: set[int] = set()
        self._adapters: Evictable = NoAdapters()
        self._owners = [""] * num_blocks  # of blocks that hold KV: only one tenant ever reads it
        self.held: Counter[str] = Counter()
        """Blocks in tables, by owner; one that several of its tables hold counts once."""

    def attach(self, adapters: Evictable) -> None:
        """From now on these adapters' idle blocks count as available."""
        self._adapters = adapters

    # ------------------------------------------------------------------ queries

    @property
    def available(self) -> int:
        """Blocks that could be had now: free, cached, and of idle adapters."""
        return len(self._free) + self._idle + self._adapters.idle_blocks

    @property
    def sharable(self) -> int:
        """Blocks that sequences hold or could have: all but those of adapters that are in use."""
        return self.total - len(self._adapter_blocks) + self._adapters.idle_blocks

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
        return self._index.find(name)

    def nearest(self, above: bytes, token_ids: list[int]) -> tuple[int, int] | None:
        """The published block, full or part, that follows `above` and agrees longest with `token_ids`, and in
        how many tokens."""
        return self._index.nearest(above, token_ids)

    def shared(self, block: int) -> bool:
        """More than one table holds it."""
        return self._references[block] > 1

    def score(self, cost: float, uses: int) -> float:
        """Where something used `uses` times, whose restoring costs `cost` a block, stands in the order of
        eviction."""
        return self._clock + uses * cost

    # ------------------------------------------------------------------ sequences

    def reserve(self, cached: Sequence[int], count: int, owner: str = "") -> list[int] | None:
        """A table: the published blocks `cached` (a path from its head) and `count` fresh ones, all held once
        more. `owner`: whose KV it will be.

        None, and nothing changed, where there are too few. May evict what is idle.
        """
        if self.available_beside(cached) < count:
            return None
        for block in cached:
            self._hold(block).uses += 1
        fresh = self._take(count)
        for block in fresh:
            self._references[block] = 1
            self._owners[block] = owner
        self.held[owner] += count
        return [*cached, *fresh]

    def publish(self, block: int, content: Content, parent: int | None) -> int:
        """`block`, held and computed, is full with `content`; `parent` holds the tokens before them.

        Returns the block to hold from now on: where the same content is published already, that one, and
        `block` is let go; else `block`.
        """
        known = self._index.find(content.name)
        if known is None:
            self._enter(block, content, parent)
            return block
        if known == block:
            return block
        if self._published[block] is not None:
            self._withdraw(block)
        self._hold(known)
        self.release([block])
        return known

    def publish_part(self, block: int, content: Content, parent: int | None) -> None:
        """The first tokens of `block`, held and computed, are `content`, and its holder may add more behind
        them. Nothing, where the same is published already."""
        if self._index.find(content.name) is None:
            self._enter(block, content, parent)

    def _hold(self, block: int) -> _Published:
        """One more holder of a published block."""
        entry = self._published[block]
        assert entry is not None
        if self._references[block] == 0:
            self._idle -= 1
            self.held[self._owners[block]] += 1
            entry.stamp = next(self._stamps)
        self._references[block] += 1
        return entry

    def _enter(self, block: int, content: Content, parent: int | None) -> None:
        assert self._references[block]
        part = self._published[block]
        if part is not None:  # it holds more than was published of it so far
            assert part.content.above == content.above
            assert content.token_ids[: len(part.content.token_ids)] == part.content.token_ids
            self._index.remove(block, part.content)
            part.content = content
        else:
            depth = 0
            if parent is not None:
                above = self._published[parent]
                assert above is not None
                above.children += 1
                depth = above.depth + 1
            self._published[block] = _Published(content, parent, depth)
        self._index.add(block, content)

    def release(self, table: Sequence[int]) -> None:
        """One holder lets go of these blocks: published ones become idle when the last has, others free."""
        for block in reversed(table):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block]:
                continue
            self.held[self._owners[block]] -= 1
            entry = self._published[block]
            if entry is None:
                self._free.append(block)
                continue
            self._idle += 1
            self._rank(block, entry)

    def retire(self, digest: str) -> None:
        """No new sequence will name this adapter: its KV, which none holds any more, is the first to go."""
        blocks = self._index.of(digest)
        if blocks:
            self._gone.add(digest)
            self._rerank(blocks)

    def revive(self, digest: str) -> None:
        """This adapter may be named again: what is left of its KV stands as any other."""
        if digest in self._gone:
            self._gone.discard(digest)
            self._rerank(self._index.of(digest))

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
        self._withdraw(block)
        self._idle -= 1
        self._free.append(block)

    def _withdraw(self, block: int) -> None:
        """It is not published any more; a parent that was left for it alone can be evicted."""
        entry = self._published[block]
        assert entry is not None
        assert not entry.children
        self._index.remove(block, entry.content)
        self._gone.difference_update(digest for digest in entry.content.digests if not self._index.of(digest))
        self._published[block] = None
        if entry.parent is not None:
            above = self._published[entry.parent]
            assert above is not None
            above.children -= 1
            if not above.children and not self._references[entry.parent]:
                self._queue(entry.parent, above)

    def _rank(self, block: int, entry: _Published) -> None:
        """It is idle: where it stands in the order of eviction."""
        gone = not self._gone.isdisjoint(entry.content.digests)
        cost = self._token_cost * len(entry.content.token_ids)
        entry.score = GONE if gone else self.score(cost, entry.uses)
        entry.stamp = next(self._stamps)
        if not entry.children:
            self._queue(block, entry)

    def _rerank(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            entry = self._published[block]
            assert entry is not None
            if not self._references[block]:
                self._rank(block, entry)

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
        owned = Counter(self._owners[block] for block in held)
        assert +self.held == owned, "blocks are counted for the wrong owner"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        cached = {
            block for block, entry in enumerate(self._published) if entry and not self._references[block]
        }
        assert len(cached) == self._idle
        states = (free, held.keys(), cached, self._adapter_blocks)
        assert sum(map(len, states)) == self.total, "free + used + cached + adapters is not the total"
        assert set().union(*states) == set(range(self.total)), "a block is in two states"
        published = {block: entry for block, entry in enumerate(self._published) if entry}
        self._index.check_integrity({block: entry.content for block, entry in published.items()})
        assert all(self._index.of(digest) for digest in self._gone)
        children = Counter(entry.parent for entry in self._published if entry and entry.parent is not None)
        waiting = {block for _, _, stamp, block in self._heap if self._is_idle_leaf(block, stamp)}
        for block, entry in published.items():
            assert entry.children == children[block]
            if entry.parent is not None:
                assert self._published[entry.parent] is not None, "a head was evicted before its tail"
                assert self._references[entry.parent] or not self._references[block], (
                    "a held block's parent is idle"
                )
            if block in cached:
                assert entry.children or block in waiting, "an idle leaf cannot be found for eviction"
                gone = not self._gone.isdisjoint(entry.content.digests)
                assert gone == (entry.score == GONE), (
                    "KV of an adapter that is gone is kept, or other KV is not"
                )
