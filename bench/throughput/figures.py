"""From the moments at which tokens came to the figures of one cell."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import msgspec
from heddle.api.load_generator.report import Latency

from .workload import Cell


class WrongAnswer(Exception):
    """A request did not get the tokens it asked for: no figure can be made of it."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One request for each stream, all begun together. Seconds from then."""

    seconds: float
    """Until the last had ended."""
    times: list[list[float]]
    """Of each request's tokens."""
    joules: float | None = None
    """Of the processor in that time, where it can be read."""

    def check(self, cell: Cell) -> None:
        """Raises `WrongAnswer`."""
        counts = [len(times) for times in self.times]
        if counts != [cell.size.new] * cell.streams:
            raise WrongAnswer(f"{cell}: asked for {cell.size.new} tokens each, got {sorted(set(counts))}")

    def whole(self) -> float:
        """New tokens a second, of whole requests."""
        return sum(map(len, self.times)) / self.seconds

    def decode(self) -> float | None:
        """New tokens a second while all streams decode: after the last one's first token, up to the first one's end."""
        begin, end = max(times[0] for times in self.times), min(times[-1] for times in self.times)
        if end <= begin:
            return None
        return sum(begin < moment <= end for times in self.times for moment in times) / (end - begin)

    def first(self) -> list[float]:
        """Seconds to each request's first token."""
        return [times[0] for times in self.times]

    def between(self) -> list[float]:
        """Seconds between one token and the next, of all requests."""
        return [later - earlier for times in self.times for earlier, later in itertools.pairwise(times)]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one row in one cell. Speeds are medians over the rounds."""

    prompt: int
    new: int
    streams: int
    adapters: int
    rounds: int
    whole: float
    """New tokens a second, prefill included."""
    decode: float | None
    """None: the streams never all decoded at once."""
    prefill: float | None
    """Prompt tokens a second until the first token. Of one stream: with more, prefill and decode overlap."""
    first_ms: Latency
    between_ms: Latency | None
    peak_bytes: int
    """The most the serving process has held (VmHWM), from its start on."""
    joules_per_token: float | None
    gops: float
    """Operations with the base's weights, in whole requests, in 10^9 a second."""

    @classmethod
    def of(cls, cell: Cell, rounds: Sequence[Round], peak_bytes: int, operations: float) -> Figures:
        """`operations`: of one request."""
        whole = statistics.median(done.whole() for done in rounds)
        decode = [speed for done in rounds if (speed := done.decode()) is not None]
        first = Latency.of([seconds for done in rounds for seconds in done.first()])
        assert first is not None, "a round has a request, and a request a token"
        spent = [done.joules for done in rounds if done.joules is not None]
        tokens = cell.streams * cell.size.new
        return cls(
            prompt=cell.size.prompt,
            new=cell.size.new,
            streams=cell.streams,
            adapters=cell.adapters,
            rounds=len(rounds),
            whole=whole,
            decode=statistics.median(decode) if decode else None,
            prefill=cell.size.prompt / first.p50 * 1000 if cell.streams == 1 else None,
            first_ms=first,
            between_ms=Latency.of([seconds for done in rounds for seconds in done.between()]),
            peak_bytes=peak_bytes,
            joules_per_token=sum(spent) / (tokens * len(rounds)) if len(spent) == len(rounds) else None,
            gops=whole / cell.size.new * operations / 1e9,
        )
