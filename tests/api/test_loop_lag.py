"""The event loop's lateness: seen where something blocks it, and not where nothing does."""

from __future__ import annotations

import asyncio
import time

from heddle.api import loop_lag
from heddle.api.metrics import Metrics


async def test_a_loop_that_was_blocked_says_for_how_long():
    seen: list[float] = []
    watching = asyncio.create_task(loop_lag.watch(seen.append))
    await asyncio.sleep(0.1)
    assert len(seen) >= 2
    time.sleep(0.3)  # noqa: ASYNC251 - the fault itself
    await asyncio.sleep(0.05)
    watching.cancel()
    assert 0.3 - loop_lag.TICK_SECONDS <= max(seen) < 2


def test_the_lag_is_a_histogram_of_the_metrics():
    metrics = Metrics()
    for seconds in (0.0, 0.03, 7.0):
        metrics.observe_loop_lag(seconds)
    text = metrics.expose().decode()
    assert 'heddle_event_loop_lag_seconds_bucket{le="0.02"} 1.0' in text
    assert 'heddle_event_loop_lag_seconds_bucket{le="0.05"} 2.0' in text
    assert "heddle_event_loop_lag_seconds_count 3.0" in text
