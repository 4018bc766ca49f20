"""Requests whose adapters are not on the device: they hold nobody up, and nobody holds them up for ever."""

from __future__ import annotations

import random
from typing import Any

import pytest

from .simulation import tokens


def run_until_started(fake: Any, key: int, traffic: Any, limit: int) -> int:
    """Steps until the request has its first token, with others coming in all the time."""
    for step in range(limit):
        traffic(step)
        fake.step()
        fake.scheduler.check_integrity()
        if fake.received[key].outputs:
            return step
    raise AssertionError(f"not started within {limit} steps")


def test_a_slow_load_holds_up_only_who_waits_for_it(engine: Any) -> None:
    fake = engine(manual_loads=True, max_num_seqs=4)
    fake.know("cold")
    waiting = fake.submit(tokens(5), "cold", max_tokens=3, ignore_eos=True)
    for _ in range(20):
        key = fake.submit(tokens(5), max_tokens=3, ignore_eos=True)
        while key in fake.live:
            assert fake.step()
    assert fake.received[waiting].outputs == 0
    assert not fake.step()
    assert fake.asleep is False  # the load is under way; its end wakes the engine
    woken = fake.woken
    fake.executor.run()
    assert fake.woken == woken + 1
    fake.finish()
    fake.check_answer(fake.received[waiting])


def test_hot_loading_never_touches_an_adapter_in_use(engine: Any) -> None:
    """Two adapters at work in a pool with room for no third, while others are asked for all the time.

    The fake device checks at every step that each row's slot, pages and rows are its own adapter's.
    """
    fake = engine(blocks=40, patience=1000)
    for name in ("A1", "A2", "A3", "A4"):
        fake.know(name, blocks=10)
    keys = [fake.submit(tokens(3), name, max_tokens=30, ignore_eos=True) for name in ("A1", "A2")]
    steps = 0
    while fake.live:
        fake.residency.load(("A3", "A4")[steps % 2])
        fake.step()
        steps += 1
        assert steps < 200
        if steps > 1 and keys[0] in fake.live and keys[1] in fake.live:
            assert fake.residency.on_device(["A1", "A2"])
    for key in keys:
        fake.check_answer(fake.received[key])
    fake.finish()


def test_a_rare_adapter_starts_among_steady_traffic_that_needs_its_room(engine: Any) -> None:
    """Room for one adapter; a new request for the popular one comes before the last has ended, always."""
    fake = engine(blocks=16, patience=8, max_num_seqs=4)
    fake.know("popular", blocks=6)
    fake.know("rare", blocks=6)
    base_started = []

    def traffic(step: int) -> None:
        live = list(fake.live.values())
        if sum(bool(record.command.adapters) for record in live) < 3:
            fake.submit(tokens(3, step), "popular", max_tokens=8, ignore_eos=True)
        if sum(not record.command.adapters for record in live) < 2:
            base_started.append(fake.submit(tokens(3, step), max_tokens=4, ignore_eos=True))

    for step in range(30):
        traffic(step)
        fake.step()
    rare = fake.submit(tokens(3), "rare", max_tokens=4, ignore_eos=True)
    before = len(base_started)
    waited = run_until_started(fake, rare, traffic, limit=60)
    assert waited >= 8
    assert len(base_started) > before + 2, "the base did not flow meanwhile"
    assert sum(fake.received[key].outputs > 0 for key in base_started[before:]) > 2
    fake.finish()
    for record in fake.received.values():
        fake.check_answer(record)


def test_base_traffic_does_not_keep_a_large_adapter_out(engine: Any) -> None:
    """Only blocks are short, and each that frees is wanted by smaller requests at once."""
    fake = engine(blocks=16, patience=8, max_num_seqs=8)
    fake.know("large", blocks=12)

    def traffic(step: int) -> None:
        while len(fake.live) < 10:
            fake.submit(tokens(3, step), max_tokens=12, ignore_eos=True)

    for step in range(20):
        traffic(step)
        fake.step()
    large = fake.submit(tokens(3), "large", max_tokens=4, ignore_eos=True)
    assert run_until_started(fake, large, traffic, limit=60) >= 8
    fake.finish()
    for record in fake.received.values():
        fake.check_answer(record)


def test_slots_short_instead_of_blocks(engine: Any) -> None:
    fake = engine(blocks=64, slots=1, patience=4)
    fake.know("popular", blocks=1)
    fake.know("rare", blocks=1)

    def traffic(step: int) -> None:
        while sum(record.command.adapters[0].digest == "popular" for record in fake.live.values()) < 3:
            fake.submit(tokens(3, step), "popular", max_tokens=6, ignore_eos=True)

    for step in range(10):
        traffic(step)
        fake.step()
    rare = fake.submit(tokens(3), "rare", max_tokens=4, ignore_eos=True)
    run_until_started(fake, rare, traffic, limit=40)
    fake.finish()


@pytest.mark.parametrize("seed", range(3))
def test_no_mix_of_adapters_starves_anyone(engine: Any, seed: int) -> None:
    """More adapters than the pool holds, skewed traffic, pairs of adapters: every request ends in bounded
    time."""
    draw = random.Random(seed)
    fake = engine(blocks=20, patience=6, max_num_seqs=5, slots=3, blocks_per_tick=3)
    names = [fake.know(f"d{index}", blocks=2 + index % 4) for index in range(7)]
    weights = [40, 20, 10, 5, 2, 1, 1]
    longest = 0
    for step in range(600):
        while len(fake.live) < 12:
            adapters = draw.choices(names, weights, k=draw.choice([0, 1, 1, 1, 2]))
            fake.submit(
                tokens(draw.randint(1, 9), step), *adapters, max_tokens=draw.randint(1, 12), ignore_eos=True
            )
        fake.step()
        longest = max(longest, *(record.steps for record in fake.live.values()))
    assert longest < 300
    fake.finish()
    for record in fake.received.values():
        fake.check_answer(record)
    fake.check_at_rest()


def test_base_rows_take_no_adapter_in_a_mixed_step(engine: Any) -> None:
    """Base and adapter rows shuffled, joining and leaving; the fake device checks each row's own slots."""
    from heddle.lora import segments

    draw = random.Random(3)
    fake = engine(blocks=64)
    names = [fake.know(f"d{index}") for index in range(3)]
    for step in range(300):
        if len(fake.live) < 8:
            adapters = draw.choice([[], [names[0]], [], [names[1]], [names[2], names[0]]])
            fake.submit(tokens(draw.randint(1, 6), step), *adapters, max_tokens=draw.randint(1, 9))
        fake.step()
        if fake.last_plan is None:
            continue
        lora = segments.build(fake.last_plan.chunks)
        row = 0
        for chunk in fake.last_plan.chunks:
            end = row + len(chunk.token_ids)
            pairs = [] if lora is None else [pair for pair in lora.pair_rows.tolist() if row <= pair < end]
            assert len(pairs) == len(chunk.token_ids) * len(chunk.sequence.adapters)
            row = end
    fake.finish()
    for record in fake.received.values():
        fake.check_answer(record)


def test_a_long_queue_of_cold_adapters_does_not_hold_up_the_base(engine: Any) -> None:
    fake = engine(blocks=24, host_bytes=8, max_num_seqs=4)
    cold = []
    for index in range(60):
        fake.know(f"d{index}", blocks=4)
        cold.append(fake.submit(tokens(3), f"d{index}", max_tokens=6, ignore_eos=True))
    base = fake.submit(tokens(3), max_tokens=6, ignore_eos=True)
    for _ in range(60):
        fake.step()
    assert fake.received[base].ends == 1
    fake.finish()
    for key in cold:
        fake.check_answer(fake.received[key])
