"""Host copies of adapters and their budget."""

from __future__ import annotations

from typing import Any


def test_host_copies_keep_to_their_budget(engine: Any) -> None:
    fake = engine(blocks=64, host_bytes=5)  # a page is a byte here
    for index in range(4):
        fake.know(f"d{index}", blocks=2)
        fake.load(f"d{index}")
        assert fake.residency.stats()["host_copy_bytes"] <= 5
    for index in range(4):
        fake.residency.evict(f"d{index}")
    assert [fake.where(f"d{index}") for index in range(4)] == ["disk", "disk", "host", "host"]
    fake.know("large", blocks=9)
    fake.load("large")  # more than the whole budget: on its way only
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
    assert fake.where("early") == "host"
    fake.know("late", blocks=1)
    late = fake.submit([1, 2], "late", max_tokens=3)
    fake.step()
    assert fake.where("early") == "host"
    fake.finish()
    for key in (running, early, late):
        fake.check_answer(fake.received[key])
    assert fake.device.host_loads == ["early", "late"]
