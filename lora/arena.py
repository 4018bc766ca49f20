"""Slots and row ranges of the fixed table arena of resident adapters. Control code: no torch.

An adapter takes one slot and one contiguous range of row entries. Ranges are given first fit; where the free
entries suffice but lie scattered, the ranges in use are moved together first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """The `num_rows` entries of the adapter in `slot` go from `first_row` down to `to`."""

    slot: int
    first_row: int
    num_rows: int
    to: int


class Arena:
    """Who has which slot and rows. A slot given back is given out again: only what no step in flight names
    may be."""

    def __init__(self, num_slots: int, num_rows: int) -> None:
        self.num_slots = num_slots
        self.num_rows = num_rows
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._ranges: dict[int, tuple[int, int]] = {}  # slot -> (first row, rows)
        self._rows_used = 0

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def free_rows(self) -> int:
        return self.num_rows - self._rows_used

    def first_row(self, slot: int) -> int:
        """Where the range of `slot` begins now."""
        return self._ranges[slot][0]

    def take(self, rows: int) -> tuple[int, list[Move]]:
        """A slot with a range of `rows` entries, and the moves that make its range free, in the order to do
        them.

        The caller has made sure of a free slot and `rows` free entries.
        """
        assert self._free_slots
        assert rows <= self.free_rows
        moves: list[Move] = []
        first = self._gap(rows)
        if first is None:
            moves, first = self._compact()
        slot = self._free_slots.pop()
        self._ranges[slot] = (first, rows)
        self._rows_used += rows
        return slot, moves

    def give(self, slot: int) -> None:
        """The slot and its range are free again."""
        self._rows_used -= self._ranges.pop(slot)[1]
        self._free_slots.append(slot)

    def _gap(self, rows: int) -> int | None:
        end = 0
        for first, length in sorted(self._ranges.values()):
            if first - end >= rows:
                return end
            end = first + length
        return end if self.num_rows - end >= rows else None

    def _compact(self) -> tuple[list[Move], int]:
        """Move every range down to the end of the one before it; also the first entry free after that."""
        moves, end = [], 0
        for slot, (first, length) in sorted(self._ranges.items(), key=lambda item: item[1]):
            if first != end:
                moves.append(Move(slot, first, length, end))
                self._ranges[slot] = (end, length)
            end += length
        return moves, end

    def check_integrity(self) -> None:
        """AssertionError where a slot or an entry is given twice, or lost."""
        assert sorted([*self._free_slots, *self._ranges]) == list(range(self.num_slots))
        end = 0
        for first, length in sorted(self._ranges.values()):
            assert first >= end, "two row ranges overlap"
            end = first + length
        assert end <= self.num_rows
        assert self._rows_used == sum(length for _, length in self._ranges.values())
