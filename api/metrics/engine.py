"""The engine's counters and gauges, read at each scrape from what it last reported."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable

import msgspec
import psutil
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...core.client import EngineClient
from ...core.memory import MemoryReport

COUNTERS = {
    "steps": "model forwards",
    "prompt_tokens": "prompt tokens taken in, each sequence's",
    "generated_tokens": "tokens generated",
    "cached_tokens": "prompt tokens served from the prefix cache",
    "preemptions": "sequences that gave their blocks back for a while",
    "swap_outs": "of these, sequences whose blocks were copied to host memory, not dropped to be computed again",
    "swap_ins": "sequences that came back from host memory",
    "swap_out_bytes": "bytes copied out of the pool to host memory",
    "swap_in_bytes": "bytes copied back in",
    "adapter_loads": "adapters brought to the device",
    "adapter_evictions": "adapters taken off the device",
}
GAUGES = {
    "running": "sequences in the running batch",
    "waiting": "sequences queued",
    "blocks_total": "blocks of the pool",
    "blocks_free": "blocks that hold nothing",
    "blocks_used": "blocks of running sequences",
    "blocks_cached": "idle blocks of the prefix cache",
    "blocks_adapters": "blocks of adapters",
    "blocks_pinned": "of these, blocks of pinned adapters",
    "host_copy_bytes": "host memory of adapters' copies",
    "swap_used_bytes": "host memory that swapped sequences lie in",
}
RESIDENCIES = ("device", "host", "disk")


class EngineCollector(Collector):
    """Of one engine, whichever process it runs in now. Its counters begin anew with each process.

    While none runs nothing is held: all blocks are free, every adapter lies on disk, and sizes that are fixed by the
    settings are as they were and will be.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._report = None if engine.ready is None else engine.ready.memory
        """The last process' own, when it started."""

    def collect(self) -> Iterable[Metric]:
        values = msgspec.structs.asdict(self._engine.stats)
        for name, help_text in COUNTERS.items():
            yield CounterMetricFamily(f"heddle_{name}", help_text.capitalize(), value=values[name])
        for name, help_text in GAUGES.items():
            yield GaugeMetricFamily(f"heddle_{name}", help_text.capitalize(), value=values[name])
        yield CounterMetricFamily(
            "heddle_engine_restarts", "Engine processes that died", value=self._engine.restarts
        )
        up = GaugeMetricFamily("heddle_engine_up", "1 while an engine process takes requests, else 0")
        up.add_metric([], 0 if self._engine.ready is None else 1)
        yield up
        yield from self._adapters()
        yield self._resident()
        if self._engine.ready is not None:
            self._report = self._engine.ready.memory
        if self._report is not None:
            yield from _memory(self._report, values)

    def _adapters(self) -> Iterable[Metric]:
        """Of those the engine has heard of; every other one lies on disk alone."""
        states = self._engine.adapters.values()
        places: Counter[str] = Counter(state.residency for state in states)
        family = GaugeMetricFamily(
            "heddle_adapters", "Adapters the engine knows, by where they are", labels=["residency"]
        )
        for place in RESIDENCIES:
            family.add_metric([place], places[place])
        failed = sum(state.error is not None for state in states)
        return family, GaugeMetricFamily(
            "heddle_adapters_failed", "Of these, adapters that cannot be loaded", value=failed
        )

    def _resident(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily("heddle_resident_bytes", "Memory of a process in RAM", labels=["process"])
        for process, pid in (("server", os.getpid()), ("engine", self._engine.pid)):
            resident = 0
            with contextlib.suppress(psutil.NoSuchProcess):  # it may die at any time
                if pid is not None:
                    resident = psutil.Process(pid).memory_info().rss
            family.add_metric([process], resident)
        return family


def _memory(report: MemoryReport, values: dict[str, int]) -> Iterable[Metric]:
    """What is fixed from the start, as `report` has it, and the pool by what `values` say of its blocks."""
    sizes = GaugeMetricFamily("heddle_weight_bytes", "Bytes of the model's tensors", labels=["part"])
    per_weight = GaugeMetricFamily("heddle_bytes_per_weight", "Bytes a number of the model", labels=["part"])
    for part in report.weights:
        sizes.add_metric([part.part], part.bytes)
        if part.bytes_per_weight is not None:
            per_weight.add_metric([part.part], part.bytes_per_weight)
    pool = GaugeMetricFamily("heddle_pool_bytes", "Bytes of the block pool", labels=["use"])
    for use in ("free", "used", "cached", "adapters"):
        pool.add_metric([use], values[f"blocks_{use}"] * report.block_bytes)
    budgets = GaugeMetricFamily("heddle_host_budget_bytes", "The most that may be taken", labels=["part"])
    for part in report.host:
        budgets.add_metric([part.part], part.budget or 0)
    return sizes, per_weight, pool, budgets
