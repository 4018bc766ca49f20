"""Which blocks of a sequence were computed before: names of blocks by all that their KV depends on. No torch.

The name of a block is a chained 256-bit hash: of the scope (tenant, adapters' digests and weights) at the
head, then of the name before it and the block's own tokens. Equal names mean equal KV that the same tenant
may read.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

import msgspec

from .block_pool import BlockPool
from .messages import AdapterUse
from .sequence import Sequence

NAME_BYTES = 32


def root_name(scope: tuple[str, tuple[AdapterUse, ...]]) -> bytes:
    """Where the chain of a scope begins."""
    return blake2b(msgspec.msgpack.encode(scope), digest_size=NAME_BYTES).digest()


def next_name(parent: bytes, token_ids: list[int]) -> bytes:
    """The name of the block that holds `token_ids` after the block named `parent`."""
    return blake2b(array("q", token_ids), digest_size=NAME_BYTES, key=parent).digest()


class PrefixCache:
    """Finds and publishes full blocks of sequences in the pool's index. Switched off, it does neither."""

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool = True) -> None:
        self._pool = pool
        self._block_size = block_size
        self.enabled = enabled

    def match(self, sequence: Sequence) -> list[int]:
        """The published blocks that begin `sequence`, in order: at most len - 1 tokens, so that one row is
        left to compute. None for a sequence that still owes log-probabilities of its prompt: these need every
        row."""
        if not self.enabled or sequence.owes_prompt_logprobs:
            return []
        blocks: list[int] = []
        for index in range((len(sequence) - 1) // self._block_size):
            block = self._pool.lookup(self._name(sequence, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, sequence: Sequence) -> None:
        """Publish the full blocks whose tokens have been computed since the last call.

        A block whose content is published already is exchanged for that one in the sequence's table.
        """
        if not self.enabled:
            return
        table = sequence.block_table
        for index in range(sequence.num_published, sequence.num_computed // self._block_size):
            parent = table[index - 1] if index else None
            table[index] = self._pool.publish(table[index], self._name(sequence, index), parent)
            sequence.num_published = index + 1

    def _name(self, sequence: Sequence, index: int) -> bytes:
        """Names are made once and kept: tokens never change."""
        names, size = sequence.block_names, self._block_size
        while len(names) <= index:
            first = len(names) * size
            parent = names[-1] if names else root_name(sequence.scope)
            names.append(next_name(parent, sequence.token_ids(first, first + size)))
        return names[index]
