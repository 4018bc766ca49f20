"""What a server shows once the base is loaded: its number form and why, and where the memory is."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from ...core.memory import MemoryReport
from ...core.messages import Ready
from .render import size

SMALL = ("norms", "rotary tables")
"""Parts of the model that share a line."""


def show_memory(ready: Ready) -> None:
    """Print the table to stderr, which keeps stdout to `ready` and the examples."""
    if ready.memory is not None:
        Console(stderr=True, highlight=False, markup=False).print(memory_table(ready, ready.memory))


def memory_table(ready: Ready, report: MemoryReport) -> Table:
    """A line for each thing that takes memory: its size, and what there is to know of it."""
    title = f"{ready.quantization}: {ready.quantization_reason}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for part in report.weights:
        if part.part not in SMALL:
            table.add_row(part.part, size(part.bytes), f"{part.bytes_per_weight:.3f} bytes a weight")
    rest = [part for part in report.weights if part.part in SMALL]
    table.add_row(", ".join(part.part for part in rest), size(sum(part.bytes for part in rest)), "")
    blocks = f"{ready.num_blocks} blocks of {size(ready.block_bytes)}"
    table.add_row("pool of KV and adapters", size(report.pool_bytes), blocks)
    table.add_row("adapter tables", size(report.table_bytes), "")
    for part in report.host:
        table.add_row(part.part, f"≤ {size(part.budget or 0)}", "host memory")
    if report.accelerator:
        table.add_row(ready.device, size(report.device_bytes), _rest(report.accelerator[-1].bytes))
    table.add_row("engine process", size(report.process_bytes), _rest(report.process[-1].bytes))
    return table


def _rest(count: int) -> str:
    return f"now; {size(count)} of it beside the above"
