"""Long work on the event loop is done in turns: all of it together has one in every round of the loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest
from heddle.api import turns


class Clock:
    """Goes on only when it is told to: stands for the time that work takes."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(turns, "time", clock)
    return clock


def count_rounds() -> Callable[[], int]:
    """How many times the loop has been round since."""
    loop, rounds = asyncio.get_running_loop(), 0

    def count() -> None:
        nonlocal rounds
        rounds += 1
        loop.call_soon(count)

    count()
    return lambda: rounds


async def test_work_goes_on_in_the_next_round_when_its_time_is_over(clock):
    rounds, seen = count_rounds(), []

    def work(item: int) -> int:
        clock.work(turns.TURN_SECONDS * 0.4)
        seen.append(rounds())
        return item * 2

    assert await turns.in_turns(range(9), work) == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    assert max(map(seen.count, seen)) <= 3
    assert len(set(seen)) >= 3


async def test_short_work_is_done_at_once(clock):
    rounds = count_rounds()
    before = rounds()
    assert await turns.in_turns(range(1000), str) == [str(n) for n in range(1000)]
    assert rounds() == before


async def test_what_comes_together_shares_the_round_in_the_order_it_came(clock):
    rounds, seen = count_rounds(), []

    async def work(name: str) -> None:
        for _ in range(3):
            await turns.enter()
            seen.append((rounds(), name))
            clock.work(turns.TURN_SECONDS)

    await asyncio.gather(*map(work, "abc"))
    # The first a waits for nothing, and is back before b and c have begun.
    assert "".join(name for _, name in seen) == "a" + "abc" + "abc" + "bc"
    assert len({at for at, _ in seen}) == 9


async def test_many_short_ones_share_a_round(clock):
    rounds, seen = count_rounds(), []

    async def work() -> None:
        await turns.enter()
        seen.append(rounds())
        clock.work(turns.TURN_SECONDS / 10)

    await asyncio.gather(*(work() for _ in range(100)))
    assert len(seen) == 100
    assert max(map(seen.count, seen)) <= 11


async def test_who_leaves_while_waiting_holds_up_nobody(clock):
    await turns.enter()
    clock.work(1)
    first, second = asyncio.create_task(turns.enter()), asyncio.create_task(turns.enter())
    await asyncio.sleep(0)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    async with asyncio.timeout(5):
        await second
