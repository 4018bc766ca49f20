"""A run as a picture: speed of whole requests and time to the first token, cell by cell, a bar for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .figures import Figures
from .measure import RowFigures
from .workload import Cell


def draw(rows: Sequence[RowFigures], plan: Sequence[Cell], title: str, path: Path) -> None:
    """Write a PNG. Needs matplotlib (`check_matplotlib` of the load generator says so); raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.cells]
    figure = Figure(figsize=(max(8.0, 1.4 * len(plan)), 9), layout="constrained")
    FigureCanvasAgg(figure)
    panels: list[tuple[str, Callable[[Figures], float]]] = [
        ("new tokens a second, whole requests", lambda figures: figures.whole),
        ("ms to the first token, median", lambda figures: figures.first_ms.p50),
    ]
    for axes, (words, value) in zip(figure.subplots(2, 1), panels):
        width = 0.85 / max(1, len(shown))
        for number, row in enumerate(shown):
            found = [(place, figures) for place, cell in enumerate(plan) if (figures := row.at(cell))]
            places = [place + (number - (len(shown) - 1) / 2) * width for place, _ in found]
            axes.bar(places, [value(figures) for _, figures in found], width, label=row.title)
        axes.set_xticks(range(len(plan)), [f"{c.size}\n{c.streams} x {c.load}" for c in plan], fontsize=8)
        axes.set(ylabel=words, yscale="log")
        axes.grid(axis="y", alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120)
