"""Counters and histograms of one event loop: as Prometheus' own, without the locks, which cost every request."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString


class Counts(Collector):
    """A counter, by the values of its labels; without any it stands at 0 from the start."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str] = ()) -> None:
        self._name = name
        self._help = help_text
        self._labels = labels
        self._values: Counter[tuple[str, ...]] = Counter()
        if not labels:
            self._values[()] = 0

    def add(self, *labels: str, amount: int = 1) -> None:
        self._values[labels] += amount

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class Histogram(Collector):
    """How many observations lay at or below each of `bounds`, and their sum."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        """`bounds`: rising; infinity is added."""
        self._name = name
        self._help = help_text
        self._bounds = (*bounds, INF)
        self._counts = [0] * len(self._bounds)
        """Above the bound before, and not above this one."""
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help)
        totals = zip(map(floatToGoString, self._bounds), accumulate(self._counts))
        family.add_metric([], buckets=list(totals), sum_value=self._sum)
        yield family
