"""Who has much to compute on the event loop does it in turns, and between two of them the loop sees to all else.

What many calls do at the same moment adds up: a hundred that arrive together, four bodies of megabytes. So all of them
share one turn in every round of the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
R = TypeVar("R")

TURN_SECONDS = 0.003
"""Of every round of the loop. Threads that compute may make it several times as long, for they take turns as well."""


async def enter() -> None:
    """Go on at once where this round's turn has time left and nobody waits; else after those who came before."""
    loop = asyncio.get_running_loop()
    turns = _of_loop.get(loop)
    if turns is None:
        turns = _of_loop[loop] = _Turns()
    if turns.waiting or not turns.has_time():
        await turns.wait()


async def in_turns(items: Iterable[T], work: Callable[[T], R]) -> list[R]:
    """`work` of every item, in their order."""
    results: list[R] = []
    left = iter(items)
    while True:
        await enter()
        ends = time.monotonic() + TURN_SECONDS
        for item in left:
            results.append(work(item))
            if time.monotonic() > ends:
                break
        else:
            return results


class _Turns:
    """Of one event loop."""

    def __init__(self) -> None:
        self.waiting: deque[object] = deque()
        self._ends: float | None = None
        """When this round's turn is over; None: nobody has begun it."""

    def has_time(self) -> bool:
        now = time.monotonic()
        if self._ends is None:
            self._ends = now + TURN_SECONDS
            asyncio.get_running_loop().call_soon(self._end_round)  # the next round's first thing
            return True
        return now < self._ends

    async def wait(self) -> None:
        ticket = object()
        self.waiting.append(ticket)
        try:
            while True:
                await asyncio.sleep(0)
                if self.waiting[0] is ticket and self.has_time():
                    return
        finally:
            self.waiting.remove(ticket)

    def _end_round(self) -> None:
        self._ends = None


_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()
