"""Which rows of a step take which adapters, grouped into segments. Control code: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class HasAdapters(Protocol):
    """What is read of a chunk: its rows, and the adapters that all of them take."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def adapter_slots(self) -> Sequence[int]: ...

    @property
    def adapter_weights(self) -> Sequence[float]: ...


@dataclass(frozen=True)
class Segments:
    """The arrays of `ops.LoraBatch`, on the host."""

    pair_rows: np.ndarray
    """int32 [P]"""
    pair_weights: np.ndarray
    """float32 [P]"""
    starts: np.ndarray
    """int32 [G + 1]"""
    slots: np.ndarray
    """int32 [G]"""
    rounds: tuple[int, ...]
    """Where the segments of each position begin, and G."""


def build(chunks: Sequence[HasAdapters]) -> Segments | None:
    """Segments of a step whose rows are the chunks' tokens, one chunk after another; None where no row has an
    adapter.

    Equal slots at the same position of their requests' adapter lists form one segment. All segments of
    position 0 come before those of position 1, and so on, so that a row's deltas are added in the order of
    its request's list, whoever shares the step; within a position, segments stand in the order of their
    slots, rows in the order of the step.

        chunk  rows  slots    segments  (slot 4: rows 0 1 5) (slot 7: rows 2 3 4)   position 0
        a      0-1   4 7                (slot 7: rows 0 1)                          position 1
        b      2-4   7
        c      5     4
    """
    groups: dict[
        tuple[int, int], list[tuple[int, int, float]]
    ] = {}  # (position, slot) -> (first row, rows, weight)
    first = 0
    for chunk in chunks:
        rows = len(chunk.token_ids)
        for position, (slot, weight) in enumerate(zip(chunk.adapter_slots, chunk.adapter_weights)):
            groups.setdefault((position, slot), []).append((first, rows, weight))
        first += rows
    if not groups:
        return None
    order = sorted(groups)
    pairs = [piece for key in order for piece in groups[key]]
    lengths = np.array([rows for _, rows, _ in pairs], np.int32)
    changes = (i for i in range(1, len(order)) if order[i][0] != order[i - 1][0])
    sizes = [sum(rows for _, rows, _ in groups[key]) for key in order]
    pair_rows = np.concatenate([np.arange(first, first + rows, dtype=np.int32) for first, rows, _ in pairs])
    return Segments(
        pair_rows=pair_rows,
        pair_weights=np.repeat(np.array([weight for _, _, weight in pairs], np.float32), lengths),
        starts=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        slots=np.array([slot for _, slot in order], np.int32),
        rounds=(0, *changes, len(order)),
    )
