"""What `heddle bench` prints: two tables."""

from __future__ import annotations

from rich import box
from rich.table import Table

from ..load_generator.report import LATENCIES, Report


def summary_table(made: Report) -> Table:
    """Counts and rates, a line each."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right")
    rows = {
        "requests": f"{made.requests}",
        "succeeded": f"{made.succeeded}",
        "failed": f"{made.failed}",
        "seconds": f"{made.seconds:.2f}",
        "requests/s": f"{made.requests_per_second:.2f}",
        "output tokens/s": f"{made.completion_tokens_per_second:.1f}",
        "all tokens/s": f"{made.total_tokens_per_second:.1f}",
        "prompt tokens": f"{made.prompt_tokens}",
        "output tokens": f"{made.completion_tokens}",
    }
    if made.goodput is not None and made.goodput_share is not None:
        rows["goodput requests/s"] = f"{made.goodput:.2f} ({made.goodput_share:.1%} of all sent)"
    generator = made.generator
    per_token = "" if generator.cpu_us_per_token is None else f", {generator.cpu_us_per_token:.0f} us a token"
    rows["generator's CPU"] = f"{generator.cpu_share:.0%} of a core{per_token}"
    rows["sent late, p99"] = f"{generator.late_p99_ms:.1f} ms"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def latency_table(made: Report) -> Table:
    """Percentiles in milliseconds."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("milliseconds")
    for column in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="right")
    for name, words in LATENCIES.items():
        latency = made.latency_ms[name]
        if latency is not None:
            values = (latency.mean, latency.p50, latency.p90, latency.p99, latency.max)
            table.add_row(words, *(f"{value:.1f}" for value in values))
    return table
