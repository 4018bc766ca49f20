"""What was measured, in words: tables as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from .rows import Goal, LeftOut, OpRow, Peaks, Row, StepRow

WIDTH = 240


def report(rows: Sequence[Row]) -> str:
    """Everything: the device, steps, operations, what was left out, and how many goals are met."""
    peaks = [row for row in rows if isinstance(row, Peaks)]
    steps = [row for row in rows if isinstance(row, StepRow)]
    operations = [row for row in rows if isinstance(row, OpRow)]
    left_out = [row for row in rows if isinstance(row, LeftOut)]
    goals = [goal for step in steps for goal in step.goals]
    goals += [goal for operation in operations for goal in operation.goals]
    parts = [
        "\n".join(map(_peaks, peaks)),
        _steps(steps) if steps else "",
        _operations(operations) if operations else "",
        "\n".join(f"left out: {row.what}: {row.reason}" for row in left_out),
        f"goals: {sum(goal.met for goal in goals)} of {len(goals)} met",
    ]
    return "\n\n".join(part for part in parts if part)


def _peaks(peaks: Peaks) -> str:
    return (
        f"{peaks.device}: {peaks.copy_bytes_per_second / 1e9:,.0f} GB/s in a copy (read and written), "
        f"{peaks.product_flops_per_second / 1e12:,.1f} TFLOP/s in a float16 product"
    )


def _steps(rows: Iterable[StepRow]) -> str:
    numbers = ("rows", "context", "adapters", "rank", "ms", "tok/s", "GB", "x floor", "of base", "same bits")
    return markdown(
        ("base", "layers", "tokens"),
        (*numbers, "goals"),
        [
            [
                row.base, row.form, "drawn" if row.draws else "greedy",
                str(row.rows), str(row.context), str(len(row.ranks)), ranks_of(row.ranks),
                f"{row.seconds * 1e3:.3f}", f"{row.rows / row.seconds:,.0f}", f"{row.bytes / 1e9:.2f}",
                f"{row.over_floor:.2f}", _number(row.of_base), "yes" if row.replay_equals_eager else "NO",
                _goals(row.goals),
            ]
            for row in rows
        ],
    )  # fmt: skip


def _operations(rows: Iterable[OpRow]) -> str:
    numbers = (
        "rows",
        "context",
        "adapters",
        "rank",
        "us",
        "GB/s",
        "of copy",
        "TFLOP/s",
        "of product",
        "torch us",
    )
    return markdown(
        ("base", "operation", "of"),
        (*numbers, "x torch", "error", "goals"),
        [
            [
                row.base, row.op, row.detail, str(row.rows), str(row.context or "-"), str(len(row.ranks) or "-"),
                ranks_of(row.ranks), f"{row.seconds * 1e6:.1f}", f"{row.bytes_per_second / 1e9:,.0f}",
                f"{row.of_copy:.0%}", f"{row.flops_per_second / 1e12:.2f}", f"{row.of_product:.1%}",
                "-" if row.torch_seconds is None else f"{row.torch_seconds * 1e6:.1f}", _number(row.times_torch),
                "-" if row.error is None else f"{row.error:.0e}", _goals(row.goals),
            ]
            for row in rows
        ],
    )  # fmt: skip


def ranks_of(ranks: Sequence[int]) -> str:
    """In a word."""
    kinds = sorted(set(ranks))
    return "-" if not kinds else str(kinds[0]) if len(kinds) == 1 else f"{kinds[0]}-{kinds[-1]}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _goals(goals: Sequence[Goal]) -> str:
    return ", ".join(f"{goal.aim}: {'met' if goal.met else 'NOT MET'}" for goal in goals)


def markdown(words: Sequence[str], numbers: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table with columns of words, then columns of numbers."""
    table = Table(box=MARKDOWN)
    for word in words:
        table.add_column(word, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    out = StringIO()
    Console(file=out, width=WIDTH).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())
