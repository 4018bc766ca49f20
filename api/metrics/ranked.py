"""Counters by name for any number of names, of which a bounded number is shown: the most used, and `other`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

TOP = 50
"""Names that are shown each by itself."""
OTHER = "other"
"""Stands for all the rest."""
MARGIN = 9 / 8
"""How far a name's use must be above the least used shown one's to take its place. So names of like use do not keep
changing places, and each further change of a place needs an eighth more use."""
REMEMBERED = 20
"""Names whose use is remembered, in multiples of those shown."""

Key = tuple[str, ...]


class RankedCounters(Collector):
    """Counters with the labels `labels`, one row of them a name.

    The rule: a name's own series counts what it used since it came among the shown ones; everything else is in
    `other`. When a name takes another's place, the other's count goes over to `other`, and its own begins at 0. So
    the sum over a counter's series is all that was ever counted, and neither `other` nor any shown series ever goes
    down; Prometheus reads a name that comes back as a counter that was started again.

    Names are ranked by all they used since the server began, as far as they are remembered: of those not shown the
    least used are forgotten when there are too many.
    """

    def __init__(self, counters: Mapping[str, str], labels: Sequence[str], top: int = TOP) -> None:
        """`counters`: what each counter counts, by its name."""
        self._counters = counters
        self._labels = labels
        self._top = top
        self._rest: Key = (OTHER,) * len(labels)
        self._other = [0] * len(counters)
        self._shown: dict[Key, list[int]] = {}
        self._use: dict[Key, int] = {}

    def count(self, name: Key, amounts: Sequence[int]) -> None:
        """Add `amounts`, one a counter, whose sum is the use that names are ranked by."""
        if len(self._use) > REMEMBERED * self._top:
            self._forget()
        use = self._use[name] = self._use.get(name, 0) + sum(amounts)
        row = self._shown.get(name)
        if row is None:
            row = self._show(name) if self._deserves_place(name, use) else self._other
        for index, amount in enumerate(amounts):
            row[index] += amount

    def _deserves_place(self, name: Key, use: int) -> bool:
        if name == self._rest:
            return False  # its series would be the rest's own
        if len(self._shown) < self._top:
            return True
        return use > MARGIN * self._use[self._least()]

    def _show(self, name: Key) -> list[int]:
        if len(self._shown) == self._top:
            for index, amount in enumerate(self._shown.pop(self._least())):
                self._other[index] += amount
        row = self._shown[name] = [0] * len(self._counters)
        return row

    def _least(self) -> Key:
        return min(self._shown, key=self._use.__getitem__)

    def _forget(self) -> None:
        """Remember half as many names."""
        ranked = sorted(self._use, key=self._use.__getitem__, reverse=True)
        keep = {*ranked[: REMEMBERED * self._top // 2], *self._shown}
        self._use = {name: use for name, use in self._use.items() if name in keep}

    def collect(self) -> Iterable[Metric]:
        for index, (counter, help_text) in enumerate(self._counters.items()):
            family = CounterMetricFamily(counter, help_text, labels=self._labels)
            for name, row in self._shown.items():
                family.add_metric(name, row[index])
            family.add_metric(self._rest, self._other[index])
            yield family
