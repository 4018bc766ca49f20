"""Slots and rows of the table arena."""

from __future__ import annotations

import random
from typing import Any

from heddle.lora.arena import Arena


def test_scattered_rows_are_moved_together_for_a_larger_adapter(engine: Any) -> None:
    fake = engine(blocks=64, rows=12)
    for index in range(4):
        fake.know(f"d{index}", blocks=1, rows=3)
        fake.load(f"d{index}")
    fake.residency.evict("d0")
    fake.residency.evict("d2")
    keys = [fake.submit([1], digest, max_tokens=20, ignore_eos=True) for digest in ("d1", "d3")]
    fake.step()
    fake.know("large", blocks=1, rows=6)
    keys.append(fake.submit([1], "large", max_tokens=2, ignore_eos=True))
    fake.finish()  # every step checks every row's tables
    assert fake.device.moves == 2
    for key in keys:
        fake.check_answer(fake.received[key])


def test_rows_are_moved_also_while_an_adapter_is_on_its_way(engine: Any) -> None:
    """One whose pages are still being copied has a range, but nothing in it yet."""
    fake = engine(blocks=64, rows=12, blocks_per_tick=1)
    for index in range(3):
        fake.know(f"d{index}", blocks=1, rows=3)
        fake.load(f"d{index}")
    fake.know("slow", blocks=6, rows=3)
    keys = [fake.submit([1], "slow", max_tokens=2), fake.submit([1], "d1", max_tokens=20, ignore_eos=True)]
    fake.step()
    fake.residency.evict("d0")
    fake.residency.evict("d2")
    fake.know("large", blocks=1, rows=6)
    keys.append(fake.submit([1], "large", max_tokens=2))
    fake.step()
    assert fake.residency.state("slow").loading
    assert fake.device.moves == 1
    fake.finish()
    for key in keys:
        fake.check_answer(fake.received[key])


def test_arena_never_gives_a_row_twice() -> None:
    draw = random.Random(5)
    arena = Arena(6, 40)
    taken: dict[int, int] = {}
    for _ in range(3000):
        rows = draw.randint(0, 12)
        if draw.random() < 0.55 and arena.free_slots and arena.free_rows >= rows:
            slot, moves = arena.take(rows)
            assert slot not in taken
            for move in moves:
                assert move.to < move.first_row
                assert taken[move.slot] == move.num_rows
            taken[slot] = rows
        elif taken:
            slot = draw.choice(sorted(taken))
            arena.give(slot)
            del taken[slot]
        arena.check_integrity()
        assert arena.free_rows == 40 - sum(taken.values())
        assert arena.free_slots == 6 - len(taken)
