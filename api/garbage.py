"""When Python looks for garbage among all that has been alive for a while: seldom, and when that is not much.

It stops everything for that, half a microsecond an object, and left to itself it does so whenever a request that makes
many objects has made some more: in the middle of the largest one, fifty milliseconds at a time. Young objects, which
are soon gone through, it looks at as ever; what no cycle holds is freed at once anyway.
"""

from __future__ import annotations

import asyncio
import gc

NEVER = 1 << 30
EVERY_SECONDS = 10.0
MANY = 8_000
"""Objects; fewer are gone through in some five milliseconds."""
PATIENCE = 30
"""How many times it may be put off for there being many."""


def settle() -> None:
    """What there is by now stays to the end and is not gone through again; what follows, only by `collect`."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)


async def collect() -> None:
    """Collect now and then, until cancelled."""
    put_off = 0
    while True:
        await asyncio.sleep(EVERY_SECONDS)
        if len(gc.get_objects(generation=2)) <= MANY or put_off == PATIENCE:
            gc.collect()
            put_off = 0
        else:
            put_off += 1
