"""What is sent and when: arrivals, adapters and prompts of one run, drawn from one seed."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Popularity = Literal["identical", "distinct", "uniform", "zipf"]
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Text:
    """What one request asks: a text or a conversation, and how much it wants back."""

    prompt: str | Messages
    max_tokens: int
    adapter: str | None = None
    """Only where the data set says so; then it counts instead of the popularity's."""


@dataclass(frozen=True)
class Shot:
    """One request to be sent."""

    index: int
    intended: float
    """Seconds from the start of the run. In a closed loop 0: it is sent when one before it has ended."""
    text: Text
    adapter: str | None


@dataclass(frozen=True)
class Plan:
    """How many requests of which kind."""

    texts: Callable[[random.Random], Iterator[Text]]
    """An endless supply."""
    adapters: Sequence[str] = ()
    popularity: Popularity = "uniform"
    zipf_exponent: float = 1.0
    rate: float | None = None
    """Requests a second, at Poisson's moments; `inf`: all at once. None: a closed loop."""
    requests: int | None = None
    duration: float | None = None
    """Seconds after which nothing more is sent."""
    seed: int = 0

    def shots(self) -> Iterator[Shot]:
        """In the order they are sent; as many as the plan has, or for ever where only a closed loop's clock
        ends it.

        Arrivals, adapters and texts are drawn apart, so that a change of one leaves the others as they are.
        """
        when = arrivals(self.rate, random.Random(f"{self.seed} arrivals"))
        who = choices(
            self.adapters, self.popularity, random.Random(f"{self.seed} adapters"), self.zipf_exponent
        )
        what = self.texts(random.Random(f"{self.seed} texts"))
        for index, (intended, adapter, text) in enumerate(zip(when, who, what)):
            if self.requests is not None and index >= self.requests:
                return
            if self.duration is not None and intended >= self.duration:
                return
            yield Shot(index, intended, text, text.adapter or adapter)


def arrivals(rate: float | None, draw: random.Random) -> Iterator[float]:
    """Moments in seconds from the start. A Poisson process: the gaps are exponential with mean 1 / rate."""
    if rate is None or math.isinf(rate):
        return itertools.repeat(0.0)
    return itertools.accumulate(draw.expovariate(rate) for _ in itertools.count())


def choices(
    names: Sequence[str], popularity: Popularity, draw: random.Random, exponent: float = 1.0
) -> Iterator[str | None]:
    """The adapter of each request; None throughout where there are no names.

    `identical`: the first for all. `distinct`: all in turn. `uniform`: any with the same probability. `zipf`:
    the k-th with a probability proportional to 1 / k^exponent.
    """
    if not names:
        return itertools.repeat(None)
    if popularity == "identical":
        return itertools.repeat(names[0])
    if popularity == "distinct":
        return itertools.cycle(names)
    power = exponent if popularity == "zipf" else 0.0
    ends = list(itertools.accumulate(rank**-power for rank in range(1, len(names) + 1)))
    return (
        names[bisect.bisect(ends, draw.random() * ends[-1], hi=len(names) - 1)] for _ in itertools.count()
    )
