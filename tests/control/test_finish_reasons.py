"""How a sequence ends by itself: end and stop tokens, the least and the most tokens, the room there is."""

from __future__ import annotations

from typing import Any

import pytest

from .simulation import tokens


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
