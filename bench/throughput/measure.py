"""One row after another, each through its cells: workers started, warmed up, measured."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from heddle.core.checkpoint.demo import demo_base
from heddle.core.model.config import ModelConfig

from .figures import Figures, Round, WrongAnswer
from .rows import Row
from .serving import Worker, WorkerFailed
from .workload import RANKS, WARM_UP_TOKENS, Cell, adapter_name, choices, make_adapters, operations, prompts

Say = Callable[[str], None]


class RowFigures(msgspec.Struct, kw_only=True):
    """What came of one row."""

    name: str
    title: str
    facts: dict[str, Any] = {}
    """What its last process said of itself."""
    imported_bytes: int = 0
    """What the interpreter and torch alone had taken in its process."""
    cells: list[Figures] = []
    left_out: str | None = None
    """Why there is nothing, or nothing more."""

    def at(self, cell: Cell) -> Figures | None:
        wanted = cell.size.prompt, cell.size.new, cell.streams, cell.adapters
        return next((f for f in self.cells if (f.prompt, f.new, f.streams, f.adapters) == wanted), None)


@dataclass(frozen=True)
class Terms:
    """The same for every row."""

    threads: int
    seconds: float
    """Rounds of a cell are repeated until they took so long together."""
    patience: float
    """Seconds within which a worker must answer."""
    logs: Path
    say: Say


def matmul_peak(threads: int) -> float:
    """GFLOP/s, measured in a process of its own. Raises `CalledProcessError`."""
    command = [sys.executable, "-P", "-m", "heddle.bench.throughput.matmul_peak", str(threads)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def measure(rows: Sequence[Row], plan: Sequence[Cell], terms: Terms, into: list[RowFigures]) -> None:
    """Every row over the cells that it can do, appended to `into` as they come. What goes wrong with a row ends
    that row alone, and stands in it."""
    model = ModelConfig.load(demo_base())
    with tempfile.TemporaryDirectory(prefix="heddle-bench-") as scratch:
        most = max((cell.adapters for cell in plan), default=0)
        adapters = make_adapters(model, most, Path(scratch))
        for row in rows:
            made = RowFigures(name=row.name, title=row.title, left_out=row.missing())
            into.append(made)
            if made.left_out is None:
                try:
                    _measure_row(row, plan, adapters, model, terms, made)
                except (WorkerFailed, WrongAnswer) as error:
                    made.left_out = f"it failed: {error}"
            if made.left_out is not None:
                terms.say(f"{row.title}: left out, {made.left_out}")


def _measure_row(
    row: Row,
    plan: Sequence[Cell],
    adapters: Mapping[str, Path],
    model: ModelConfig,
    terms: Terms,
    made: RowFigures,
) -> None:
    def process_of(cell: Cell) -> int:
        return row.process_for(cell.adapters)

    mine = sorted(filter(row.can, plan), key=process_of)  # stable: otherwise as planned
    for _, group in itertools.groupby(mine, process_of):
        cells = list(group)
        most = max(cell.adapters for cell in cells)
        with Worker(row, terms.threads, terms.logs / f"{row.name}.log", terms.patience) as worker:
            made.imported_bytes = worker.imported_bytes
            worker.ask(
                {
                    "base": str(row.base),
                    "adapters": {name: str(adapters[name]) for name in map(adapter_name, range(most))},
                    "max_rank": max(RANKS),
                    "threads": terms.threads,
                    "max_streams": max(cell.streams for cell in cells),
                    "max_tokens": max(cell.size.prompt + cell.size.new for cell in cells),
                    "options": dict(row.options),
                }
            )
            for cell in cells:
                figures = _measure_cell(worker, cell, model, terms.seconds)
                made.cells.append(figures)
                terms.say(f"{row.title}, {cell}: {figures.whole:.1f} tokens/s (rounds: {figures.rounds})")
            made.facts = worker.ask({})


def _measure_cell(worker: Worker, cell: Cell, model: ModelConfig, seconds: float) -> Figures:
    def ask(new: int) -> Round:
        requests = [
            {"prompt": prompt, "adapter": adapter}
            for prompt, adapter in zip(prompts(cell, model.vocab_size, random.Random()), choices(cell))
        ]
        return msgspec.convert(worker.ask({"requests": requests, "new": new}), Round)

    ask(min(cell.size.new, WARM_UP_TOKENS))
    rounds: list[Round] = []
    while not rounds or sum(done.seconds for done in rounds) < seconds:
        rounds.append(ask(cell.size.new))
        rounds[-1].check(cell)
    return Figures.of(cell, rounds, worker.peak_bytes(), operations(model, cell.size))
