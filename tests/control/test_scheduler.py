"""One step after another: budgets, the order of admission, a plan and its result, counters."""

from __future__ import annotations

from typing import Any

import pytest
from heddle.core.scheduling.plan import StepPlan, StepResult
from heddle.core.scheduling.queue_policy import Fifo

from .simulation import tokens


def sizes(plan: StepPlan) -> list[tuple[int, int]]:
    """(key, rows) of each chunk."""
    return [(chunk.sequence.key, len(chunk.token_ids)) for chunk in plan.chunks]


def plans(fake: Any, count: int) -> list[list[tuple[int, int]]]:
    seen = []
    for _ in range(count):
        fake.step()
        seen.append([] if fake.last_plan is None else sizes(fake.last_plan))
    return seen


def test_decodes_come_first_and_chunks_of_prompts_fill_the_budget(engine: Any) -> None:
    fake = engine(max_num_batched_tokens=8, block_size=4)
    fake.submit(tokens(3), max_tokens=9, ignore_eos=True)
    assert plans(fake, 1) == [[(0, 3)]]
    fake.submit(tokens(17, start=10), max_tokens=4, ignore_eos=True)
    fake.submit(tokens(6, start=40), max_tokens=4, ignore_eos=True)
    assert plans(fake, 4) == [
        [(0, 1), (1, 7)],
        [(0, 1), (1, 7)],
        [(0, 1), (1, 3), (2, 4)],
        [(0, 1), (1, 1), (2, 2)],
    ]
    fake.finish()
    assert max(fake.rows_per_step) == 8
    for key in range(3):
        fake.check_answer(fake.received[key])


def test_decodes_take_no_room_from_prompts_that_have_their_own(engine: Any) -> None:
    fake = engine(max_num_batched_tokens=8 + 4, max_prompt_tokens=8, max_num_seqs=4, block_size=4)
    for index in range(4):
        fake.submit(tokens(4, start=10 * index), max_tokens=9, ignore_eos=True)
    assert plans(fake, 3) == [
        [(0, 4), (1, 4)],
        [(0, 1), (1, 1), (2, 4), (3, 4)],
        [(0, 1), (1, 1), (2, 1), (3, 1)],
    ]


def test_new_requests_join_and_leave_while_others_run(engine: Any) -> None:
    fake = engine(max_num_seqs=3)
    for index in range(7):
        fake.submit(tokens(2 + index), max_tokens=2 + index % 3, ignore_eos=True)
    widths = []
    while fake.scheduler.has_work:
        fake.step()
        widths.append(len(fake.last_plan.chunks))
        stats = fake.scheduler.stats()
        assert stats["running"] <= 3
    assert widths[:5] == [3] * 5
    for record in fake.received.values():
        fake.check_answer(record)
    fake.check_at_rest()


def test_requests_are_admitted_in_their_order(engine: Any) -> None:
    fake = engine(max_num_seqs=1)
    keys = [fake.submit(tokens(2), max_tokens=2, ignore_eos=True) for _ in range(5)]
    order = []
    while fake.scheduler.has_work:
        live = set(fake.live)
        fake.step()
        order += sorted(live - set(fake.live))
    assert order == keys


def test_a_large_request_is_not_overtaken_by_small_ones_for_blocks(engine: Any) -> None:
    fake = engine(blocks=12)
    for index in range(3):
        fake.submit(tokens(4, index), max_tokens=6 + 3 * index, ignore_eos=True)
    fake.step()
    large = fake.submit(tokens(36, 9), max_tokens=4, ignore_eos=True)
    for step in range(40):
        fake.submit(tokens(4, step), max_tokens=8, ignore_eos=True)
        fake.step()
        if fake.received[large].outputs:
            break
    assert step < 16
    fake.finish()
    for record in fake.received.values():
        fake.check_answer(record)


def test_another_order_of_admission_drops_in(engine: Any) -> None:
    class Shortest(Fifo):
        """The shortest prompt first; keeps account of the service to each tenant."""

        def __init__(self) -> None:
            super().__init__()
            self.charged: dict[str, int] = {}

        def __iter__(self) -> Any:
            return iter(sorted(super().__iter__(), key=lambda sequence: len(sequence.prompt_token_ids)))

        def charge(self, sequence: Any, units: float) -> None:
            self.charged[sequence.tenant] = self.charged.get(sequence.tenant, 0) + units

    fake = engine(max_num_seqs=1)
    policy = Shortest()
    fake.scheduler._queue = fake.scheduler._admission._queue = policy
    long = fake.submit(tokens(9), tenant="a", max_tokens=1)
    short = fake.submit(tokens(3), tenant="b", max_tokens=3, ignore_eos=True)
    fake.step()
    assert long in fake.live
    assert fake.received[short].outputs == 1
    fake.finish()
    assert policy.charged == {"a": 9 + 2 * 1, "b": 3 + 2 * 3}


def test_a_plan_must_be_answered_before_the_next(engine: Any) -> None:
    fake = engine()
    fake.submit(tokens(3), max_tokens=2)
    plan = fake.scheduler.schedule()
    with pytest.raises(AssertionError):
        fake.scheduler.schedule()
    fake.take(fake.scheduler.update(plan, fake.device.execute(plan, ())))
    with pytest.raises(AssertionError):
        fake.scheduler.update(plan, StepResult({}))


def test_counters_tell_what_was_done(engine: Any) -> None:
    fake = engine()
    for _ in range(2):
        fake.submit(tokens(10), max_tokens=5, ignore_eos=True)
        fake.finish()
    stats = fake.scheduler.stats()
    assert stats["prompt_tokens"] == 20
    assert stats["generated_tokens"] == 10
    assert stats["cached_tokens"] == 9
    assert stats["blocks_total"] == 32 == sum(fake.counts().values())
    assert stats["running"] == stats["waiting"] == stats["preemptions"] == 0
