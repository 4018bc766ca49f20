"""Sequences that are aborted, and those that a failed step or row ends: everything is freed, others go on."""

from __future__ import annotations

from typing import Any

import pytest
from heddle.core.messages import EngineError
from heddle.core.scheduling.plan import StepPlan, StepResult

from .simulation import tokens


@pytest.mark.parametrize("after", range(9))
def test_an_abort_frees_everything_at_any_moment(engine: Any, after: int) -> None:
    """Queued, waiting for its adapter, in the middle of its prompt, decoding."""
    fake = engine(max_num_batched_tokens=4, max_num_seqs=2, blocks_per_tick=1)
    fake.know("a", blocks=3)
    doomed = [fake.submit(tokens(11), "a", max_tokens=9, ignore_eos=True, group=1) for _ in range(4)]
    kept = fake.submit(tokens(7), max_tokens=9, ignore_eos=True)
    for _ in range(after):
        fake.step()
    fake.abort(*doomed)
    fake.scheduler.check_integrity()
    assert fake.residency.state("a").in_use == 0
    fake.finish()
    assert all(fake.received[key].ends == 0 for key in doomed)
    fake.check_answer(fake.received[kept])
    fake.check_at_rest()


def test_an_abort_between_plan_and_result_is_safe(engine: Any) -> None:
    """What the step writes to stays taken until it is over; its result for the aborted one is dropped."""
    fake = engine(blocks=8)
    fake.know("a")
    gone = fake.submit(tokens(9), "a", max_tokens=9, ignore_eos=True)
    stays = fake.submit(tokens(5), max_tokens=9, ignore_eos=True)
    fake.step()
    fake.step()

    def between(plan: StepPlan) -> None:
        assert {chunk.sequence.key for chunk in plan.chunks} == {gone, stays}
        free = set(fake.pool.free_blocks())
        fake.abort(gone)
        fake.abort(gone, 12345)
        assert set(fake.pool.free_blocks()) == free
        with pytest.raises(Exception, match="held by 1"):
            fake.residency.evict("a")
        fake.scheduler.check_integrity()

    fake.step(between=between)
    fake.scheduler.check_integrity()
    assert fake.residency.state("a").in_use == 0
    fake.residency.evict("a")
    fake.finish()
    fake.check_answer(fake.received[stays])
    fake.check_at_rest()


def test_five_hundred_clients_leave_and_nothing_is_left(engine: Any) -> None:
    fake = engine(blocks=40, max_num_batched_tokens=16)
    fake.know("a")
    for round_ in range(500):
        keys = [fake.submit(tokens(5 + round_ % 9), "a", group=round_, max_tokens=8) for _ in range(4)]
        for _ in range(round_ % 5):
            fake.step()
        fake.abort(*keys)
        assert fake.counts()["used"] == 0
        assert fake.residency.state("a").in_use == 0
    fake.check_at_rest()


def test_a_failed_step_ends_the_sequences_it_touched_and_no_other(engine: Any) -> None:
    fake = engine(max_num_seqs=2)
    keys = [fake.submit(tokens(5), max_tokens=6, ignore_eos=True) for _ in range(3)]
    fake.step()
    fake.step(fail=True)
    for key in keys[:2]:
        record = fake.received[key]
        assert (record.ends, record.finish_reason, record.error.code) == (1, "error", "internal_error")
        assert record.error.message == "the device failed"
    fake.finish()
    fake.check_answer(fake.received[keys[2]])
    fake.check_at_rest()


def test_a_row_that_cannot_be_sampled_ends_its_sequence_alone(engine: Any) -> None:
    fake = engine()
    keys = [fake.submit(tokens(5), max_tokens=6, ignore_eos=True) for _ in range(2)]
    plan = fake.scheduler.schedule()
    result = fake.device.execute(plan, ())
    bad = result.sampled.pop(keys[0])
    assert bad is not None
    error = EngineError("internal_error", "no finite logits")
    fake.take(fake.scheduler.update(plan, StepResult(result.sampled, errors={keys[0]: error})))
    assert fake.received[keys[0]].error.message == "no finite logits"
    fake.finish()
    fake.check_answer(fake.received[keys[1]])
    fake.check_at_rest()
