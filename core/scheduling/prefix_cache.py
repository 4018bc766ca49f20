"""Which blocks of a sequence were computed before: names of blocks by all that their KV depends on. No torch.

The name of a block is a chained 256-bit hash: of the scope (tenant, adapters' digests and weights) at the
head, then of the name before it and the block's own tokens. Equal names mean equal KV that the same tenant
may read.

A prompt finds the full blocks it begins with, and shares them. Of the block after these it can still use the
first tokens, up to where the texts part: a copy is made of it, since what follows is written there. So the
last, partly filled block of a sequence serves too: it is published when its prompt is computed, and again
with all its tokens when the sequence ends.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from ..messages import AdapterUse
from .block_pool import BlockPool
from .prefix_index import Content
from .sequence import Sequence

NAME_BYTES = 32
LEAST_SHARE = 4
"""Texts that have less than this part of their first block in common (a begin token) have nothing in common."""


def root_name(scope: tuple[str, tuple[AdapterUse, ...]]) -> bytes:
    """Where the chain of a scope begins."""
    return blake2b(msgspec.msgpack.encode(scope), digest_size=NAME_BYTES).digest()


def next_name(parent: bytes, token_ids: list[int]) -> bytes:
    """The name of the block that holds `token_ids` after the block named `parent`."""
    return blake2b(array("q", token_ids), digest_size=NAME_BYTES, key=parent).digest()


@dataclass(frozen=True)
class Hit:
    """What the cache has of a sequence."""

    blocks: list[int]
    """Full blocks, to be shared."""
    part: int | None = None
    """A block whose first `part_tokens` tokens come next, to be copied."""
    part_tokens: int = 0

    @property
    def held(self) -> list[int]:
        """All that must be held for it."""
        return self.blocks if self.part is None else [*self.blocks, self.part]


class PrefixCache:
    """Finds and publishes blocks of sequences in the pool's index. Switched off, it does neither."""

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool = True) -> None:
        self._pool = pool
        self._block_size = block_size
        self.enabled = enabled
        self._copies: list[tuple[int, int]] = []
        self.sources: list[int] = []
        """Blocks held, beside all tables, until the copies of them are made."""

    def match(self, sequence: Sequence) -> Hit:
        """What is published of the tokens of `sequence`: at most len - 1, so that one row is left to compute.
        Nothing for a sequence that still owes log-probabilities of its prompt: these need every row."""
        blocks: list[int] = []
        if not self.enabled or sequence.owes_prompt_logprobs:
            return Hit(blocks)
        size, usable = self._block_size, len(sequence) - 1
        while (len(blocks) + 1) * size <= usable:
            block = self._pool.lookup(self._name(sequence, len(blocks) + 1))
            if block is None:
                break
            blocks.append(block)
        first = len(blocks) * size
        wanted = sequence.token_ids(first, min(first + size, usable))
        near = self._pool.nearest(self._name(sequence, len(blocks)), wanted)
        if near is None or (not blocks and near[1] < size // LEAST_SHARE):
            return Hit(blocks)
        return Hit(blocks, *near)

    def copy(self, part: int, block: int) -> None:
        """The plan that is being made copies `part`, which was held for that, into `block`."""
        self.sources.append(part)
        self._copies.append((part, block))

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """(from, to) for the plan that is being made."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def landed(self) -> None:
        """The plan in flight has been answered."""
        self._pool.release(self.sources)
        self.sources = []

    def publish(self, sequence: Sequence) -> None:
        """Publish the full blocks whose tokens have been computed since the last call, and the part of a
        block that a prompt ends in, as soon as it is computed.

        A block whose content is published already is exchanged for that one in the sequence's table.
        """
        if not self.enabled:
            return
        table = sequence.block_table
        for index in range(sequence.num_published, sequence.num_computed // self._block_size):
            first = index * self._block_size
            content = self._content(sequence, index, first + self._block_size)
            table[index] = self._pool.publish(table[index], content, table[index - 1] if index else None)
            sequence.num_published = index + 1
        if sequence.num_computed == len(sequence.prompt_token_ids):
            self.publish_part(sequence)

    def publish_part(self, sequence: Sequence) -> None:
        """Publish what has been computed of its last block, where that is not full."""
        index = sequence.num_computed // self._block_size
        if (
            not self.enabled
            or index != sequence.num_published
            or not sequence.num_computed % self._block_size
        ):
            return
        table = sequence.block_table
        content = self._content(sequence, index, sequence.num_computed)
        self._pool.publish_part(table[index], content, table[index - 1] if index else None)

    def _content(self, sequence: Sequence, index: int, stop: int) -> Content:
        """Block `index` of the sequence, with its tokens up to position `stop`."""
        first = index * self._block_size
        above, tokens = self._name(sequence, index), sequence.token_ids(first, stop)
        full = len(tokens) == self._block_size
        name = self._name(sequence, index + 1) if full else next_name(above, tokens)
        return Content(name, above, tuple(tokens), sequence.digests)

    def _name(self, sequence: Sequence, blocks: int) -> bytes:
        """Name of its first `blocks` full blocks; made once and kept: tokens never change."""
        names, size = sequence.block_names, self._block_size
        if not names:
            names.append(root_name(sequence.scope))
        while len(names) <= blocks:
            first = (len(names) - 1) * size
            names.append(next_name(names[-1], sequence.token_ids(first, first + size)))
        return names[blocks]
