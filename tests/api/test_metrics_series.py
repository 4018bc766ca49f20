"""Counters and histograms say what Prometheus' own would say of the same observations."""

from __future__ import annotations

import math

import pytest
from heddle.api.metrics.series import Counts, Histogram
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client import Histogram as Reference
from prometheus_client.registry import Collector

BOUNDS = (0.001, 0.5, 1, 20)


def exposed(*series: Collector) -> list[str]:
    registry = CollectorRegistry()
    for one in series:
        registry.register(one)
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def reference(kind: type, *arguments: object, **options: object) -> tuple[CollectorRegistry, object]:
    registry = CollectorRegistry()
    return registry, kind(*arguments, registry=registry, **options)


def lines_of(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@pytest.mark.parametrize(
    "seen", [[], [0.0005, 0.001, 0.0011, 0.5, 3, 20, 20.0001, 1e9], [math.inf], [0.25] * 7], ids=str
)
def test_a_histogram_has_the_buckets_and_the_sum_of_prometheus_own(seen):
    registry, theirs = reference(Reference, "h_seconds", "what it counts", buckets=BOUNDS)
    ours = Histogram("h_seconds", "what it counts", BOUNDS)
    for value in seen:
        ours.observe(value)
        theirs.observe(value)
    assert exposed(ours) == lines_of(registry)


def test_a_counter_by_labels_has_a_row_for_each_combination():
    registry, theirs = reference(Counter, "c", "what it counts", ["method", "status"])
    ours = Counts("c", "what it counts", ["method", "status"])
    assert exposed(ours) == lines_of(registry), "nothing yet"
    for labels, amount in [(("POST", "200"), 1), (("GET", "404"), 1), (("POST", "200"), 3)]:
        ours.add(*labels, amount=amount)
        theirs.labels(*labels).inc(amount)
    assert exposed(ours) == lines_of(registry)


def test_a_counter_without_labels_stands_at_zero_from_the_start():
    registry, theirs = reference(Counter, "c", "what it counts")
    ours = Counts("c", "what it counts")
    assert exposed(ours) == lines_of(registry)
    ours.add(amount=5)
    theirs.inc(5)
    assert exposed(ours) == lines_of(registry)
