"""Heddle's figures over its peers', of the same run; and the aims, with what was reached of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from .figures import Figures
from .measure import RowFigures
from .rows import OURS
from .workload import LONG, SHORT, Cell

Metric = Literal["whole", "decode", "prefill", "first"]
MEMORY_BYTES = 450_000_000
"""Aim for INT8: its process above the interpreter, torch and the pool."""


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """How many times as good as another: speeds over speeds, and the other's time over one's own."""

    cell: str
    metric: Metric
    row: str
    over: str
    ratio: float
    aim: float | None = None


@dataclass(frozen=True)
class Aim:
    """`row` (the best of several) at `cell` is to be `least` times as good as `over` at `over_cell`."""

    row: tuple[str, ...]
    over: str
    metric: Metric
    cell: Cell
    least: float
    over_cell: Cell | None = None
    """None: the same."""


WITH_8, BASE_16, ALONE = Cell(SHORT, 16, 8), Cell(SHORT, 16, 0), Cell(SHORT, 1, 0)
BASE_32 = Cell(SHORT, 32, 0)
AIMS = (
    Aim(("int8",), "vllm", "whole", WITH_8, 6.0),
    Aim(("int8",), "peft", "whole", WITH_8, 4.5),
    Aim(("int8-activations",), "vllm", "whole", WITH_8, 8.5),
    Aim(("int8-activations",), "peft", "whole", WITH_8, 6.5),
    Aim(("int8",), "vllm", "whole", BASE_16, 2.5),
    Aim(("int8-activations",), "vllm", "whole", BASE_16, 3.4),
    Aim(("int8", "gptq", "awq", "awq-int8-head"), "llama.cpp", "decode", ALONE, 1.2),
    Aim(("int8",), "int8", "whole", Cell(SHORT, 32, 8), 0.85, BASE_32),
    Aim(("int8",), "int8", "whole", Cell(SHORT, 32, 32), 0.75, BASE_32),
    Aim(("int8",), "llama.cpp", "prefill", ALONE, 2.5),
    Aim(("int8-activations",), "llama.cpp", "prefill", ALONE, 3.5),
    Aim(("int8",), "llama.cpp", "prefill", Cell(LONG, 1, 0), 2.5),
    Aim(("int8-activations",), "llama.cpp", "prefill", Cell(LONG, 1, 0), 3.5),
    Aim(("int8",), "vllm", "first", BASE_16, 3.0),
    Aim(("int8",), "vllm", "first", WITH_8, 12.0),
)


def aims_reached(rows: Sequence[RowFigures]) -> list[Ratio]:
    """Of every aim whose two sides were measured."""
    reached = []
    for aim in AIMS:
        over_cell = aim.over_cell or aim.cell
        found = [
            Ratio(
                cell=str(aim.cell) if aim.over_cell is None else f"{aim.cell} over {aim.over_cell.load}",
                metric=aim.metric,
                row=name,
                over=aim.over,
                ratio=value,
                aim=aim.least,
            )
            for name in aim.row
            if (value := _ratio(_at(rows, name, aim.cell), _at(rows, aim.over, over_cell), aim.metric))
        ]
        if found:
            reached.append(max(found, key=lambda ratio: ratio.ratio))
    return reached


def over_peers(rows: Sequence[RowFigures], plan: Iterable[Cell]) -> list[Ratio]:
    """Every row of ours over every peer, cell by cell, where both were measured."""
    ours = [row for row in rows if row.name in OURS]
    peers = [row for row in rows if row.name not in OURS]
    metrics: tuple[Metric, ...] = ("whole", "decode", "first")
    return [
        Ratio(cell=str(cell), metric=metric, row=row.name, over=peer.name, ratio=value)
        for cell in plan
        for row in ours
        for peer in peers
        for metric in metrics
        if (value := _ratio(row.at(cell), peer.at(cell), metric))
    ]


def memory_beside(row: RowFigures) -> int | None:
    """Bytes that one of our processes held beside the interpreter, torch, and what of its pool was ever written; None
    of a peer."""
    written: int | None = row.facts.get("pool_bytes_written")
    if written is None or not row.cells:
        return None
    return max(figures.peak_bytes for figures in row.cells) - row.imported_bytes - written


def _at(rows: Sequence[RowFigures], name: str, cell: Cell) -> Figures | None:
    return next((row.at(cell) for row in rows if row.name == name), None)


def _ratio(mine: Figures | None, theirs: Figures | None, metric: Metric) -> float | None:
    if mine is None or theirs is None:
        return None
    if metric == "first":
        return theirs.first_ms.p50 / mine.first_ms.p50
    above, below = getattr(mine, metric), getattr(theirs, metric)
    return above / below if above and below else None
