"""Adapters on their way: loads, places, evictions, pins, leases."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from heddle.core.block_pool import BlockPool
from heddle.lora.adapter_memory import AdapterState, ResidencyError
from heddle.lora.arena import Arena
from heddle.lora.residency import Residency


def load(fake: Any, digest: str) -> None:
    """Ask for it and step until it came, or did not."""
    fake.residency.load(digest)
    for _ in range(100):
        fake.step()
        for ended, refusal in fake.residency.drain_loads():
            if ended == digest:
                if refusal is not None:
                    raise refusal
                fake.scheduler.check_integrity()
                return
    raise AssertionError("the load did not end")


def code_of(call: Any, *arguments: Any) -> str:
    with pytest.raises(ResidencyError) as refusal:
        call(*arguments)
    assert str(refusal.value)
    return refusal.value.code


def where(fake: Any, digest: str) -> str:
    residency: str = fake.residency.state(digest).residency
    return residency


def test_load_evict_and_load_again(engine: Any) -> None:
    fake = engine()
    fake.know("a", blocks=3)
    assert fake.residency.state("a") == AdapterState(digest="a", residency="disk")
    load(fake, "a")
    assert fake.residency.state("a") == AdapterState(digest="a", residency="device", blocks=3)
    assert fake.counts()["adapters"] == 3
    fake.residency.evict("a")
    assert fake.residency.state("a") == AdapterState(digest="a", residency="host")
    assert fake.counts()["adapters"] == 0
    load(fake, "a")
    fake.residency.evict("a", "disk")
    assert where(fake, "a") == "disk"
    load(fake, "a")
    assert fake.device.host_loads == ["a", "a"]
    load(fake, "a")  # there already: answered at once
    assert fake.residency.stats()["adapter_loads"] == 3
    assert fake.residency.stats()["adapter_evictions"] == 2


def test_the_file_is_read_once_however_long_it_is_used(engine: Any) -> None:
    """Files that vanish after they were loaded change nothing, not even over an eviction to the host."""
    fake = engine()
    fake.know("a")
    load(fake, "a")
    del fake.device.files["a"]
    fake.device.check_adapter = lambda *_: None
    for _ in range(3):
        key = fake.submit([1, 2, 3], "a", max_tokens=5, ignore_eos=True)
        fake.finish()
        fake.check_answer(fake.received[key])
        fake.residency.evict("a")
        load(fake, "a")
    assert fake.device.host_loads == ["a"]
    assert fake.device.measured == ["a"]


def test_many_requests_for_one_cold_adapter_cause_one_load(engine: Any) -> None:
    fake = engine(manual_loads=True)
    fake.know("a")
    keys = [fake.submit([index + 1], "a", max_tokens=2) for index in range(10)]
    fake.residency.load("a")
    for _ in range(5):
        assert not fake.step()
    assert len(fake.executor.waiting) == 1
    fake.manual_loads = False
    fake.finish()
    assert fake.device.host_loads == ["a"]
    assert fake.residency.stats()["adapter_loads"] == 1
    for key in keys:
        fake.check_answer(fake.received[key])


def test_pages_are_copied_some_each_step_while_others_run(engine: Any) -> None:
    fake = engine(blocks=64, blocks_per_tick=2)
    fake.know("big", blocks=11)
    base = fake.submit([1, 2], max_tokens=30, ignore_eos=True)
    cold = fake.submit([1, 2], "big", max_tokens=2, ignore_eos=True)
    steps = 0
    while fake.received[cold].outputs == 0:
        assert fake.step()
        steps += 1
        assert fake.received[base].outputs == steps  # not one step was lost to the load
    assert steps == 1 + 6  # placed in the first, copied in six ticks, computed after the last
    fake.finish()
    fake.check_answer(fake.received[base])


def test_an_adapter_in_use_is_not_evicted(engine: Any) -> None:
    fake = engine()
    fake.know("a")
    key = fake.submit([1, 2], "a", max_tokens=5, ignore_eos=True)
    assert code_of(fake.residency.evict, "a") == "adapter_in_use"
    fake.step()
    assert code_of(fake.residency.evict, "a", "disk") == "adapter_in_use"
    assert fake.residency.state("a").in_use == 1
    fake.abort(key)
    assert fake.residency.state("a").in_use == 0
    fake.residency.evict("a", "disk")
    fake.check_at_rest()


def test_evicting_while_a_load_is_under_way_ends_the_load(engine: Any) -> None:
    fake = engine(manual_loads=True, blocks_per_tick=1)
    fake.know("a", blocks=3)
    fake.residency.load("a")
    fake.residency.evict("a", "disk")
    [(digest, refusal)] = fake.residency.drain_loads()
    assert (digest, refusal.code) == ("a", "adapter_cold")
    fake.run_loads()  # what comes now is thrown away
    fake.step()
    assert where(fake, "a") == "disk"
    fake.residency.load("a")
    fake.run_loads()
    fake.step()
    fake.step()  # one page of three is there
    assert fake.residency.state("a").loading
    fake.residency.evict("a")
    assert where(fake, "a") == "host"
    assert fake.counts()["adapters"] == 0
    assert not fake.residency.busy
    fake.scheduler.check_integrity()


def test_unknown_and_removed_adapters_are_refused(engine: Any) -> None:
    fake = engine()
    for call, arguments in (
        (fake.residency.load, ("x",)),
        (fake.residency.evict, ("x",)),
        (fake.residency.pin, ("x", True)),
        (fake.residency.state, ("x",)),
    ):
        assert code_of(call, *arguments) == "adapter_not_found"
    fake.residency.forget("x")
    assert fake.submit([1], "x").code == "model_not_found"
    fake.know("a")
    fake.residency.forget("a")
    assert code_of(fake.residency.load, "a") == "adapter_not_found"
    assert fake.submit([1], "a").code == "model_not_found"


def test_a_removed_adapter_serves_who_holds_it_and_then_leaves_nothing(engine: Any) -> None:
    fake = engine()
    fake.know("a", blocks=4)
    key = fake.submit([1, 2], "a", max_tokens=6, ignore_eos=True)
    fake.step()
    fake.residency.forget("a")
    assert fake.submit([1], "a").code == "model_not_found"
    fake.finish()
    fake.check_answer(fake.received[key])
    assert fake.counts()["adapters"] == 0
    assert fake.residency.stats()["host_copy_bytes"] == 0
    assert fake.residency.drain_changes()[-1] == AdapterState(digest="a", residency="disk")
    assert not fake.residency._adapters


def test_two_hundred_adapters_come_and_go_without_a_trace(engine: Any) -> None:
    fake = engine(blocks=16, slots=4, rows=32)
    before = (fake.counts()["adapters"], fake.residency.stats())
    for index in range(200):
        digest = fake.know(f"d{index}", blocks=1 + index % 3, rows=1 + index % 5)
        key = fake.submit([1, 2, 3], digest, max_tokens=2)
        fake.finish()
        fake.check_answer(fake.received[key])
        fake.residency.forget(digest)
    after = fake.residency.stats()
    assert after["adapter_loads"] == after["adapter_evictions"] == 200
    gauges = ("host_copy_bytes", "adapter_slots_used", "adapter_rows_used")
    assert (fake.counts()["adapters"], [after[name] for name in gauges]) == (
        before[0],
        [before[1][name] for name in gauges],
    )
    assert not fake.residency._adapters
    fake.residency.drain_changes()
    assert not fake.residency._told


def test_a_broken_file_fails_those_who_wait_for_it_and_nobody_else(engine: Any) -> None:
    fake = engine(manual_loads=True)
    fake.know("good")
    fake.know("bad", corrupt=True)
    waiting = [fake.submit([1], "bad", max_tokens=3), fake.submit([1], "good", "bad", max_tokens=3)]
    healthy = [fake.submit([1], "good", max_tokens=9), fake.submit([2], max_tokens=9)]
    fake.manual_loads = False
    fake.finish()
    for key in waiting:
        record = fake.received[key]
        assert (record.ends, record.finish_reason, record.error.code) == (1, "error", "adapter_failed")
        assert "the bytes do not match the digest" in record.error.message
    for key in healthy:
        fake.check_answer(fake.received[key])
    assert fake.submit([1], "bad").code == "adapter_failed"
    assert code_of(fake.residency.load, "bad") == "adapter_failed"
    assert "bytes do not match" in fake.residency.state("bad").error
    fake.know("bad")  # registered again, whole this time
    assert fake.residency.state("bad").error is None
    key = fake.submit([1], "bad", max_tokens=3)
    fake.finish()
    fake.check_answer(fake.received[key])
    fake.check_at_rest()


def test_nothing_is_said_to_who_left_before_the_news_of_a_broken_file(engine: Any) -> None:
    fake = engine()
    fake.know("bad", corrupt=True)
    other = fake.submit([1], max_tokens=3)
    key = fake.submit([1], "bad", max_tokens=3)
    fake.step(between=lambda _: fake.abort(key))  # the step's own answers come with the news
    assert fake.received[key].ends == 0
    fake.finish()
    fake.check_answer(fake.received[other])


def test_a_load_call_hears_of_a_broken_file(engine: Any) -> None:
    fake = engine()
    fake.know("bad", corrupt=True)
    with pytest.raises(ResidencyError, match="bytes do not match") as refusal:
        load(fake, "bad")
    assert refusal.value.code == "adapter_failed"
    assert not fake.scheduler.has_work


def test_a_missing_file_is_an_error_without_the_server_s_paths(engine: Any) -> None:
    fake = engine()
    fake.know("/srv/blobs/gone", unreadable=True)
    error = fake.submit([1], "/srv/blobs/gone")
    assert error.code == "adapter_failed"
    assert error.message.endswith("could not be read: No such file or directory")


def test_pins_take_at_most_half_of_the_pool(engine: Any) -> None:
    fake = engine(blocks=20)
    for index in range(4):
        fake.know(f"p{index}", blocks=5)
    fake.residency.pin("p0", True)
    fake.residency.pin("p1", True)
    assert code_of(fake.residency.pin, "p2", True) == "pin_limit"
    fake.know("p3", blocks=5, pinned=True)  # on the way in: left out, and said so
    assert not fake.residency.state("p3").pinned
    fake.residency.pin("p0", False)
    fake.residency.pin("p2", True)
    assert [fake.residency.state(f"p{index}").pinned for index in range(4)] == [False, True, True, False]


def test_pins_take_at_most_half_of_the_table_arena(engine: Any) -> None:
    fake = engine(blocks=64, slots=4, rows=16)
    fake.know("tall", blocks=1, rows=9)
    assert code_of(fake.residency.pin, "tall", True) == "pin_limit"
    for index in range(3):
        fake.know(f"p{index}", blocks=1, rows=1)
    fake.residency.pin("p0", True)
    fake.residency.pin("p1", True)
    assert code_of(fake.residency.pin, "p2", True) == "pin_limit"


def test_a_pinned_adapter_stays_under_pressure_and_an_idle_one_goes(engine: Any) -> None:
    fake = engine(blocks=12)
    fake.know("pinned", blocks=3, pinned=True)
    fake.know("idle", blocks=3)
    load(fake, "pinned")
    load(fake, "idle")
    key = fake.submit(list(range(1, 30)), max_tokens=7, ignore_eos=True)  # 9 blocks: all but the pinned ones
    fake.finish()
    fake.check_answer(fake.received[key])
    assert where(fake, "pinned") == "device"
    assert where(fake, "idle") == "host"


def test_a_pin_is_refused_where_an_accepted_request_was_promised_the_room(engine: Any) -> None:
    fake = engine(blocks=12)
    fake.know("a", blocks=3)
    key = fake.submit([1, 2, 3], max_tokens=40, ignore_eos=True)  # 11 of 12 blocks in the end
    fake.step()
    assert code_of(fake.residency.pin, "a", True) == "pin_limit"
    fake.finish()
    fake.check_answer(fake.received[key])
    fake.residency.pin("a", True)
    assert fake.submit([1, 2, 3], max_tokens=40).code == "capacity_exceeded"


def test_a_pin_shortens_an_answer_that_came_without_a_limit(engine: Any) -> None:
    """It was promised its prompt and one token; the rest is what there is."""
    fake = engine(blocks=12)
    fake.know("a", blocks=5)
    key = fake.submit([1, 2, 3], max_tokens=None, ignore_eos=True)
    for _ in range(10):
        fake.step()
    fake.residency.pin("a", True)
    load(fake, "a")
    fake.finish()
    record = fake.received[key]
    assert record.finish_reason == "length"
    assert len(record.token_ids) == 7 * 4 - 3 + 1  # seven blocks, and the token chosen from the last of them
    fake.check_answer(record)


def test_a_preempted_answer_without_a_limit_ends_where_a_pin_left_it_no_room(engine: Any) -> None:
    fake = engine(blocks=12)
    fake.know("a", blocks=6)
    first = fake.submit([7, 8, 9], max_tokens=30, ignore_eos=True)
    second = fake.submit(list(range(1, 17)), max_tokens=None, ignore_eos=True)
    while not fake.scheduler.stats()["preemptions"]:
        assert fake.step()
    had = len(fake.tokens(second))
    assert 16 + had > 6 * 4  # more than what the pin leaves
    fake.abort(first)
    fake.residency.pin("a", True)
    fake.finish()
    assert fake.received[second].finish_reason == "length"
    assert len(fake.tokens(second)) == had
    fake.check_answer(fake.received[second])
    fake.check_at_rest()


def test_only_what_changed_is_reported_and_once(engine: Any) -> None:
    fake = engine()
    fake.know("a")
    fake.know("b")
    assert [state.digest for state in fake.residency.drain_changes()] == ["a", "b"]
    assert fake.residency.drain_changes() == []
    key = fake.submit([1], "a", max_tokens=1)
    assert fake.residency.drain_changes() == [
        AdapterState(digest="a", residency="disk", loading=True, in_use=1)
    ]
    fake.finish()
    assert fake.received[key].ends == 1
    assert fake.residency.drain_changes() == [AdapterState(digest="a", residency="device", blocks=2)]
    fake.residency.know("a", "a")
    fake.residency.pin("b", False)
    assert fake.residency.drain_changes() == []


def test_host_copies_keep_to_their_budget(engine: Any) -> None:
    fake = engine(blocks=64, host_bytes=5)  # a page is a byte here
    for index in range(4):
        fake.know(f"d{index}", blocks=2)
        load(fake, f"d{index}")
        assert fake.residency.stats()["host_copy_bytes"] <= 5
    for index in range(4):
        fake.residency.evict(f"d{index}")
    assert [where(fake, f"d{index}") for index in range(4)] == ["disk", "disk", "host", "host"]
    fake.know("large", blocks=9)
    load(fake, "large")  # more than the whole budget: on its way only
    assert fake.residency.stats()["host_copy_bytes"] <= 5


def test_cold_requests_beyond_the_host_budget_take_turns(engine: Any) -> None:
    """They are loaded for those who go first; no copy is thrown away and read again in a circle."""
    fake = engine(blocks=40, host_bytes=4, max_num_seqs=2)
    keys = []
    for index in range(12):
        fake.know(f"d{index}", blocks=3)
        keys.append(fake.submit([1, 2], f"d{index}", max_tokens=3, ignore_eos=True))
    fake.finish()
    for key in keys:
        fake.check_answer(fake.received[key])
    assert sorted(fake.device.host_loads) == sorted(f"d{index}" for index in range(12))


def test_no_more_is_loaded_at_a_time_than_host_memory_holds(engine: Any) -> None:
    fake = engine(blocks=40, host_bytes=7, manual_loads=True)
    for index in range(6):
        fake.know(f"d{index}", blocks=3)
        fake.submit([1, 2], f"d{index}", max_tokens=3, ignore_eos=True)
    for left in (6, 5, 4, 3):
        fake.step()
        assert len(fake.executor.waiting) == 2
        assert fake.residency.stats()["host_copy_bytes"] <= 7
        fake.executor.run()
        fake.step()  # its pages go to the device; then its copy may go
        fake.step()
        assert len([record for record in fake.live.values() if not record.outputs]) == left - 1
    fake.manual_loads = False
    fake.finish()


def test_two_adapters_of_one_request_that_exceed_host_memory_still_come(engine: Any) -> None:
    fake = engine(blocks=40, host_bytes=4)
    fake.know("a", blocks=3)
    fake.know("b", blocks=3)
    key = fake.submit([1, 2], "a", "b", max_tokens=3)
    fake.finish()
    fake.check_answer(fake.received[key])
    assert fake.residency.stats()["host_copy_bytes"] <= 4


def test_a_copy_that_a_request_waits_for_is_not_dropped_for_a_later_one(engine: Any) -> None:
    fake = engine(blocks=12, host_bytes=4, patience=1000)
    running = fake.submit([1, 2, 3], max_tokens=37, ignore_eos=True)
    for _ in range(30):
        fake.step()
    fake.know("early", blocks=6)
    early = fake.submit([1, 2], "early", max_tokens=3)
    fake.step()
    assert where(fake, "early") == "host"
    fake.know("late", blocks=1)
    late = fake.submit([1, 2], "late", max_tokens=3)
    fake.step()
    assert where(fake, "early") == "host"
    fake.finish()
    for key in (running, early, late):
        fake.check_answer(fake.received[key])
    assert fake.device.host_loads == ["early", "late"]


def test_a_load_does_not_take_the_place_of_what_a_queued_request_waits_with(engine: Any) -> None:
    fake = engine(blocks=12, max_num_seqs=1, patience=1000)
    fake.know("mine", blocks=3)
    fake.know("other", blocks=6)
    load(fake, "mine")
    running = fake.submit([1, 2, 3], max_tokens=21, ignore_eos=True)
    queued = fake.submit([1, 2], "mine", max_tokens=3)
    for _ in range(10):
        fake.step()
    fake.residency.load("other")  # 5 blocks are left: with those of "mine" it would fit
    for _ in range(8):
        fake.step()
        assert where(fake, "mine") == "device"
    fake.finish()
    assert fake.residency.drain_loads() == [("other", None)]
    for key in (running, queued):
        fake.check_answer(fake.received[key])


def test_of_two_adapters_that_queued_requests_want_the_pinned_one_stays(engine: Any) -> None:
    """Also where it is used less and would be the first to go."""
    fake = engine(blocks=16, max_num_seqs=1)
    fake.know("pinned", blocks=4, pinned=True)
    fake.know("popular", blocks=4)
    load(fake, "pinned")
    load(fake, "popular")
    keys = [fake.submit(list(range(1, 20)), max_tokens=21, ignore_eos=True)]  # 10 blocks in the end
    keys.append(fake.submit([1, 2], "pinned", max_tokens=3))
    keys += [fake.submit([1, 2, index], "popular", max_tokens=3) for index in range(5)]
    while keys[0] in fake.live:
        fake.step()
        assert where(fake, "pinned") == "device"
    assert where(fake, "popular") == "host"
    fake.finish()
    for key in keys:
        fake.check_answer(fake.received[key])


def test_a_load_that_finds_no_room_waits_until_others_are_done(engine: Any) -> None:
    fake = engine(blocks=10)
    fake.know("a", blocks=6)
    keys = [fake.submit([1, 2, 3], max_tokens=17, ignore_eos=True) for _ in range(2)]
    for _ in range(12):
        fake.step()
    fake.residency.load("a")
    fake.step()
    assert fake.residency.drain_loads() == []
    fake.finish()
    assert fake.residency.drain_loads() == [("a", None)]
    assert where(fake, "a") == "device"
    for key in keys:
        fake.check_answer(fake.received[key])


def test_a_load_is_not_put_off_for_ever_by_traffic(engine: Any) -> None:
    fake = engine(blocks=12, patience=8, max_num_seqs=4)
    fake.know("a", blocks=8)
    fake.residency.load("a")
    ended: list[Any] = []
    for step in range(100):
        while len(fake.live) < 6:
            fake.submit([step % 50 + 1, 2, 3], max_tokens=9, ignore_eos=True)
        fake.step()
        ended += fake.residency.drain_loads()
        if ended:
            break
    assert ended == [("a", None)]
    fake.finish()


def test_an_old_load_and_a_queued_request_do_not_push_each_other_out_for_ever(engine: Any) -> None:
    """Slots for two beside the pinned one: one is wanted and popular, the other they both need."""
    fake = engine(slots=3, blocks_per_tick=1, patience=2)
    for name, blocks in (("pinned", 1), ("popular", 1), ("b", 4), ("c", 4), ("e", 1)):
        fake.know(name, blocks=blocks, pinned=name == "pinned")
    load(fake, "pinned")
    keys = [fake.submit([1, index], "popular", max_tokens=2) for index in range(9)]
    fake.finish()
    fake.residency.load("b")
    keys += [fake.submit([1, 2], "c", max_tokens=2), fake.submit([1, 2], "popular", "e", max_tokens=2)]
    fake.finish(limit=100)
    assert fake.residency.drain_loads() == [("b", None)]
    for key in keys:
        fake.check_answer(fake.received[key])


def test_a_load_ends_where_a_pin_has_left_it_no_room(engine: Any) -> None:
    fake = engine(blocks=10, manual_loads=True)
    fake.know("a", blocks=6)
    fake.know("b", blocks=5)
    fake.residency.load("a")
    fake.residency.pin("b", True)
    [(digest, refusal)] = fake.residency.drain_loads()
    assert (digest, refusal.code) == ("a", "capacity_exceeded")
    fake.manual_loads = False
    fake.finish()


def test_what_does_not_fit_the_pool_or_the_arena_is_refused(engine: Any) -> None:
    fake = engine(blocks=10, slots=2, rows=8)
    fake.know("wide", blocks=11)
    fake.know("tall", blocks=1, rows=9)
    for digest in ("wide", "tall"):
        assert code_of(fake.residency.load, digest) == "capacity_exceeded"
        assert fake.submit([1], digest).code == "capacity_exceeded"
    names = [fake.know(f"d{index}", blocks=1, rows=2) for index in range(3)]
    assert fake.submit([1], *names).code == "capacity_exceeded"  # three adapters, two slots
    assert isinstance(fake.submit([1], *names[:2], max_tokens=1), int)
    fake.finish()


def test_scattered_rows_are_moved_together_for_a_larger_adapter(engine: Any) -> None:
    fake = engine(blocks=64, rows=12)
    for index in range(4):
        fake.know(f"d{index}", blocks=1, rows=3)
        load(fake, f"d{index}")
    fake.residency.evict("d0")
    fake.residency.evict("d2")
    keys = [fake.submit([1], digest, max_tokens=20, ignore_eos=True) for digest in ("d1", "d3")]
    fake.step()
    fake.know("large", blocks=1, rows=6)
    keys.append(fake.submit([1], "large", max_tokens=2, ignore_eos=True))
    fake.finish()  # every step checks every row's tables
    assert fake.device.moves == 2
    for key in keys:
        fake.check_answer(fake.received[key])


def test_rows_are_moved_also_while_an_adapter_is_on_its_way(engine: Any) -> None:
    """One whose pages are still being copied has a range, but nothing in it yet."""
    fake = engine(blocks=64, rows=12, blocks_per_tick=1)
    for index in range(3):
        fake.know(f"d{index}", blocks=1, rows=3)
        load(fake, f"d{index}")
    fake.know("slow", blocks=6, rows=3)
    keys = [fake.submit([1], "slow", max_tokens=2), fake.submit([1], "d1", max_tokens=20, ignore_eos=True)]
    fake.step()
    fake.residency.evict("d0")
    fake.residency.evict("d2")
    fake.know("large", blocks=1, rows=6)
    keys.append(fake.submit([1], "large", max_tokens=2))
    fake.step()
    assert fake.residency.state("slow").loading
    assert fake.device.moves == 1
    fake.finish()
    for key in keys:
        fake.check_answer(fake.received[key])


def test_arena_never_gives_a_row_twice() -> None:
    draw = random.Random(5)
    arena = Arena(6, 40)
    taken: dict[int, int] = {}
    for _ in range(3000):
        rows = draw.randint(0, 12)
        if draw.random() < 0.55 and arena.free_slots and arena.free_rows >= rows:
            slot, moves = arena.take(rows)
            assert slot not in taken
            for move in moves:
                assert move.to < move.first_row
                assert taken[move.slot] == move.num_rows
            taken[slot] = rows
        elif taken:
            slot = draw.choice(sorted(taken))
            arena.give(slot)
            del taken[slot]
        arena.check_integrity()
        assert arena.free_rows == 40 - sum(taken.values())
        assert arena.free_slots == 6 - len(taken)


def test_a_sleeping_engine_is_woken_when_a_load_ends(engine: Any) -> None:
    """With real threads: nobody polls."""
    fake = engine()
    fake.know("a")
    awake = threading.Event()
    pool = BlockPool(8)
    residency = Residency(
        memory=fake.device, blocks=pool, num_slots=4, num_rows=16, host_bytes=100, on_loaded=awake.set
    )
    pool.attach(residency.places)
    try:
        residency.know("a", "a")
        residency.load("a")
        assert awake.wait(10)
        assert residency.busy
        residency.tick()
        assert residency.state("a").residency == "host"
        assert not residency.busy
    finally:
        residency.close()
