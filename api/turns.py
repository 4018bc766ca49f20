"""Who has much to compute on the event loop does it in turns, and between two of them the loop sees to all else.

What many calls do at the same moment adds up: a hundred that arrive together, four bodies of megabytes. So all of them
share one turn in every round of the loop.
"""

from __future__ import annotations

import asyncio
import itertools
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
        self.waiting: deque[_Ticket] = deque()
        self._ends: float | None = None
        """When this round's turn is over; None: nobody has begun it."""
        self._went_on = 0
        """In this turn."""
        self._called = 1
        """So many of those who wait are called for the next turn: those who will find time, and some more. A hundred
        that wait would otherwise all be woken every round."""
        self._round_is_ending = False

    def has_time(self) -> bool:
        now = time.monotonic()
        if self._ends is None:
            self._ends = now + TURN_SECONDS
            self._at_next_round()
        elif now >= self._ends:
            return False
        self._went_on += 1
        return True

    async def wait(self) -> None:
        ticket = _Ticket()
        self.waiting.append(ticket)
        self._at_next_round()
        try:
            while True:
                ticket.called = asyncio.get_running_loop().create_future()
                await ticket.called
                if self.waiting[0] is ticket and self.has_time():
                    return
        finally:
            self.waiting.remove(ticket)

    def _at_next_round(self) -> None:
        if not self._round_is_ending:
            self._round_is_ending = True
            asyncio.get_running_loop().call_soon(self._end_round)  # its first thing

    def _end_round(self) -> None:
        self._round_is_ending = False
        if self._went_on:
            self._called = 2 * self._went_on + 1
        self._ends, self._went_on = None, 0
        if self.waiting:
            self._at_next_round()
            for ticket in itertools.islice(self.waiting, self._called):
                if not ticket.called.done():
                    ticket.called.set_result(None)


class _Ticket:
    """A place in the queue."""

    __slots__ = ("called",)

    called: asyncio.Future[None]


_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()
