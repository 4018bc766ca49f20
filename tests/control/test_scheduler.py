"""One step after another: budgets, ends, refusals, aborts, failures."""

from __future__ import annotations

from typing import Any

import pytest
from heddle.core.messages import EngineError
from heddle.core.scheduling.plan import StepPlan, StepResult
from heddle.core.scheduling.queue_policy import Fifo


def tokens(count: int, start: int = 1) -> list[int]:
    return [(start + index) % 60 + 1 for index in range(count)]


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


# ---------------------------------------------------------------------- ends


def test_end_tokens_stop_unless_they_are_to_be_ignored(engine: Any) -> None:
    fake = engine(blocks=400, max_num_seqs=64)
    stopped = ignored = 0
    for start in range(60):
        fake.submit(tokens(5, start), max_tokens=12)
        fake.submit(tokens(5, start), max_tokens=12, ignore_eos=True)
    fake.finish()
    for key in range(0, 120, 2):
        record, ignoring = fake.received[key], fake.received[key + 1]
        fake.check_answer(record)
        fake.check_answer(ignoring)
        assert len(ignoring.token_ids) == 12
        assert ignoring.finish_reason == "length"
        if record.finish_reason == "stop":
            assert record.token_ids[-1] == 0 == record.stop_token_id
            stopped += 1
            ignored += 0 in ignoring.token_ids
    assert stopped > 3
    assert ignored >= stopped


def test_the_users_own_stop_tokens_hold_even_when_end_tokens_do_not(engine: Any) -> None:
    fake = engine()
    whole, _ = fake.expected(fake.received[fake.submit(tokens(4), max_tokens=12, ignore_eos=True)])
    key = fake.submit(tokens(4), max_tokens=12, ignore_eos=True, stop_token_ids=(whole[3],))
    fake.finish()
    record = fake.received[key]
    end = whole.index(whole[3]) + 1
    assert record.token_ids == whole[:end]
    assert (record.finish_reason, record.stop_token_id) == ("stop", whole[3])


def test_nothing_stops_an_answer_before_its_least_length(engine: Any) -> None:
    fake = engine()
    whole, _ = fake.expected(fake.received[fake.submit(tokens(4), max_tokens=12, ignore_eos=True)])
    first = fake.submit(
        tokens(4), max_tokens=12, min_tokens=5, ignore_eos=True, stop_token_ids=tuple(whole[:4])
    )
    fake.finish()
    fake.check_answer(fake.received[first])
    assert len(fake.tokens(first)) >= 5


def test_a_stop_token_at_the_last_place_is_a_stop(engine: Any) -> None:
    fake = engine()
    whole, _ = fake.expected(fake.received[fake.submit(tokens(4), max_tokens=3, ignore_eos=True)])
    assert whole.index(whole[2]) == 2
    key = fake.submit(tokens(4), max_tokens=3, ignore_eos=True, stop_token_ids=(whole[2],))
    fake.finish()
    assert fake.received[key].finish_reason == "stop"


@pytest.mark.parametrize("length", [1, 2, 9])
def test_no_new_token_is_asked_for(engine: Any, length: int) -> None:
    """max_tokens 0: the prompt's log-probabilities, or nothing at all."""
    fake = engine(max_num_batched_tokens=4)
    scored = fake.submit(tokens(length), max_tokens=0, prompt_logprobs=1)
    plain = fake.submit(tokens(length), max_tokens=0)
    fake.finish()
    for key in (scored, plain):
        record = fake.received[key]
        assert (record.token_ids, record.finish_reason, record.outputs) == ([], "length", 1)
        fake.check_answer(record)
    assert len(fake.received[scored].prompt_logprobs) == length
    assert fake.received[plain].prompt_logprobs is None
    fake.check_at_rest()


def test_prompt_log_probabilities_are_whole_over_chunks(engine: Any) -> None:
    fake = engine(max_num_batched_tokens=3)
    key = fake.submit(tokens(14), max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    fake.finish()
    fake.check_answer(fake.received[key])


def test_without_a_limit_an_answer_has_the_room_there_is(engine: Any) -> None:
    fake = engine(blocks=8, block_size=4, max_model_len=64)
    by_pool = fake.submit(tokens(5), max_tokens=None, ignore_eos=True)
    fake.finish()
    assert len(fake.tokens(by_pool)) == 8 * 4 - 5
    fake = engine(blocks=32, block_size=4, max_model_len=64)
    by_context = fake.submit(tokens(63), max_tokens=None, ignore_eos=True)
    fake.finish()
    assert len(fake.tokens(by_context)) == 1
    assert fake.received[by_context].finish_reason == "length"


# ---------------------------------------------------------------------- refusals


def test_what_exceeds_the_context_is_refused_with_both_numbers(engine: Any) -> None:
    fake = engine(max_model_len=64)
    assert isinstance(fake.submit(tokens(63), max_tokens=None), int)
    for length in (64, 65):
        error = fake.submit(tokens(length), max_tokens=None)
        assert (error.code, error.param) == ("context_length_exceeded", "prompt")
        assert str(length) in error.message
        assert "64" in error.message
    error = fake.submit(tokens(60), max_tokens=10)
    assert (error.code, error.param) == ("context_length_exceeded", "max_tokens")
    assert isinstance(fake.submit(tokens(60), max_tokens=4), int)
    assert isinstance(fake.submit(tokens(64), max_tokens=0), int)
    fake.finish()


def test_what_can_never_fit_the_pool_is_refused_at_once_and_blocks_nobody(engine: Any) -> None:
    fake = engine(blocks=8, block_size=16, max_model_len=4096)
    too_long = fake.submit(tokens(200), max_tokens=4)
    assert (too_long.code, too_long.param) == ("capacity_exceeded", "prompt")
    assert "128" in too_long.message
    growing = fake.submit(tokens(100), max_tokens=100)
    assert (growing.code, growing.param) == ("capacity_exceeded", "max_tokens")
    small = fake.submit(tokens(10), max_tokens=5, ignore_eos=True)
    exact = fake.submit(tokens(100), max_tokens=28, ignore_eos=True)
    fake.finish()
    fake.check_answer(fake.received[small])
    fake.check_answer(fake.received[exact])
    fake.know("a", blocks=3)
    fake.know("pinned", blocks=2, pinned=True)
    assert fake.submit(tokens(40), "a", max_tokens=9).code == "capacity_exceeded"  # 3 blocks are left
    assert isinstance(fake.submit(tokens(40), "a", max_tokens=8, ignore_eos=True), int)
    fake.finish()


def test_a_default_limit_gives_way_to_the_room_there_is(engine: Any) -> None:
    from heddle.core.messages import Generate
    from heddle.core.sampling_params import SamplingParams

    fake = engine(blocks=8, block_size=4, max_model_len=30)
    params = SamplingParams(max_tokens=16, ignore_eos=True, seed=0)
    for length, room in ((10, 16), (20, 10), (29, 1)):
        command = Generate(key=length, group=0, prompt_token_ids=tokens(length), params=params, shorten=True)
        assert fake.scheduler._acceptance.accept(command, 0).max_tokens == room
    command = Generate(key=1, group=0, prompt_token_ids=tokens(30), params=params, shorten=True)
    assert fake.scheduler.submit(command).code == "context_length_exceeded"


def test_other_refusals(engine: Any) -> None:
    fake = engine(max_queued=2)
    assert (fake.submit([]).code, fake.submit([]).param) == ("invalid_request", "prompt")
    first = fake.submit([1, 2], max_tokens=2)
    assert fake.submit([1, 2], key=first).code == "invalid_request"
    fake.submit([1, 2], max_tokens=2)
    assert fake.submit([1, 2], max_tokens=2).code == "overloaded"
    fake.finish()
    assert isinstance(fake.submit([1, 2], max_tokens=2), int)
    fake.finish()


def test_a_cold_adapter_can_be_refused_and_is_warm_at_the_next_try(engine: Any) -> None:
    fake = engine()
    fake.know("a")
    error = fake.submit([1, 2], "a", max_tokens=2, on_cold="reject")
    assert error.code == "adapter_cold"
    assert fake.residency.state("a").in_use == 0
    fake.finish()
    key = fake.submit([1, 2], "a", max_tokens=2, on_cold="reject")
    assert isinstance(key, int)
    fake.finish()
    fake.check_answer(fake.received[key])


# ---------------------------------------------------------------------- aborts and failures


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
