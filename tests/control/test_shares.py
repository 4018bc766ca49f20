"""Slots, blocks and places in the queue between tenants: a quiet one finds its own, whatever others do."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from heddle.core.messages import EngineError, TenantShare
from heddle.core.scheduling.making_way import LEAST_SERVICE

from .simulation import Simulation, Traffic, tokens


def flood(fake: Any, count: int, prompt: int = 4, answer: int = 60, tenant: str = "loud") -> list[int]:
    return [
        fake.submit(tokens(prompt, index), tenant=tenant, seed=index, max_tokens=answer, ignore_eos=True)
        for index in range(count)
    ]


def steps_to_first_token(fake: Any, key: int) -> int:
    record = fake.received[key]
    while not record.outputs:
        assert fake.step()
        fake.scheduler.check_integrity()
    return record.steps


def held(fake: Any, tenant: str) -> int:
    return len(
        {block for one in fake.scheduler._running if one.tenant == tenant for block in one.block_table}
    )


def preempted(fake: Any) -> list[Any]:
    """Every sequence that gives way from now on, with its tokens then."""
    seen: list[Any] = []
    preempt = fake.scheduler._preempt

    def spied(sequence: Any) -> None:
        seen.append((sequence, len(sequence.output_token_ids)))
        preempt(sequence)

    fake.scheduler._preempt = fake.scheduler._admission._preempt = spied
    return seen


# ------------------------------------------------------------------ slots


@pytest.mark.parametrize("swap_slots", [0, 500])
def test_a_quiet_tenant_finds_a_slot_at_once_however_many_another_sends(engine: Any, swap_slots: int) -> None:
    fake = engine(blocks=400, max_num_seqs=8, swap_slots=swap_slots)
    loud = flood(fake, 200)
    for _ in range(10):
        fake.step()
    quiet = []
    for index in range(20):
        quiet.append(fake.submit(tokens(6, index), tenant="quiet", max_tokens=5, ignore_eos=True))
        assert steps_to_first_token(fake, quiet[-1]) == 1
        while quiet[-1] in fake.live:
            assert fake.step()
    assert 0 < fake.scheduler.stats()["preemptions"] <= 20
    assert (fake.scheduler.stats()["swap_outs"] > 0) == (swap_slots > 0)
    fake.finish()
    for key in [*quiet, *loud]:
        fake.check_answer(fake.received[key])


def test_first_come_first_served_lets_the_quiet_one_wait(engine: Any) -> None:
    fake = engine(blocks=400, max_num_seqs=8, fair=False)
    loud = flood(fake, 40)
    fake.step()
    quiet = fake.submit(tokens(6), tenant="quiet", max_tokens=5, ignore_eos=True)
    assert steps_to_first_token(fake, quiet) > 200
    assert all(fake.received[key].outputs for key in loud)
    assert fake.scheduler.stats()["preemptions"] == 0


def test_the_youngest_gives_its_slot_up_and_goes_on_before_those_that_wait(engine: Any) -> None:
    fake = engine(blocks=400, max_num_seqs=4)
    loud = flood(fake, 10)
    for _ in range(5):
        fake.step()
    seen = preempted(fake)
    quiet = fake.submit(tokens(6), tenant="quiet", max_tokens=5, ignore_eos=True)
    fake.step()
    assert [one.key for one, _ in seen] == [loud[3]]
    while quiet in fake.live:
        fake.step()
    fake.step()
    assert [one.key for one in fake.scheduler._running] == loud[:4]


def test_a_tenant_takes_at_most_half_its_share_of_slots_from_others(engine: Any) -> None:
    """Of 8 slots two tenants have 4 each: at the other's cost it has 2, one after the other, as it comes."""
    fake = engine(blocks=400, max_num_seqs=8)
    flood(fake, 40)
    for _ in range(3):
        fake.step()
    running = []
    for index in range(4):
        fake.submit(tokens(6, index), tenant="quiet", max_tokens=40, ignore_eos=True)
        fake.step()
        running.append(sum(one.tenant == "quiet" for one in fake.scheduler._running))
    assert running[:2] == [1, 2]
    assert fake.scheduler.stats()["preemptions"] == 2


def test_a_tenant_within_its_share_gives_nothing_up(engine: Any) -> None:
    """Four slots, four tenants with one each: the fifth waits until one of them has ended."""
    fake = engine(blocks=400, max_num_seqs=4)
    keys = [flood(fake, 1, answer=10, tenant=name)[0] for name in "abcd"]
    fake.step()
    fifth = flood(fake, 1, tenant="e")[0]
    assert steps_to_first_token(fake, fifth) > 8
    assert fake.scheduler.stats()["preemptions"] == 0
    assert not any(key in fake.live for key in keys)


def test_who_gave_way_is_left_in_peace_for_a_while_and_longer_each_time(engine: Any) -> None:
    """Quiet requests without end over one loud tenant: nobody gives way twice within its least service."""
    fake = engine(blocks=400, max_num_seqs=2, max_num_batched_tokens=32)
    loud = flood(fake, 4, answer=200)
    seen = preempted(fake)
    for index in range(400):
        key = fake.submit(tokens(2, index), tenant="quiet", max_tokens=1, ignore_eos=True)
        while key in fake.live:
            assert fake.step()
        fake.step()
        if not any(one in fake.live for one in loud):
            break
    times: dict[int, list[int]] = {}
    for one, at in seen:
        times.setdefault(one.key, []).append(at)
    assert max(map(len, times.values())) >= 3, "nobody was asked again: the test says nothing"
    for had in times.values():
        for number, (before, after) in enumerate(pairwise(had)):
            assert after - before >= LEAST_SERVICE << number
        assert len(had) <= (200 // LEAST_SERVICE).bit_length() + 1
    fake.finish()
    for key in loud:
        fake.check_answer(fake.received[key])


# ------------------------------------------------------------------ blocks


@pytest.mark.parametrize("swap_slots", [0, 500])
def test_a_quiet_tenant_finds_its_share_of_blocks_at_once(engine: Any, swap_slots: int) -> None:
    """Every block is another's; a prompt of less than half of the pool starts in the next step."""
    fake = engine(blocks=40, block_size=4, max_num_seqs=16, max_num_batched_tokens=80, swap_slots=swap_slots)
    loud = flood(fake, 16, prompt=4, answer=40)
    while fake.pool.available > 4:
        fake.step()
    for index in range(3):
        quiet = fake.submit(tokens(60, index), tenant="quiet", max_tokens=8, ignore_eos=True)
        assert steps_to_first_token(fake, quiet) == 1
        while quiet in fake.live:
            assert fake.step()
        fake.check_answer(fake.received[quiet])
        for _ in range(20):
            fake.step()
    fake.finish()
    for key in loud:
        fake.check_answer(fake.received[key])


def test_when_blocks_run_out_the_tenant_over_its_share_gives_way_though_older(engine: Any) -> None:
    fake = engine(blocks=30, block_size=2, max_num_seqs=8)
    loud = flood(fake, 5, prompt=6, answer=30)
    for _ in range(3):
        fake.step()
    seen = preempted(fake)
    quiet = fake.submit(tokens(4), tenant="quiet", max_tokens=20, ignore_eos=True)
    while quiet in fake.live:
        assert fake.step()
    assert {one.tenant for one, _ in seen} == {"loud"}
    assert seen[0][0].key == loud[4], "the youngest of that tenant"
    assert fake.received[quiet].steps == 20, "it was never held up"
    fake.finish()
    for record in fake.received.values():
        fake.check_answer(record)


def test_a_huge_request_neither_starves_nor_stops_the_others(engine: Any) -> None:
    """It needs more than its share of the pool. Others flow in the room that it leaves; in its own tenant's line
    nobody overtakes it."""
    fake = engine(blocks=80, block_size=4, max_num_seqs=16, max_num_batched_tokens=400)
    simulation = Simulation(fake, {"a": Traffic((4, 4), (10, 14)), "b": Traffic((4, 4), (10, 14))}, seed=0)
    simulation.run(30)
    huge = fake.submit(tokens(200), tenant="large", max_tokens=4, ignore_eos=True)
    behind = fake.submit(tokens(4), tenant="large", max_tokens=1)
    started = 0
    while not fake.received[huge].outputs:
        assert not fake.received[behind].outputs
        waiting = {one.key for one in fake.scheduler._queue}
        simulation.step()
        if not fake.received[huge].outputs:
            started += len(waiting - {one.key for one in fake.scheduler._queue})
        assert fake.received[huge].steps < 20
    assert started > 3
    simulation.traffic.clear()
    fake.finish()
    for record in fake.received.values():
        fake.check_answer(record)


def test_two_tenants_whose_requests_each_need_almost_the_whole_pool_all_end(engine: Any) -> None:
    fake = engine(blocks=8, block_size=4)
    keys = [flood(fake, 1, prompt=4, answer=28, tenant=f"t{index % 3}")[0] for index in range(6)]
    fake.finish(limit=2000)
    for key in keys:
        fake.check_answer(fake.received[key])
    assert fake.scheduler.stats()["preemptions"] < 40


# ------------------------------------------------------------------ pool_share


def test_pool_share_bounds_a_tenant_while_others_want_blocks_and_only_then(engine: Any) -> None:
    fake = engine(blocks=40, block_size=4, max_num_seqs=64, max_num_batched_tokens=80, prefix_caching=False)
    fake.scheduler.tenants.set(TenantShare(name="loud", pool_share=0.25))
    loud = flood(fake, 60, prompt=4, answer=12)
    most = 0
    for _ in range(10):
        fake.step()
        most = max(most, held(fake, "loud"))
    assert most > 30, "alone it may have all"
    other = flood(fake, 30, prompt=8, answer=24, tenant="other")
    fake.step()
    steps = several = 0
    while any(one.tenant == "other" for one in fake.scheduler._queue):
        fake.step()
        fake.scheduler.check_integrity()
        loud_ones = sum(one.tenant == "loud" for one in fake.scheduler._running)
        assert held(fake, "loud") <= 10 or loud_ones == 1
        steps += 1
        several += loud_ones > 1
    assert several > steps / 2, "it has its own share"
    most = 0
    while fake.live:
        fake.step()
        most = max(most, held(fake, "loud"))
    assert most > 10, "nobody else wants any more"
    for key in [*loud, *other]:
        fake.check_answer(fake.received[key])


def test_a_request_larger_than_its_tenants_pool_share_is_served_all_the_same(engine: Any) -> None:
    fake = engine(blocks=40, block_size=4, max_num_seqs=8, max_num_batched_tokens=200)
    fake.scheduler.tenants.set(TenantShare(name="capped", pool_share=0.1))
    simulation = Simulation(fake, {"a": Traffic((4, 8), (10, 14))}, seed=0)
    simulation.run(20)
    key = fake.submit(tokens(60), tenant="capped", max_tokens=10, ignore_eos=True)
    while key in fake.live:
        simulation.step()
        assert fake.received[key].steps < 100
    fake.check_answer(fake.received[key])


# ------------------------------------------------------------------ the queue


@pytest.mark.parametrize("fair", [True, False])
def test_a_tenants_limit_of_queued_requests_counts_what_has_not_started(engine: Any, fair: bool) -> None:
    fake = engine(max_num_seqs=2, fair=fair)
    fake.scheduler.tenants.set(TenantShare(name="t", queued_requests=3))
    flood(fake, 2, tenant="t")
    fake.step()
    flood(fake, 3, tenant="t")
    error = fake.submit([1], tenant="t")
    assert isinstance(error, EngineError)
    assert error.code == "rate_limit_exceeded"
    assert error.message == "the limit queued_requests = 3 of this tenant is reached: 3 of its sequences wait"
    assert isinstance(fake.submit([1], tenant="other", max_tokens=1), int)
    fake.scheduler.tenants.set(TenantShare(name="t", queued_requests=4))
    assert isinstance(fake.submit([1], tenant="t", max_tokens=1), int)
    fake.scheduler.tenants.forget("t")
    assert isinstance(fake.submit([1], tenant="t", max_tokens=1), int)
    fake.finish()
    assert isinstance(fake.submit([1], tenant="t", max_tokens=1), int)


def test_who_floods_the_queue_does_not_fill_it_for_others(engine: Any) -> None:
    """Of 12 places two tenants have 6 each: the second finds them, though the first took all 12."""
    fake = engine(max_num_seqs=1, max_queued=12)
    assert sum(isinstance(answer, int) for answer in flood(fake, 30)) == 12
    assert sum(isinstance(answer, int) for answer in flood(fake, 30, tenant="quiet")) == 6
    assert fake.submit([1], tenant="loud").code == fake.submit([1], tenant="quiet").code == "overloaded"
    assert sum(isinstance(answer, int) for answer in flood(fake, 30, tenant="third")) == 4
    assert fake.scheduler.stats()["waiting"] <= 2 * 12


def test_what_a_tenant_has_goes_on_when_it_is_forgotten(engine: Any) -> None:
    fake = engine(max_num_seqs=2)
    fake.scheduler.tenants.set(TenantShare(name="t", weight=5.0))
    keys = flood(fake, 4, tenant="t", answer=8)
    fake.step()
    fake.scheduler.tenants.forget("t")
    fake.scheduler.tenants.forget("nobody")
    fake.scheduler.check_integrity()
    assert fake.scheduler.tenants.account(fake.scheduler._running[0]).weight == 1.0
    fake.finish()
    for key in keys:
        fake.check_answer(fake.received[key])
    assert not fake.scheduler.tenants._accounts


@pytest.mark.parametrize(
    "wrong", [{"weight": 0.0}, {"weight": float("nan")}, {"pool_share": 0.0}, {"pool_share": 1.5}]
)
def test_a_share_that_means_nothing_cannot_be_made(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TenantShare(name="t", **wrong)
