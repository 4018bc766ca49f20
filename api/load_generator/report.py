"""What a run says: rates, percentiles, errors by code; as a table and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from .client import Sample
from .run import Run

PERCENTILES = (50, 90, 99)
LATENCIES = {
    "time_to_first_token": "time to first token",
    "inter_token": "between tokens",
    "time_per_output_token": "per output token",
    "end_to_end": "end to end",
}
"""Field of the report to its words in the table."""
SLOS = {"ttft": "time_to_first_token", "tpot": "time_per_output_token", "e2e": "end_to_end"}
"""What a goal can be set for."""


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """In milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency | None:
        """None where there are none. Percentiles between two values lie on the line between them."""
        if not seconds:
            return None
        values = np.asarray(seconds) * 1000
        p50, p90, p99 = (float(value) for value in np.percentile(values, PERCENTILES))
        return cls(
            count=len(values), mean=float(values.mean()), p50=p50, p90=p90, p99=p99, max=float(values.max())
        )


class Generator(msgspec.Struct, frozen=True, kw_only=True):
    """How much of what was measured the generator itself may have caused."""

    cpu_seconds: float
    cpu_share: float
    """Of one core; near 1 the generator was the bottleneck."""
    cpu_us_per_token: float | None
    late_p99_ms: float
    """How late requests were sent."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies are of requests that succeeded; whatever failed counts in `failed` and `errors`, and misses
    every goal."""

    requests: int
    succeeded: int
    failed: int
    errors: dict[str, int]
    seconds: float
    requests_per_second: float
    prompt_tokens: int
    completion_tokens: int
    completion_tokens_per_second: float
    total_tokens_per_second: float
    latency_ms: dict[str, Latency | None]
    goodput: float | None
    """Requests a second that met every goal."""
    goodput_share: float | None
    """Of all that were sent."""
    generator: Generator


def report(run: Run, slo_ms: Mapping[str, float] | None = None) -> Report:
    """`slo_ms`: the goals by name of `SLOS`, in milliseconds."""
    good = [sample for sample in run.samples if sample.error is None]
    prompt_tokens = sum(sample.prompt_tokens or 0 for sample in good)
    completion_tokens = sum(sample.completion_tokens for sample in good)
    met = sum(_meets(sample, slo_ms) for sample in good) if slo_ms else None
    seconds = run.seconds or 1e-9
    return Report(
        requests=len(run.samples),
        succeeded=len(good),
        failed=len(run.samples) - len(good),
        errors=dict(Counter(s.error for s in run.samples if s.error is not None).most_common()),
        seconds=run.seconds,
        requests_per_second=len(good) / seconds,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        completion_tokens_per_second=completion_tokens / seconds,
        total_tokens_per_second=(prompt_tokens + completion_tokens) / seconds,
        latency_ms={name: Latency.of(list(_seconds(good, name))) for name in LATENCIES},
        goodput=None if met is None else met / seconds,
        goodput_share=None if met is None else met / max(1, len(run.samples)),
        generator=Generator(
            cpu_seconds=run.cpu_seconds,
            cpu_share=run.cpu_seconds / seconds,
            cpu_us_per_token=run.cpu_seconds / completion_tokens * 1e6 if completion_tokens else None,
            late_p99_ms=float(np.percentile([s.sent - s.intended for s in run.samples] or [0.0], 99)) * 1000,
        ),
    )


def _seconds(samples: Iterable[Sample], name: str) -> Iterable[float]:
    for sample in samples:
        if name == "inter_token":
            yield from sample.gaps
        elif (value := getattr(sample, name)) is not None:
            yield value


def _meets(sample: Sample, slo_ms: Mapping[str, float]) -> bool:
    values = {name: getattr(sample, SLOS[name]) for name in slo_ms}
    return all(value is None or value * 1000 <= slo_ms[name] for name, value in values.items())


def as_data(made: Report, run: Run, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, for a JSON file: settings, the report, and every request."""
    return {
        "settings": dict(settings),
        **msgspec.to_builtins(made),
        "samples": msgspec.to_builtins(run.samples),
    }
