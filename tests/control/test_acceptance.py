"""What is refused on submission, with which code and field, and what is taken all the same."""

from __future__ import annotations

from typing import Any

from heddle.core.messages import Generate
from heddle.core.sampling_params import SamplingParams

from .simulation import tokens


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
