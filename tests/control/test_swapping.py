"""Sequences that give way go to host memory and come back as they were, where that is cheaper."""

from __future__ import annotations

from typing import Any

import pytest
from heddle.core.scheduling.restore_cost import RestoreCost
from heddle.core.scheduling.swap_space import SwapSpace

from .simulation import tokens


def two_that_do_not_fit(fake: Any, *adapters: str, **params: Any) -> list[int]:
    """An older and a younger sequence in a pool of 12 blocks of 4, stepped until the younger has given way."""
    common = {"max_tokens": 30, "ignore_eos": True, **params}
    keys = [fake.submit(tokens(7, start=20 * index), *adapters, **common) for index in range(2)]
    for _ in range(100):
        fake.step()
        fake.scheduler.check_integrity()
        if fake.scheduler.stats()["preemptions"]:
            return keys
    raise AssertionError("there was no pressure")


def check(fake: Any, keys: list[int]) -> None:
    fake.finish()
    for key in keys:
        fake.check_answer(fake.received[key])
    fake.check_at_rest()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_answers_over_a_preemption_are_those_of_a_quiet_run(
    engine: Any, caching: bool, choices: int, preemption: str
) -> None:
    """24 requests in a pool for three: tokens, log-probabilities, reasons and usage; no token is sent twice."""
    quiet = engine(blocks=800, prefix_caching=caching, max_num_seqs=1)
    tight = engine(blocks=18, prefix_caching=caching, preemption=preemption, swap_slots=500)
    for fake in (quiet, tight):
        fake.know("a", blocks=1)
        for index in range(24):
            for choice in range(choices):
                fake.submit(
                    tokens(9, start=8 * index),
                    *(["a"] if index % 2 else []),
                    group=index,
                    tenant=f"tenant {index}",
                    max_tokens=22,
                    seed=7 + choice,
                    prompt_logprobs=0 if index == 3 else None,
                    stop_token_ids=(17,),
                )
        fake.finish()
        fake.check_at_rest()
    stats = tight.scheduler.stats()
    assert quiet.scheduler.stats()["preemptions"] == 0
    assert stats["preemptions"] > 5
    assert stats["swap_outs"] == stats["swap_ins"] == (stats["preemptions"] if preemption == "swap" else 0)
    for key, record in quiet.received.items():
        other = tight.received[key]
        tight.check_answer(other)
        assert (record.token_ids, record.logprobs) == (other.token_ids, other.logprobs)
        assert (record.finish_reason, record.stop_token_id) == (other.finish_reason, other.stop_token_id)
        assert record.prompt_logprobs == other.prompt_logprobs
        if choices == 1:
            assert record.cached_tokens == other.cached_tokens == 0, "its own blocks are no hit"


def test_a_swapped_sequence_computes_no_token_twice(engine: Any) -> None:
    fake = engine(blocks=12, swap_slots=50)
    keys = two_that_do_not_fit(fake)
    check(fake, keys)
    assert fake.scheduler.stats()["swap_ins"] > 0
    assert sum(fake.rows_per_step) == 2 * (7 + 30 - 1)


def test_blocks_still_cached_are_not_copied_in_again(engine: Any) -> None:
    fake = engine(blocks=12, swap_slots=50)
    keys = two_that_do_not_fit(fake)
    out = fake.scheduler.stats()["swap_out_bytes"]
    fake.abort(keys[0])  # before it has taken more than one of them
    fake.step()
    stats = fake.scheduler.stats()
    assert stats["swap_ins"] == 1
    assert 0 < stats["swap_in_bytes"] < out / 2
    assert stats["swap_used_bytes"] == 0
    check(fake, keys[1:])


def test_full_swap_space_means_computing_again(engine: Any) -> None:
    fake = engine(blocks=12, swap_slots=3)
    keys = two_that_do_not_fit(fake)
    assert fake.scheduler.stats()["swap_outs"] == 0
    check(fake, keys)


def test_no_swap_space_means_computing_again(engine: Any) -> None:
    fake = engine(blocks=12, swap_slots=0)
    keys = two_that_do_not_fit(fake)
    assert fake.scheduler.stats()["swap_outs"] == 0
    check(fake, keys)


def test_who_leaves_while_swapped_out_gives_its_swap_space_back(engine: Any) -> None:
    fake = engine(blocks=12, swap_slots=50)
    keys = two_that_do_not_fit(fake)
    assert fake.scheduler.stats()["swap_used_bytes"] > 0
    fake.abort(keys[1])
    assert fake.scheduler.stats()["swap_used_bytes"] == 0
    fake.scheduler.check_integrity()
    check(fake, keys[:1])


def test_who_leaves_while_it_is_being_copied_out_gives_its_swap_space_back(engine: Any) -> None:
    fake = engine(blocks=12, swap_slots=50)
    keys = [fake.submit(tokens(7, start=20 * i), max_tokens=30, ignore_eos=True) for i in range(2)]

    def between(plan: Any) -> None:
        if plan.swap_out:
            fake.abort(keys[1])
            assert fake.scheduler.stats()["swap_used_bytes"] == 0

    while keys[1] in fake.live:
        assert fake.step(between=between)
        fake.scheduler.check_integrity()
    check(fake, keys[:1])


def test_a_step_that_fails_while_it_copies_out_loses_no_sequence_that_gave_way(engine: Any) -> None:
    """Nobody knows how far its copies came: it is computed again."""
    fake = engine(blocks=12, swap_slots=50)
    keys = [fake.submit(tokens(7, start=20 * i), max_tokens=30, ignore_eos=True) for i in range(2)]
    while not fake.scheduler.stats()["preemptions"]:
        plan = fake.scheduler.schedule()
        assert plan is not None
        if plan.swap_out:
            fake.device.poison(fake.pool.free_blocks())
            fake.take(fake.scheduler.fail(plan, "the device failed"))
        else:
            fake.take(fake.scheduler.update(plan, fake.device.execute(plan, fake.pool.free_blocks())))
    assert fake.received[keys[0]].finish_reason == "error"
    assert fake.scheduler.stats()["swap_used_bytes"] == 0
    check(fake, keys[1:])
    assert fake.scheduler.stats()["swap_ins"] == 0


def test_a_swapped_sequence_ends_on_the_weights_it_began_with(engine: Any) -> None:
    """Its adapter's name gets new weights, and the old version is removed, while it lies in swap space."""
    fake = engine(blocks=14, swap_slots=50)
    fake.know("old", blocks=1)
    keys = two_that_do_not_fit(fake, "old")
    fake.know("new", blocks=1)
    fake.residency.forget("old")
    assert fake.submit(tokens(5), "old", max_tokens=1).code == "model_not_found"
    keys.append(fake.submit(tokens(7, start=20), "new", max_tokens=4, ignore_eos=True))
    check(fake, keys)
    assert fake.scheduler.stats()["swap_ins"] > 0
    assert "old" not in fake.residency._adapters


def test_a_prompt_swapped_out_half_way_goes_on_where_it_was(engine: Any) -> None:
    """Log-probabilities of its prompt are not collected twice either."""
    fake = engine(blocks=12, max_num_batched_tokens=3, swap_slots=50)
    old = fake.submit(tokens(4), max_tokens=35, ignore_eos=True)
    for _ in range(12):
        fake.step()
    scored = fake.submit(tokens(26, start=20), max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    while not fake.scheduler.stats()["preemptions"]:
        assert fake.step()
    assert fake.received[scored].outputs == 0
    check(fake, [old, scored])
    assert fake.scheduler.stats()["swap_ins"] > 0
    assert sum(fake.rows_per_step) == 4 + 35 - 1 + 26 + 2 - 1


# ------------------------------------------------------------------ which of the two


def test_the_cheaper_way_back_is_taken() -> None:
    """10 blocks of 1 MB out and in at 1 GB/s are 20 ms; so are 8 tokens at 400 a second."""
    cost = RestoreCost(block_bytes=10**6, copy_rate=1e9, row_rate=400.0)
    assert not cost.swapping_pays(blocks=10, tokens=7)
    assert cost.swapping_pays(blocks=10, tokens=9)
    assert cost.token_cost == pytest.approx(2.5), "2.5 ms to compute a token, 1 ms to copy a block"


def test_estimates_follow_what_steps_take() -> None:
    cost = RestoreCost.at_start(block_bytes=10**6, weights=10**8, on_cpu=True)
    for _ in range(50):
        cost.observe_copies(blocks=20, seconds=0.01)
        cost.observe_step(rows=200, of_prompts=190, seconds=0.1)
        cost.observe_step(rows=8, of_prompts=0, seconds=0.1)  # a step of decodes tells nothing
    assert cost.copy_rate == pytest.approx(2e9, rel=0.01)
    assert cost.row_rate == pytest.approx(2000, rel=0.01)


@pytest.mark.parametrize(("shared", "blocks", "way"), [(False, 20, "swap"), (True, 14, "recompute")])
def test_tokens_that_others_hold_too_need_not_be_computed_again(
    engine: Any, shared: bool, blocks: int, way: str
) -> None:
    """Copies cost as much as 0.87 of the tokens: with most of these in blocks that stay, computing is cheaper."""
    fake = engine(blocks=blocks, swap_slots=50, preemption="auto")
    fake.submit(tokens(32), max_tokens=16, ignore_eos=True, tenant="a")
    while not fake.received[0].outputs:
        fake.step()
    other = tokens(32) if shared else tokens(32, start=33)
    fake.submit(other, max_tokens=16, ignore_eos=True, tenant="a", seed=1)
    while not fake.scheduler.stats()["preemptions"]:
        assert fake.step()
    assert fake.scheduler.stats()["swap_outs"] == (way == "swap")
    check(fake, list(fake.received))


# ------------------------------------------------------------------ the ledger of slots


def test_low_slots_are_used_again_before_fresh_ones_are_touched() -> None:
    space = SwapSpace(5)
    first, second = space.take(2), space.take(2)
    assert (first, second) == ([0, 1], [2, 3])
    assert space.take(2) is None
    space.give([1])
    assert space.take(2) == [1, 4]
    assert space.used == 5
    with pytest.raises(AssertionError):
        space.check_integrity([[0, 1], [2, 3]])
    space.check_integrity([[0, 1], [2, 3], [4]])
