"""Ratios by hand, aims, and what the table says where something is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from heddle.bench.throughput.__main__ import Run, text
from heddle.bench.throughput.figures import Figures, Round
from heddle.bench.throughput.measure import RowFigures
from heddle.bench.throughput.picture import draw
from heddle.bench.throughput.ratios import aims_reached, memory_beside, over_peers
from heddle.bench.throughput.table import main_table, memory_lines
from heddle.bench.throughput.workload import SHORT, Cell

WITH_8, ALONE = Cell(SHORT, 16, 8), Cell(SHORT, 1, 0)


def figures(cell: Cell, first: float, gap: float, peak_bytes: int = 600_000_000) -> Figures:
    """Of a round in which every stream got its first token after `first` seconds, and then one every `gap`."""
    times = [[first + gap * number for number in range(cell.size.new)] for _ in range(cell.streams)]
    return Figures.of(cell, [Round(seconds=times[0][-1], times=times)], peak_bytes, 1e9)


@pytest.fixture
def rows() -> list[RowFigures]:
    return [
        RowFigures(
            name="int8",
            title="Heddle INT8",
            cells=[figures(ALONE, 0.25, 0.01), figures(WITH_8, 1.0, 0.1)],
            imported_bytes=200_000_000,
            facts={"pool_bytes_written": 90_000_000},
        ),
        RowFigures(name="peft", title="PEFT", cells=[figures(WITH_8, 4.0, 0.4)]),
        RowFigures(name="llama.cpp", title="llama.cpp", cells=[figures(ALONE, 0.5, 0.02)]),
        RowFigures(name="vllm", title="vLLM", left_out="its environment is not there: `make peers-vllm`"),
    ]


def test_ratios_compare_rows_of_the_same_cell(rows):
    ratios = {(r.cell, r.over, r.metric): r.ratio for r in over_peers(rows, [ALONE, WITH_8])}
    assert ratios.keys() == {
        (str(cell), peer, metric)
        for cell, peer in ((WITH_8, "peft"), (ALONE, "llama.cpp"))
        for metric in ("whole", "decode", "first")
    }
    # Everything takes PEFT four times as long, and llama.cpp twice.
    assert [ratios[str(WITH_8), "peft", metric] for metric in ("whole", "decode", "first")] == pytest.approx(
        [4] * 3
    )
    assert ratios[str(ALONE), "llama.cpp", "first"] == pytest.approx(2)


def test_aims_are_judged_where_both_sides_were_measured(rows):
    aims = {(aim.row, aim.over, aim.metric): (aim.ratio, aim.aim) for aim in aims_reached(rows)}
    assert aims == {
        ("int8", "peft", "whole"): (pytest.approx(4), 4.5),
        ("int8", "llama.cpp", "decode"): (pytest.approx(2), 1.2),
        ("int8", "llama.cpp", "prefill"): (pytest.approx(2), 2.5),
    }


def test_an_aim_of_several_rows_is_met_by_the_best(rows):
    rows.append(RowFigures(name="gptq", title="GPTQ", cells=[figures(ALONE, 0.25, 0.005)]))
    best = next(aim for aim in aims_reached(rows) if aim.over == "llama.cpp" and aim.metric == "decode")
    assert (best.row, best.ratio) == ("gptq", pytest.approx(4))


def test_aims_within_one_row_compare_loads():
    base, loaded = Cell(SHORT, 32, 0), Cell(SHORT, 32, 8)
    row = RowFigures(name="int8", title="", cells=[figures(base, 1.0, 0.1), figures(loaded, 2.0, 0.2)])
    (aim,) = aims_reached([row])
    assert (aim.ratio, aim.aim) == (pytest.approx(0.5), 0.85)


def test_memory_is_counted_without_interpreter_torch_and_pool(rows):
    assert memory_beside(rows[0]) == 600_000_000 - 200_000_000 - 90_000_000
    assert memory_beside(rows[1]) is None
    assert memory_lines(rows) == [
        "Heddle INT8: 310 MB beside interpreter and torch (200) and the written part of the pool (90), aim 450"
    ]


def test_a_line_for_each_measured_row_and_cell_and_none_for_others(rows):
    lines = main_table(rows, [ALONE, WITH_8], peak_gflops=100).splitlines()[2:]
    titles = [line.split("|")[4].strip() for line in lines]
    assert titles == ["Heddle INT8", "llama.cpp", "Heddle INT8", "PEFT"]
    assert "J a token" not in main_table(rows, [ALONE], 100)
    whole, decode, prefill, first = (cell.strip() for cell in lines[0].split("|")[5:9])
    assert (whole, decode, prefill, first) == (f"{64 / 0.88:.1f}", "100.0", "256.0", "250")
    assert lines[0].split("|")[13].strip() == f"{1 / 0.88 / 100:.0%}"  # 1e9 operations in 0.88 s


def test_the_text_says_what_was_left_out_and_how_to_have_it(rows):
    run = Run(started="now", processor="a CPU", threads=2, matmul_peak_gflops=100, rows=rows)
    run.over_peers, run.aims = over_peers(rows, [ALONE, WITH_8]), aims_reached(rows)
    said = text(run, [ALONE, WITH_8])
    assert "vLLM: left out, its environment is not there: `make peers-vllm`" in said
    assert "Heddle INT8 / PEFT" in said


def test_the_picture_is_a_png_also_where_rows_have_gaps(rows, tmp_path: Path):
    draw(rows, [ALONE, WITH_8], "title", tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
