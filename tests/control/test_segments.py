"""Which rows take which adapter: equal slots together, deltas added in the order of the request's list."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from heddle.lora.segments import Segments, build


@dataclass(frozen=True)
class Rows:
    token_ids: tuple[int, ...]
    adapter_slots: tuple[int, ...] = ()
    adapter_weights: tuple[float, ...] = ()


def rows(count: int, *adapters: tuple[int, float]) -> Rows:
    return Rows(
        tuple(range(count)), tuple(slot for slot, _ in adapters), tuple(weight for _, weight in adapters)
    )


def as_lists(segments: Segments | None) -> list[tuple[int, list[tuple[int, float]]]]:
    """(slot, its (row, weight) pairs) of each segment."""
    assert segments is not None
    assert segments.pair_rows.dtype == segments.starts.dtype == segments.slots.dtype == np.int32
    assert segments.pair_weights.dtype == np.float32
    pairs = list(zip(segments.pair_rows.tolist(), segments.pair_weights.tolist()))
    bounds = segments.starts.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(pairs)
    return [(slot, pairs[bounds[i] : bounds[i + 1]]) for i, slot in enumerate(segments.slots.tolist())]


def test_without_adapters_there_are_no_segments() -> None:
    assert build([]) is None
    assert build([rows(3), rows(1)]) is None


def test_equal_adapters_form_one_segment_and_base_rows_are_in_none() -> None:
    step = [rows(2, (4, 1.0)), rows(1), rows(3, (7, 0.5)), rows(1, (4, 2.0))]
    assert as_lists(build(step)) == [
        (4, [(0, 1.0), (1, 1.0), (6, 2.0)]),
        (7, [(3, 0.5), (4, 0.5), (5, 0.5)]),
    ]


def test_the_order_of_a_request_s_list_is_the_order_of_its_segments() -> None:
    step = [rows(1, (9, 0.25), (2, 0.75)), rows(2, (2, 1.0))]
    assert as_lists(build(step)) == [
        (2, [(1, 1.0), (2, 1.0)]),
        (9, [(0, 0.25)]),
        (2, [(0, 0.75)]),
    ]


def test_one_adapter_named_twice_is_added_twice() -> None:
    assert as_lists(build([rows(1, (3, 0.5), (3, 0.25))])) == [(3, [(0, 0.5)]), (3, [(0, 0.25)])]


@pytest.mark.parametrize("seed", range(20))
def test_each_row_gets_its_own_adapters_in_order_whoever_shares_the_step(seed: int) -> None:
    draw = random.Random(seed)
    step = []
    for _ in range(draw.randrange(1, 12)):
        adapters = [
            (draw.randrange(5), draw.choice([1.0, 0.5, -2.0])) for _ in range(draw.choice([0, 1, 1, 2, 3]))
        ]
        step.append(rows(draw.randrange(1, 5), *adapters))
    expected: dict[int, list[tuple[int, float]]] = {}
    first = 0
    for chunk in step:
        for row in range(first, first + len(chunk.token_ids)):
            expected[row] = list(zip(chunk.adapter_slots, chunk.adapter_weights))
        first += len(chunk.token_ids)
    got: dict[int, list[tuple[int, float]]] = {row: [] for row in range(first)}
    segments = build(step)
    if segments is not None:
        for slot, pairs in as_lists(segments):
            assert len({row for row, _ in pairs}) == len(pairs) > 0
            for row, weight in pairs:
                got[row].append((slot, weight))
    assert got == expected
