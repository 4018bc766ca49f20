"""Partly filled last blocks: found by who begins alike, copied by who writes, never shared by two writers."""

from __future__ import annotations

from typing import Any

import pytest

from .simulation import tokens


def run(fake: Any, prompt: list[int], *adapters: Any, **params: Any) -> Any:
    """One request alone, checked against the model: what came of it."""
    key = fake.submit(prompt, *adapters, **{"max_tokens": 4, "ignore_eos": True, **params})
    assert isinstance(key, int), key
    fake.finish()
    fake.check_answer(fake.received[key])
    return fake.received[key]


@pytest.mark.parametrize(
    ("follower", "cached"),
    [
        ("the same", 19),
        ("the prompt cut short", 17),
        ("the prompt and other words", 20),
        ("the prompt and half of the answer", 22),
        ("the next turn of a conversation", 23),
        ("parting within the first block", 9),
        ("parting within the last block", 18),
        ("nothing but the begin token", 0),
    ],
)
def test_the_last_partly_filled_block_is_found_up_to_where_texts_part(
    engine: Any, follower: str, cached: int
) -> None:
    """20 tokens of prompt and 4 of answer in blocks of 16; the last one was chosen and never computed."""
    fake = engine(block_size=16, blocks=16)
    prompt = tokens(20)
    first = run(fake, prompt)
    assert first.cached_tokens == 0
    text = {
        "the same": prompt,
        "the prompt cut short": prompt[:18],
        "the prompt and other words": [*prompt, *tokens(9, start=44)],
        "the prompt and half of the answer": [*prompt, *first.token_ids[:2], 60, 60],
        "the next turn of a conversation": [*prompt, *first.token_ids, *tokens(9)],
        "parting within the first block": [*prompt[:9], 60, *prompt],
        "parting within the last block": [*prompt[:18], 60, 60],
        "nothing but the begin token": [*prompt[:1], *tokens(20, start=33)],
    }[follower]
    assert run(fake, text).cached_tokens == cached
    assert run(fake, text).cached_tokens == len(text) - 1
    fake.check_at_rest()


def test_parts_are_found_by_the_same_weights_and_tenant_alone(engine: Any) -> None:
    fake = engine(block_size=16, blocks=32)
    fake.know("a")
    fake.know("b")
    assert run(fake, tokens(12), "a").cached_tokens == 0
    assert run(fake, tokens(12)).cached_tokens == 0
    assert run(fake, tokens(12), "b").cached_tokens == 0
    assert run(fake, tokens(12), ("a", 0.5)).cached_tokens == 0
    assert run(fake, tokens(12), "a", tenant="other").cached_tokens == 0
    assert run(fake, tokens(12), "a").cached_tokens == 11


def test_two_that_begin_with_the_same_part_write_to_blocks_of_their_own(engine: Any) -> None:
    """And the part they began with still serves a third."""
    fake = engine(block_size=16, blocks=16)
    run(fake, tokens(10))
    keys = [fake.submit([*tokens(9), 50 + index], max_tokens=9, ignore_eos=True) for index in range(2)]
    fake.step()
    first, second = fake.last_plan.chunks
    assert first.block_table != second.block_table
    assert [len(chunk.token_ids) for chunk in (first, second)] == [1, 1]
    assert len(fake.last_plan.copies) == 2
    fake.finish()
    for key in keys:
        fake.check_answer(fake.received[key])
    assert run(fake, tokens(10)).cached_tokens == 9


def test_the_choices_of_one_request_compute_its_prompt_once_to_the_last_part(engine: Any) -> None:
    """Each takes the whole prompt but its last row, which it needs for its own first token; the full blocks
    are one for all, and the part is copied when a choice writes to it, which is at once."""
    fake = engine(block_size=16, blocks=32)
    keys = [fake.submit(tokens(43), group=7, max_tokens=6, seed=seed, ignore_eos=True) for seed in range(4)]
    fake.step()
    assert [len(chunk.token_ids) for chunk in fake.last_plan.chunks] == [43]
    fake.step()
    leader, *others = fake.last_plan.chunks
    assert [(chunk.start, len(chunk.token_ids)) for chunk in others] == [(42, 1)] * 3
    assert {chunk.block_table[:2] for chunk in others} == {leader.block_table[:2]}
    assert sorted(fake.last_plan.copies) == sorted(
        (leader.block_table[2], chunk.block_table[2]) for chunk in others
    )
    assert fake.counts()["used"] == 2 + 4
    fake.finish()
    for key in keys:
        fake.check_answer(fake.received[key])
    assert [fake.received[key].cached_tokens for key in keys] == [0, 42, 42, 42]
    fake.check_at_rest()


def test_what_is_to_be_copied_is_not_given_away_in_the_same_step(engine: Any) -> None:
    """The idle part is the only block that could be evicted for the sequences that start with it."""
    fake = engine(block_size=4, blocks=8)
    run(fake, tokens(6))
    for index in range(6):
        key = fake.submit(tokens(5 + index % 3, start=index % 2), max_tokens=9, ignore_eos=True)
        fake.submit([*tokens(6), 40 + index], max_tokens=5, ignore_eos=True)
        fake.submit(tokens(9, start=13 * index), max_tokens=5, ignore_eos=True)
        fake.finish()
        for record in list(fake.received.values())[key:]:
            fake.check_answer(record)
    assert fake.device.copies > 0


def test_a_sequence_that_needs_the_whole_pool_does_without_the_copy(engine: Any) -> None:
    """To hold the part beside a table as large as the pool would never be possible."""
    fake = engine(block_size=4, blocks=4)
    run(fake, tokens(11), max_tokens=1)
    assert run(fake, tokens(10), max_tokens=6).cached_tokens == 9
    assert run(fake, [*tokens(2), *tokens(11, start=40)], max_tokens=3).cached_tokens == 0
    fake.check_at_rest()


def test_a_failed_step_leaves_nothing_to_be_found_that_it_was_to_copy(engine: Any) -> None:
    fake = engine(block_size=16, blocks=16)
    run(fake, tokens(10))
    key = fake.submit([*tokens(9), 50, 51], max_tokens=3, ignore_eos=True)
    fake.step(fail=True)
    assert fake.received[key].finish_reason == "error"
    assert run(fake, [*tokens(9), 50, 51]).cached_tokens == 9
    assert run(fake, [*tokens(9), 50, 51]).cached_tokens == 10


def test_an_abort_in_mid_copy_leaves_every_block_where_it_belongs(engine: Any) -> None:
    fake = engine(block_size=16, blocks=16)
    run(fake, tokens(10))
    key = fake.submit(tokens(10), max_tokens=3, ignore_eos=True)

    def between(plan: Any) -> None:
        assert plan.copies
        fake.abort(key)
        fake.scheduler.check_integrity()

    fake.step(between=between)
    fake.scheduler.check_integrity()
    assert fake.counts()["used"] == 0
    assert run(fake, tokens(10)).cached_tokens == 9


# ------------------------------------------------------------------ whose adapter is gone


def test_prefixes_of_an_adapter_that_is_gone_make_room_first(engine: Any) -> None:
    """However often they were used; the base's, used once, stay."""
    fake = engine(block_size=4, blocks=16)
    fake.know("a", blocks=1)
    for _ in range(5):
        run(fake, tokens(13), "a")
    run(fake, tokens(13))
    fake.residency.forget("a")
    fake.scheduler.check_integrity()
    run(fake, tokens(25, start=30), max_tokens=1)  # 7 blocks: some have to go
    assert run(fake, tokens(13)).cached_tokens == 12


def test_an_adapter_that_still_has_a_holder_is_not_gone(engine: Any) -> None:
    fake = engine(block_size=4, blocks=32)
    fake.know("a", blocks=1)
    run(fake, tokens(13), "a")
    key = fake.submit(tokens(9), "a", max_tokens=9, ignore_eos=True)
    fake.step()
    fake.residency.forget("a")
    fake.scheduler.check_integrity()
    assert fake.pool._gone == set()
    fake.finish()
    fake.check_answer(fake.received[key])
    assert fake.pool._gone == {"a"}
    fake.check_at_rest()


def test_weights_that_come_back_find_their_prefixes_warm(engine: Any) -> None:
    """Removed and registered again, before anything needed the room."""
    fake = engine(block_size=4, blocks=64)
    fake.know("a", blocks=1)
    run(fake, tokens(13), "a")
    fake.residency.forget("a")
    assert fake.pool._gone == {"a"}
    fake.know("a", blocks=1)
    assert fake.pool._gone == set()
    assert run(fake, tokens(13), "a").cached_tokens == 12
    fake.check_at_rest()


def test_a_name_rolled_back_to_its_older_version_finds_its_prefixes_warm(engine: Any) -> None:
    """A version that is not current is known still; only another digest answers in its name meanwhile."""
    fake = engine(block_size=4, blocks=64)
    fake.know("sha256:one", blocks=1)
    assert run(fake, tokens(13), "sha256:one").cached_tokens == 0
    fake.know("sha256:two", blocks=1)
    assert run(fake, tokens(13), "sha256:two").cached_tokens == 0
    assert run(fake, tokens(13), "sha256:one").cached_tokens == 12
