"""Service between tenants: the Virtual Token Counter's bound, and what it must not cost."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from heddle.core.messages import TenantShare

from .simulation import INPUT, OUTPUT, Simulation, Traffic, tokens, widest

LARGE = {"blocks": 64, "max_num_seqs": 8}
SMALL = {"blocks": 32, "max_num_seqs": 6, "max_num_batched_tokens": 16}
SHORT, LONG_PROMPTS = Traffic(), Traffic((20, 40), (1, 6))
TALKATIVE, LARGER = Traffic((1, 5), (20, 60)), Traffic((20, 40), (1, 20), weight=3.0)
SCENES: dict[str, tuple[dict[str, Any], dict[str, Traffic]]] = {
    "long and short prompts": (LARGE, {"a": SHORT, "b": LONG_PROMPTS}),
    "weights 1 and 3": (LARGE, {"a": SHORT, "b": Traffic((20, 40), (1, 6), weight=3.0)}),
    "long answers": (LARGE, {"a": TALKATIVE, "b": LONG_PROMPTS}),
    "three, preempted": (SMALL, {"a": TALKATIVE, "b": LARGER, "c": Traffic((1, 60), (1, 30))}),
    "three, swapped": (SMALL | {"swap_slots": 200}, {"a": TALKATIVE, "b": LARGER, "c": SHORT}),
    "cold adapters": (SMALL, {"a": Traffic((1, 8), (20, 30), adapters=8), "b": LARGER}),
    "all adapters cold": (SMALL, {"a": Traffic((1, 8), adapters=8), "b": Traffic((1, 20), adapters=5)}),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("scene", SCENES)
def test_two_tenants_that_always_wait_are_served_alike_over_any_interval(
    engine: Any, scene: str, seed: int
) -> None:
    settings, traffic = SCENES[scene]
    simulation = Simulation(engine(**settings), traffic, seed)
    history = simulation.run(500)
    for one, other in combinations(traffic, 2):
        assert widest(history, one, other) <= simulation.bound
        assert history[-1][one] > simulation.bound, "the bound says nothing about so little service"
    stats = simulation.fake.scheduler.stats()
    assert (stats["preemptions"] > 0) == (scene not in ("long and short prompts", "weights 1 and 3"))
    assert (stats["swap_outs"] > 10) == ("swap_slots" in settings)
    assert (stats["adapter_loads"] > 20) == ("adapters" in scene)


def test_without_counters_service_goes_to_who_asks_for_more(engine: Any) -> None:
    """First come, first served breaks the bound that the test above holds tenants to."""
    settings, traffic = SCENES["weights 1 and 3"]
    simulation = Simulation(engine(**settings, fair=False), traffic, seed=0)
    assert widest(simulation.run(500), "a", "b") > simulation.bound


def test_being_away_earns_nothing(engine: Any) -> None:
    """Two are served for a long time; a third comes, and is not paid back what it did not ask for."""
    settings = {"blocks": 16, "max_num_seqs": 8, "prefix_caching": False}
    simulation = Simulation(engine(**settings), {"a": SHORT, "b": SHORT, "c": SHORT}, seed=1)
    third = simulation.traffic.pop("c")
    simulation.run(400)
    missed = simulation.service["a"]
    assert missed > 4 * simulation.bound
    simulation.traffic["c"] = third
    before = dict(simulation.service)
    history = simulation.run(400)
    for name in ("a", "b"):
        since = [{one: given[one] - before.get(one, 0) for one in given} for given in history]
        assert widest(since, "c", name) <= simulation.bound


def test_who_comes_to_an_empty_queue_is_lifted_to_who_left_it_last(engine: Any) -> None:
    fake = engine()
    fake.submit(tokens(9), tenant="early", max_tokens=20, ignore_eos=True)
    for _ in range(5):
        fake.step()
    fake.submit(tokens(3, 30), tenant="late", max_tokens=1)
    counters = {name: account.counter for name, account in fake.scheduler.tenants._accounts.items()}
    assert counters == {"early": 9 + 2 * 5, "late": 9 + 2 * 5}
    fake.finish()


def test_a_returning_tenant_is_lifted_to_the_least_of_those_that_wait(engine: Any) -> None:
    fake = engine(max_num_seqs=1)
    charges = {"much": 300.0, "little": 200.0, "back": 0.0, "ahead": 250.0}
    accounts = {}
    for name, counter in charges.items():
        key = fake.submit([1], tenant=name, max_tokens=0)
        accounts[name] = fake.scheduler.tenants.account(fake.scheduler._live[key])
        fake.abort(key)
        accounts[name].counter = counter
    accounts["back"].counter = 0.0
    for name in ("ahead", "little", "much", "back"):
        fake.submit([1, 2], tenant=name, max_tokens=1)
    counters = {name: account.counter for name, account in accounts.items()}
    assert counters == {"ahead": 250, "little": 250, "much": 300, "back": 250}
    fake.finish()


def test_what_is_charged(engine: Any) -> None:
    """Prompt tokens computed, not those found; two for each generated; blocks of adapters once; over the weight."""
    fake = engine(block_size=4)
    fake.scheduler.tenants.set(TenantShare(name="t", weight=2.0))
    account = None

    def units(*adapters: str) -> float:
        nonlocal account
        before = 0.0 if account is None else account.counter
        key = fake.submit(tokens(13), *adapters, tenant="t", max_tokens=3, ignore_eos=True)
        account = fake.scheduler.tenants.account(fake.scheduler._live[key])
        fake.finish()
        return (account.counter - before) * 2.0

    assert units() == 13 + 2 * 3
    assert units() == 1 + 2 * 3, "all but the last token of the prompt lie in the cache"
    fake.know("a", blocks=5)
    block = 1 / fake.scheduler._swapper.cost.token_cost
    assert units("a") == pytest.approx(13 + 2 * 3 + 5 * block)
    assert units("a") == pytest.approx(1 + 2 * 3), "it is there"


def test_who_gave_way_is_not_charged_again(engine: Any) -> None:
    fake = engine(blocks=12)
    keys = [fake.submit(tokens(7, 12 * i), tenant="t", max_tokens=30, ignore_eos=True) for i in range(3)]
    account = fake.scheduler.tenants.account(fake.scheduler._live[keys[0]])
    fake.finish()
    assert fake.scheduler.stats()["preemptions"] > 0
    assert account.counter == 3 * (7 + 2 * 30)


def test_a_step_is_full_whenever_someone_waits_and_there_is_room(engine: Any) -> None:
    traffic = {"a": SHORT, "b": LONG_PROMPTS, "c": TALKATIVE}
    simulation = Simulation(engine(blocks=256, max_num_seqs=6, max_num_batched_tokens=24), traffic, seed=5)
    for _ in range(300):
        simulation.step()
        plan = simulation.fake.last_plan
        assert plan.num_rows == 24 or len(plan.chunks) == 6


def test_what_others_leave_is_anybodys(engine: Any) -> None:
    """Alone a tenant has what it would have without any accounts, whatever its weight and its share."""
    rows = []
    for fair in (True, False):
        fake = engine(blocks=32, max_num_seqs=6, max_num_batched_tokens=24, fair=fair)
        simulation = Simulation(fake, {"a": TALKATIVE}, seed=3)
        fake.scheduler.tenants.set(TenantShare(name="a", weight=0.01, pool_share=0.1))
        fake.scheduler.tenants.set(TenantShare(name="b", weight=100.0))
        simulation.run(200)
        rows.append(list(fake.rows_per_step))
    assert rows[0] == rows[1]


def test_the_order_within_a_tenant_is_by_arrival_whatever_others_do(engine: Any) -> None:
    simulation = Simulation(engine(blocks=256, max_num_seqs=4), {"a": SHORT, "b": LONG_PROMPTS}, seed=2)
    started: list[int] = []
    for _ in range(200):
        simulation.step()
        running = [one for one in simulation.fake.scheduler._running if one.key not in started]
        started += [one.key for one in sorted(running, key=lambda one: one.arrival)]
    for name in ("a", "b"):
        mine = [key for key in started if simulation.fake.received[key].command.tenant == name]
        assert mine == sorted(mine)


def test_a_long_prompt_does_not_hold_up_another_tenants_short_one(engine: Any) -> None:
    """400 tokens at 16 a step take 25 steps; the short one does not wait for them, again and again."""
    waited = []
    for fair in (True, False):
        fake = engine(blocks=200, max_num_batched_tokens=16, prefix_caching=False, fair=fair)
        fake.submit(tokens(400), tenant="long", max_tokens=4)
        fake.step()
        waited.append([])
        for index in range(3):
            short = fake.submit(tokens(10, index), tenant="short", max_tokens=1)
            while short in fake.live:
                fake.step()
            waited[-1].append(fake.received[short].steps)
    assert max(waited[0]) <= 2
    assert waited[1][0] >= 25


def test_two_long_prompts_of_two_tenants_share_the_steps(engine: Any) -> None:
    fake = engine(blocks=400, max_num_batched_tokens=16, prefix_caching=False)
    rows = {"one": 0, "two": 0, "three": 0}
    fake.scheduler.tenants.set(TenantShare(name="three", weight=2.0))
    for name in rows:
        fake.submit(tokens(400), tenant=name, max_tokens=1)
    for _ in range(40):
        fake.step()
        for chunk in fake.last_plan.chunks:
            rows[chunk.sequence.tenant] += len(chunk.token_ids)
    assert rows["one"] == pytest.approx(160, abs=16)
    assert rows["two"] == pytest.approx(160, abs=16)
    assert rows["three"] == pytest.approx(320, abs=16)


def test_input_and_output_weigh_as_in_the_paper() -> None:
    from heddle.core.scheduling import fair_queue

    assert (fair_queue.INPUT_UNITS, fair_queue.OUTPUT_UNITS) == (INPUT, OUTPUT) == (1.0, 2.0)


def test_a_decoding_flood_does_not_let_its_next_prompts_before_a_quiet_one(engine: Any) -> None:
    """What the flood generates counts as well: the quiet tenant's prompt, by far the larger of the two so far, goes
    first in the step in which both have one."""
    fake = engine(blocks=400, max_num_seqs=9, max_num_batched_tokens=40, prefix_caching=False)
    for index in range(8):
        fake.submit(tokens(4, index), tenant="loud", max_tokens=60, ignore_eos=True)
    for index in range(3):
        for _ in range(8):
            fake.step()
        fake.submit(tokens(32, index), tenant="loud", max_tokens=1)
        quiet = fake.submit(tokens(32, index), tenant="quiet", max_tokens=1)
        fake.step()
        assert fake.received[quiet].ends == 1
    fake.finish()
