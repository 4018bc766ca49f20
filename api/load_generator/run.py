"""Sends a plan's requests, in an open or a closed loop, and times the generator itself too."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .client import Client, Sample, Target
from .plan import Plan, Shot, Text
from .texts import WordCount, as_prompt, words

PROBE_WORDS = (16, 144)


@dataclass(frozen=True)
class Run:
    """What one run brought."""

    samples: list[Sample]
    """In the order they were sent."""
    seconds: float
    """From the first request's intended moment to the last answer's end."""
    cpu_seconds: float
    """What the generator itself computed meanwhile."""


OnSample = Callable[[Sample], None]


async def measure(
    plan: Plan, target: Target, concurrency: int | None = None, on_sample: OnSample = lambda sample: None
) -> Run:
    """Send everything, wait for every answer.

    With a rate it is an open loop: a request goes out at its moment, however slow the answers are, and its
    latencies count from that moment also where the generator itself comes late. Without one `concurrency`
    requests are under way at any time.
    """
    allow_many_connections()
    client = Client(target)
    cpu, start = time.process_time(), time.perf_counter()

    samples: list[Sample] = []

    def done(sample: Sample) -> None:
        samples.append(sample)
        on_sample(sample)

    try:
        if plan.rate is not None:
            await _open_loop(plan.shots(), client, start, done)
        else:
            end = None if plan.duration is None else start + plan.duration
            await _closed_loop(plan.shots(), client, start, end, concurrency or 1, done)
    finally:
        await client.close()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return Run(sorted(samples, key=lambda sample: sample.index), seconds, cpu)


async def _open_loop(shots: Iterator[Shot], client: Client, start: float, done: OnSample) -> None:
    async def fire(shot: Shot) -> None:
        done(await client.send(shot, start, shot.intended))

    async with asyncio.TaskGroup() as group:
        for shot in shots:
            while (early := shot.intended - (time.perf_counter() - start)) > 0:  # noqa: ASYNC110 - see below
                await asyncio.sleep(early)  # again where the timer rounded down: none goes out early
            group.create_task(fire(shot))


async def _closed_loop(
    shots: Iterator[Shot], client: Client, start: float, end: float | None, concurrency: int, done: OnSample
) -> None:
    async def one_after_the_other() -> None:
        for shot in shots:
            if end is not None and time.perf_counter() >= end:
                return
            done(await client.send(shot, start))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_the_other())


async def warm_up(
    target: Target, count: int, max_tokens: int, adapters: tuple[str, ...], chat: bool, seed: int
) -> tuple[WordCount, Sample | None]:
    """Send `count` requests one after the other, every adapter in turn, and learn from them how many tokens a
    word is.

    The second value is the first that failed; then nothing more was sent.
    """
    draw = random.Random(f"{seed} warm-up")
    counted: dict[int, int] = {}
    client = Client(target)
    try:
        for index in range(count):
            size = PROBE_WORDS[index % 2]
            prompt = as_prompt(words(size, draw), chat)
            adapter = adapters[index % len(adapters)] if adapters else None
            shot = Shot(index, 0.0, Text(prompt, max_tokens), adapter)
            sample = await client.send(shot, time.perf_counter())
            if sample.error is not None:
                return WordCount(), sample
            if sample.prompt_tokens is not None:
                counted[size] = sample.prompt_tokens
    finally:
        await client.close()
    if len(counted) < len(PROBE_WORDS):
        return WordCount(), None
    first, second = ((size, counted[size]) for size in PROBE_WORDS)
    return WordCount.through(first, second), None


def allow_many_connections() -> None:
    """As many open files as this process may have: every request under way needs a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
