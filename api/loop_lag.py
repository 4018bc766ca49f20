"""How late the event loop comes to its work: a timer that should be on time, and by how much it is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

logger = structlog.get_logger(__name__)

TICK_SECONDS = 0.02
WARN_SECONDS = 0.25
"""Nobody's request should wait so long for another's; the log says so then."""


async def watch(observe: Callable[[float], None]) -> None:
    """Tell `observe` at every tick by how many seconds it came late, until cancelled."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def start() -> None:
        nonlocal timer
        timer = loop.call_later(TICK_SECONDS, tick, time.monotonic() + TICK_SECONDS)

    def tick(due: float) -> None:
        late = max(0.0, time.monotonic() - due)
        observe(late)
        if late > WARN_SECONDS:
            logger.warning("the event loop was kept from its work", seconds=round(late, 3))
        start()

    # Not a task that sleeps: waking it fifty times a second costs an idle server several times as much.
    start()
    try:
        await loop.create_future()
    finally:
        if timer is not None:
            timer.cancel()
