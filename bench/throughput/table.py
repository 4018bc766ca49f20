"""A run in words: one table of all cells, ratios against the peers, aims. As Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import StringIO

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from .figures import Figures
from .measure import RowFigures
from .ratios import MEMORY_BYTES, Ratio, memory_beside
from .workload import Cell

WIDTH = 220
WORDS = {
    "whole": "whole requests",
    "decode": "decode",
    "prefill": "prefill",
    "first": "time to first token",
}
Columns = dict[str, Callable[[Figures], str]]


def number(value: float | None, places: int = 1) -> str:
    return "-" if value is None else f"{value:,.{places}f}"


def columns(peak_gflops: float, with_energy: bool) -> Columns:
    """Heading to the text of a cell's figures."""
    shown: Columns = {
        "whole tok/s": lambda f: number(f.whole),
        "decode tok/s": lambda f: number(f.decode),
        "prefill tok/s": lambda f: number(f.prefill),
        "first p50 ms": lambda f: number(f.first_ms.p50, 0),
        "p99": lambda f: number(f.first_ms.p99, 0),
        "between p99 ms": lambda f: number(f.between_ms.p99 if f.between_ms else None, 0),
        "memory MB": lambda f: number(f.peak_bytes / 1e6, 0),
        "GOP/s": lambda f: number(f.gops, 0),
        "of peak": lambda f: f"{f.gops / peak_gflops:.0%}",
    }
    if with_energy:
        shown["J a token"] = lambda f: number(f.joules_per_token, 2)
    return shown


def main_table(rows: Sequence[RowFigures], plan: Sequence[Cell], peak_gflops: float) -> str:
    """A block of lines for each cell. Energy only where some could be read."""
    with_energy = any(figures.joules_per_token is not None for row in rows for figures in row.cells)
    shown = columns(peak_gflops, with_energy)
    table = _table("tokens", "streams", "load", "", numbers=list(shown))
    for cell in plan:
        label = [str(cell.size), str(cell.streams), cell.load]
        for row in rows:
            figures = row.at(cell)
            if figures is not None:
                table.add_row(*label, row.title, *(text(figures) for text in shown.values()))
                label = ["", "", ""]
    return _text(table)


def ratio_table(ratios: Sequence[Ratio], titles: dict[str, str]) -> str:
    """A line for each cell and each two rows."""
    metrics = list(dict.fromkeys(ratio.metric for ratio in ratios))
    table = _table("cell", "times as good", numbers=[WORDS[metric] for metric in metrics])
    lines: dict[tuple[str, str, str], dict[str, float]] = {}
    for ratio in ratios:
        lines.setdefault((ratio.cell, ratio.row, ratio.over), {})[ratio.metric] = ratio.ratio
    for (cell, row, over), values in lines.items():
        cells = (number(values.get(metric), 2) for metric in metrics)
        table.add_row(cell, f"{titles[row]} / {titles[over]}", *cells)
    return _text(table)


def aim_table(aims: Sequence[Ratio], titles: dict[str, str]) -> str:
    table = _table("aim", "cell", "of", numbers=["measured", "at least", "reached"])
    for ratio in aims:
        assert ratio.aim is not None
        reached = f"{min(1.0, ratio.ratio / ratio.aim):.0%}"
        table.add_row(
            f"{titles[ratio.row]} / {titles[ratio.over]}", ratio.cell, WORDS[ratio.metric],
            number(ratio.ratio, 2), number(ratio.aim, 2), reached,
        )  # fmt: skip
    return _text(table)


def memory_lines(rows: Sequence[RowFigures]) -> list[str]:
    """Of our rows: what there is beside the interpreter, torch and the pool."""
    lines = []
    for row in rows:
        beside = memory_beside(row)
        if beside is not None:
            aim = f", aim {MEMORY_BYTES / 1e6:.0f}" if row.name == "int8" else ""
            lines.append(
                f"{row.title}: {beside / 1e6:.0f} MB beside interpreter and torch ({row.imported_bytes / 1e6:.0f}) "
                f"and the written part of the pool ({row.facts['pool_bytes_written'] / 1e6:.0f}){aim}"
            )
    return lines


def _table(*words: str, numbers: Sequence[str]) -> Table:
    table = Table(box=MARKDOWN)
    for word in words:
        table.add_column(word, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _text(table: Table) -> str:
    out = StringIO()
    Console(file=out, width=WIDTH).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())
