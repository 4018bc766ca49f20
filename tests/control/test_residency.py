"""Adapters on their way: loads, places, evictions, leases."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from heddle.core.scheduling.block_pool import BlockPool
from heddle.lora.adapter_memory import AdapterState, ResidencyError
from heddle.lora.residency import Residency

from .fake_device import code_of


def test_load_evict_and_load_again(engine: Any) -> None:
    fake = engine()
    fake.know("a", blocks=3)
    assert fake.residency.state("a") == AdapterState(digest="a", residency="disk")
    fake.load("a")
    assert fake.residency.state("a") == AdapterState(digest="a", residency="device", blocks=3, size=3)
    assert fake.counts()["adapters"] == 3
    fake.residency.evict("a")
    assert fake.residency.state("a") == AdapterState(digest="a", residency="host", size=3)
    assert fake.counts()["adapters"] == 0
    fake.load("a")
    fake.residency.evict("a", "disk")
    assert fake.where("a") == "disk"
    fake.load("a")
    assert fake.device.host_loads == ["a", "a"]
    fake.load("a")  # there already: answered at once
    assert fake.residency.stats()["adapter_loads"] == 3
    assert fake.residency.stats()["adapter_evictions"] == 2


def test_the_file_is_read_once_however_long_it_is_used(engine: Any) -> None:
    """Files that vanish after they were loaded change nothing, not even over an eviction to the host."""
    fake = engine()
    fake.know("a")
    fake.load("a")
    del fake.device.files["a"]
    fake.device.check_adapter = lambda *_: None
    for _ in range(3):
        key = fake.submit([1, 2, 3], "a", max_tokens=5, ignore_eos=True)
        fake.finish()
        fake.check_answer(fake.received[key])
        fake.residency.evict("a")
        fake.load("a")
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


def test_an_adapter_is_used_only_once_its_pages_have_arrived(engine: Any) -> None:
    """Meanwhile others run, and others' pages are copied."""
    fake = engine(blocks=64)
    for name in ("a", "b"):
        fake.know(name, blocks=3)
    fake.device.late.add("a")
    base = fake.submit([1, 2], max_tokens=10, ignore_eos=True)
    first = fake.submit([1, 2], "a", max_tokens=2, ignore_eos=True)
    second = fake.submit([1, 2], "b", max_tokens=2, ignore_eos=True)
    for _ in range(8):
        fake.step()
    assert fake.received[second].outputs == 2
    assert fake.received[base].outputs >= 7
    assert fake.received[first].outputs == 0
    assert fake.residency.busy, "the engine does not sleep: nobody tells it when pages have arrived"
    assert fake.where("a") == "host"
    fake.device.late.clear()
    fake.finish()
    for key in (base, first, second):
        fake.check_answer(fake.received[key])


def test_blocks_of_an_adapter_given_up_on_its_way_are_reused_after_its_pages(engine: Any) -> None:
    fake = engine(blocks=64)
    fake.know("a", blocks=3)
    fake.device.late.add("a")
    key = fake.submit([1, 2], "a", max_tokens=2)
    for _ in range(3):
        fake.step()
    assert fake.counts()["adapters"] == 3
    fake.abort(key)
    assert fake.device.settled == 0
    fake.residency.evict("a")
    assert fake.counts()["adapters"] == 0
    assert fake.device.settled == 1
    fake.device.late.clear()
    fake.load("a")
    fake.residency.evict("a")
    assert fake.device.settled == 1, "its pages were there"


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
    assert fake.where("a") == "disk"
    fake.residency.load("a")
    fake.run_loads()
    fake.step()
    fake.step()  # one page of three is there
    assert fake.residency.state("a").loading
    fake.residency.evict("a")
    assert fake.where("a") == "host"
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
        fake.load("bad")
    assert refusal.value.code == "adapter_failed"
    assert not fake.scheduler.has_work


def test_a_missing_file_is_an_error_without_the_server_s_paths(engine: Any) -> None:
    fake = engine()
    fake.know("/srv/blobs/gone", unreadable=True)
    error = fake.submit([1], "/srv/blobs/gone")
    assert error.code == "adapter_failed"
    assert error.message.endswith("could not be read: No such file or directory")


def test_only_what_changed_is_reported_and_once(engine: Any) -> None:
    fake = engine()
    fake.know("a")
    fake.know("b")
    assert [state.digest for state in fake.residency.drain_changes()] == ["a", "b"]
    assert fake.residency.drain_changes() == []
    key = fake.submit([1], "a", max_tokens=1)
    assert fake.residency.drain_changes() == [
        AdapterState(digest="a", residency="disk", loading=True, size=2, in_use=1)
    ]
    fake.finish()
    assert fake.received[key].ends == 1
    assert fake.residency.drain_changes() == [AdapterState(digest="a", residency="device", blocks=2, size=2)]
    fake.residency.know("a", "a")
    fake.residency.pin("b", False)
    assert fake.residency.drain_changes() == []


def test_a_load_does_not_take_the_place_of_what_a_queued_request_waits_with(engine: Any) -> None:
    fake = engine(blocks=12, max_num_seqs=1, patience=1000)
    fake.know("mine", blocks=3)
    fake.know("other", blocks=6)
    fake.load("mine")
    running = fake.submit([1, 2, 3], max_tokens=21, ignore_eos=True)
    queued = fake.submit([1, 2], "mine", max_tokens=3)
    for _ in range(10):
        fake.step()
    fake.residency.load("other")  # 5 blocks are left: with those of "mine" it would fit
    for _ in range(8):
        fake.step()
        assert fake.where("mine") == "device"
    fake.finish()
    assert fake.residency.drain_loads() == [("other", None)]
    for key in (running, queued):
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
    assert fake.where("a") == "device"
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
    fake.load("pinned")
    keys = [fake.submit([1, index], "popular", max_tokens=2) for index in range(9)]
    fake.finish()
    fake.residency.load("b")
    keys += [fake.submit([1, 2], "c", max_tokens=2), fake.submit([1, 2], "popular", "e", max_tokens=2)]
    fake.finish(limit=100)
    assert fake.residency.drain_loads() == [("b", None)]
    for key in keys:
        fake.check_answer(fake.received[key])


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
