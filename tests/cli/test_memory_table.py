"""The table at the start: every part of the model, the pool, host budgets, the process, and why this number form."""

from __future__ import annotations

import io

from heddle.api.cli.memory_table import memory_table, show_memory
from heddle.core.memory import MemoryPart, MemoryReport
from heddle.core.messages import Ready
from rich.console import Console

MIB = 1 << 20
REPORT = MemoryReport(
    device="cpu",
    quantization="int8",
    quantization_reason="asked for; made on loading",
    weight_bytes=162 * MIB,
    weights=[
        MemoryPart.of_model("projections", 102 * MIB, 101 * MIB),
        MemoryPart.of_model("embedding and head", 54 * MIB, 27 * MIB),
        MemoryPart.of_model("norms", 2 * MIB, MIB // 2),
        MemoryPart(part="rotary tables", bytes=4 * MIB),
    ],
    pool_bytes=512 * MIB,
    pool=[MemoryPart(part="free", bytes=512 * MIB, blocks=512)],
    block_bytes=MIB,
    blocks_total=512,
    blocks_free=512,
    blocks_used=0,
    blocks_cached=0,
    blocks_adapters=0,
    table_bytes=3 * MIB,
    host=[MemoryPart(part="adapter copies", bytes=0, budget=2048 * MIB)],
    process_bytes=500 * MIB,
    process=[
        MemoryPart(part="weights", bytes=162 * MIB),
        MemoryPart(part="not accounted for", bytes=338 * MIB),
    ],
)
READY = Ready(
    device="cpu",
    dtype="float32",
    quantization="int8",
    quantization_reason="asked for; made on loading",
    max_model_len=64,
    num_blocks=512,
    block_size=16,
    block_bytes=MIB,
    weight_bytes=162 * MIB,
    memory=REPORT,
)


def lines() -> list[str]:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(memory_table(READY, REPORT))
    return [" ".join(line.split()) for line in console.export_text().splitlines()]


def test_every_part_has_a_line_that_fits_a_narrow_terminal():
    found = lines()
    for line in (
        "int8: asked for; made on loading",
        "projections 102.0 MiB 1.010 bytes a weight",
        "embedding and head 54.0 MiB 2.000 bytes a weight",
        "norms, rotary tables 6.0 MiB",
        "pool of KV and adapters 512.0 MiB 512 blocks of 1.0 MiB",
        "adapter tables 3.0 MiB",
        "adapter copies ≤ 2.0 GiB host memory",
        "engine process 500.0 MiB now; 338.0 MiB of it beside the above",
    ):
        assert line in found


def test_it_goes_to_stderr(capsys):
    show_memory(READY)
    written = capsys.readouterr()
    assert "projections" in written.err
    assert not written.out
