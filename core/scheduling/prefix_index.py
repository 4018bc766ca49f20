"""What published blocks hold, and how they are found: by name, or by the tokens they begin with. No torch."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """The tokens that can be read in a block: all of a full one, the first ones of a part."""

    name: bytes
    """Stands for all that their KV depends on: equal names, equal KV."""
    above: bytes
    """Name of the block before it, or of the scope for a first block."""
    token_ids: tuple[int, ...]
    digests: tuple[str, ...] = ()
    """Adapters whose weights their KV depends on."""


class PrefixIndex:
    """Names to blocks, and under each name the blocks that follow it, in the order of their tokens.

    In that order the entry that agrees longest with a text stands beside the place the text itself would
    have, so it is found by bisection.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._below: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}
        self._of: dict[str, set[int]] = {}

    def find(self, name: bytes) -> int | None:
        """The block published under `name`."""
        return self._blocks.get(name)

    def nearest(self, above: bytes, token_ids: list[int]) -> tuple[int, int] | None:
        """Among the blocks after `above` the one that agrees longest with `token_ids`, and in how many
        tokens; None where none agrees in its first."""
        children = self._below.get(above)
        if not children or not token_ids:
            return None
        tokens = tuple(token_ids)
        place = bisect_left(children, (tokens,))
        best = max(children[max(0, place - 1) : place + 1], key=lambda child: _common(child[0], tokens))
        common = _common(best[0], tokens)
        return (best[1], common) if common else None

    def of(self, digest: str) -> list[int]:
        """Blocks whose KV depends on this adapter, ascending."""
        return sorted(self._of.get(digest, ()))

    def add(self, block: int, content: Content) -> None:
        """`block` holds `content`, which no other block is published with."""
        assert content.name not in self._blocks
        self._blocks[content.name] = block
        children = self._below.setdefault(content.above, [])
        entry = (content.token_ids, block)
        children.insert(bisect_left(children, entry), entry)
        for digest in content.digests:
            self._of.setdefault(digest, set()).add(block)

    def remove(self, block: int, content: Content) -> None:
        """Undo `add`."""
        del self._blocks[content.name]
        children = self._below[content.above]
        children.pop(bisect_left(children, (content.token_ids, block)))
        if not children:
            del self._below[content.above]
        for digest in set(content.digests):
            self._of[digest].discard(block)
            if not self._of[digest]:
                del self._of[digest]

    def check_integrity(self, published: dict[int, Content]) -> None:
        """AssertionError where an entry is missing, or one too many. For tests."""
        assert self._blocks == {content.name: block for block, content in published.items()}
        below = [(above, *child) for above, children in self._below.items() for child in children]
        assert sorted(below) == sorted(
            (content.above, content.token_ids, block) for block, content in published.items()
        )
        assert all(children == sorted(children) for children in self._below.values())
        owned = {(digest, block) for digest, blocks in self._of.items() for block in blocks}
        assert owned == {
            (digest, block) for block, content in published.items() for digest in content.digests
        }


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Tokens that both begin with."""
    for index, (one, other) in enumerate(zip(first, second)):
        if one != other:
            return index
    return min(len(first), len(second))
