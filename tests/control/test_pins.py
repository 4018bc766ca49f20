"""Pins: what stays, what is refused for them, and what they cost others."""

from __future__ import annotations

from typing import Any

from .fake_device import code_of


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
    assert fake.residency.state("p1").size == 5, "of what is pinned the size is known, on the device or not"


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
    fake.load("pinned")
    fake.load("idle")
    key = fake.submit(list(range(1, 30)), max_tokens=7, ignore_eos=True)  # 9 blocks: all but the pinned ones
    fake.finish()
    fake.check_answer(fake.received[key])
    assert fake.where("pinned") == "device"
    assert fake.where("idle") == "host"


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
    fake.load("a")
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


def test_of_two_adapters_that_queued_requests_want_the_pinned_one_stays(engine: Any) -> None:
    """Also where it is used less and would be the first to go."""
    fake = engine(blocks=16, max_num_seqs=1)
    fake.know("pinned", blocks=4, pinned=True)
    fake.know("popular", blocks=4)
    fake.load("pinned")
    fake.load("popular")
    keys = [fake.submit(list(range(1, 20)), max_tokens=21, ignore_eos=True)]  # 10 blocks in the end
    keys.append(fake.submit([1, 2], "pinned", max_tokens=3))
    keys += [fake.submit([1, 2, index], "popular", max_tokens=3) for index in range(5)]
    while keys[0] in fake.live:
        fake.step()
        assert fake.where("pinned") == "device"
    assert fake.where("popular") == "host"
    fake.finish()
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
