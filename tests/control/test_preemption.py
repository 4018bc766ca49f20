"""Blocks run out: whoever gives way gets the same answer later, and nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest

from .simulation import tokens


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("choices", [1, 3])
def test_answers_over_a_preemption_are_those_of_a_quiet_run(engine: Any, caching: bool, choices: int) -> None:
    """Six requests in a pool for two: tokens, log-probabilities, reasons, usage; no token is sent twice."""
    quiet = engine(blocks=400, prefix_caching=caching)
    tight = engine(blocks=9, prefix_caching=caching)
    for fake in (quiet, tight):
        fake.know("a", blocks=1)
        for index in range(6):
            for choice in range(choices):
                fake.submit(
                    tokens(9, start=8 * index),
                    *(["a"] if index % 2 else []),
                    group=index,
                    max_tokens=14,
                    seed=7 + choice,
                    prompt_logprobs=0 if index == 3 else None,
                    stop_token_ids=(17, 18, 19),
                )
        fake.finish()
        fake.check_at_rest()
    assert quiet.scheduler.stats()["preemptions"] == 0
    assert tight.scheduler.stats()["preemptions"] > 0
    for key, record in quiet.received.items():
        other = tight.received[key]
        tight.check_answer(other)
        assert (record.token_ids, record.logprobs) == (other.token_ids, other.logprobs)
        assert (record.finish_reason, record.stop_token_id) == (other.finish_reason, other.stop_token_id)
        assert record.prompt_logprobs == other.prompt_logprobs


def test_prompt_log_probabilities_start_again_after_a_preemption_in_the_prompt(engine: Any) -> None:
    fake = engine(blocks=12, max_num_batched_tokens=3)
    old = fake.submit(tokens(4), max_tokens=35, ignore_eos=True)
    for _ in range(12):
        fake.step()
    scored = fake.submit(tokens(26, start=20), max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    while not fake.scheduler.stats()["preemptions"]:
        assert fake.step()
    assert fake.received[scored].outputs == 0
    fake.finish()
    for key in (old, scored):
        fake.check_answer(fake.received[key])


def test_the_youngest_gives_way_and_the_oldest_never_does(engine: Any) -> None:
    fake = engine(blocks=12)
    keys = [fake.submit(tokens(7, start=12 * index), max_tokens=30, ignore_eos=True) for index in range(4)]
    oldest = fake.received[keys[0]]
    while keys[0] in fake.live:
        before = oldest.outputs
        fake.step()
        assert oldest.outputs == before + 1
    assert fake.scheduler.stats()["preemptions"] > 0
    fake.finish()
    for key in keys:
        fake.check_answer(fake.received[key])


def test_two_that_each_need_almost_the_whole_pool_both_end(engine: Any) -> None:
    fake = engine(blocks=8, block_size=4)
    keys = [fake.submit(tokens(4, start=20 * index), max_tokens=28, ignore_eos=True) for index in range(2)]
    fake.finish(limit=400)
    for key in keys:
        fake.check_answer(fake.received[key])


def test_eight_choices_that_each_need_the_whole_pool_all_end(engine: Any) -> None:
    """Each alone fits just so: they take turns, and nobody gives way for ever."""
    fake = engine(blocks=8, block_size=16, max_num_batched_tokens=256)
    keys = [fake.submit(tokens(100), group=1, seed=seed, max_tokens=28, ignore_eos=True) for seed in range(8)]
    small = fake.submit(tokens(10, start=30), max_tokens=5, ignore_eos=True)
    fake.finish(limit=2000)
    for key in (*keys, small):
        fake.check_answer(fake.received[key])


def test_a_full_pool_with_four_growing_sequences_loses_no_block(engine: Any) -> None:
    """The counts are right after every step of many rounds, and nothing is used at rest."""
    fake = engine(blocks=8, block_size=2, max_num_batched_tokens=32)
    for round_ in range(1000):
        for index in range(4):
            fake.submit(tokens(4, start=round_ + 9 * index), max_tokens=4, ignore_eos=True)
        while fake.scheduler.has_work:
            assert fake.step()
            counts = fake.counts()
            assert counts["used"] <= 8
        assert fake.counts()["used"] == 0
        fake.scheduler.check_integrity()
    assert fake.scheduler.stats()["preemptions"] > 500
    for record in fake.received.values():
        fake.check_answer(record)


def test_a_growing_sequence_takes_the_place_of_an_adapter_that_only_queued_ones_want(engine: Any) -> None:
    """The last resort before it would itself be stuck: the adapter comes back for who waits for it."""
    fake = engine(blocks=12, max_num_seqs=1)
    fake.know("a", blocks=3)
    fake.residency.load("a")
    fake.finish()
    growing = fake.submit(tokens(5), max_tokens=40, ignore_eos=True)  # 12 blocks in the end
    waiting = fake.submit(tokens(5), "a", max_tokens=4, ignore_eos=True)
    fake.finish()
    assert fake.scheduler.stats()["preemptions"] == 0
    assert fake.scheduler.stats()["adapter_loads"] == 2
    for key in (growing, waiting):
        fake.check_answer(fake.received[key])


def test_a_preempted_sequence_keeps_its_adapter_from_loads(engine: Any) -> None:
    fake = engine(blocks=14, patience=1000)
    for name in ("mine", "other"):
        fake.know(name, blocks=2)
    old = fake.submit(tokens(5), max_tokens=36, ignore_eos=True)
    young = fake.submit(tokens(5, start=30), "mine", max_tokens=36, ignore_eos=True)
    while not fake.scheduler.stats()["preemptions"]:
        assert fake.step()
    assert fake.residency.state("mine").residency == "device"
    fake.residency.load("other")
    for _ in range(8):
        fake.step()
        assert fake.received[young].ends == 0
    assert fake.residency.state("mine").in_use == 1
    fake.finish()
    for key in (old, young):
        fake.check_answer(fake.received[key])


def test_every_order_of_block_ids_gives_the_same_answers(engine: Any) -> None:
    answers = []
    for order in (range(13), [5, 0, 12, 7, 1, 9, 3, 11, 2, 8, 4, 10, 6]):
        fake = engine(blocks=13, order=list(order))
        for index in range(6):
            fake.submit(tokens(9, start=8 * index), max_tokens=14, ignore_eos=True)
        fake.finish()
        answers.append([record.token_ids for record in fake.received.values()])
    assert answers[0] == answers[1]
