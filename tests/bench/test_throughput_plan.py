"""Which rows and cells a command line asks for, and what a round sends."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from heddle.bench.throughput import rows
from heddle.bench.throughput.__main__ import _parser, chosen_cells, chosen_rows, main
from heddle.bench.throughput.workload import LONG, SHORT, Cell, Size, cells, choices, prompts, whole_plan


def asked(*arguments: str) -> tuple[list[str], list[Cell]]:
    options = _parser().parse_args(arguments)
    return [row.name for row in chosen_rows(options)], chosen_cells(options)


def test_the_whole_table_has_every_row_but_vllm_and_every_cell_that_can_be():
    names, plan = asked()
    assert names == [
        "int8",
        "int8-activations",
        "gptq",
        "awq",
        "awq-int8-head",
        "float32",
        "peft",
        "llama.cpp",
    ]
    short = [(cell.streams, cell.adapters) for cell in plan if cell.size == SHORT]
    assert set(short) == {
        *((streams, 0) for streams in (1, 4, 16, 32)),
        *((streams, 1) for streams in (1, 4, 16, 32)),
        *((streams, 8) for streams in (16, 32)),
        (32, 32),
    }
    assert len(short) == len(set(short))
    assert {(cell.streams, cell.adapters) for cell in plan if cell.size == LONG} == {(1, 0), (16, 0), (16, 8)}


def test_vllm_is_measured_on_request():
    assert asked("--with-vllm")[0][-1] == "vllm"
    assert asked("--quick", "--with-vllm")[0] == ["int8", "peft", "vllm"]


def test_quick_is_two_rows_and_three_cells():
    assert asked("--quick") == (["int8", "peft"], [Cell(SHORT, 1, 0), Cell(SHORT, 16, 0), Cell(SHORT, 16, 8)])


def test_rows_streams_loads_and_sizes_can_be_chosen():
    arguments = ["--rows", "peft", "int8", "--streams", "2", "--adapters", "0", "2", "3", "--sizes", "5+6"]
    assert asked(*arguments) == (["int8", "peft"], [Cell(Size(5, 6), 2, 0), Cell(Size(5, 6), 2, 2)])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--sizes", "64"],
        ["--sizes", "64+1"],
        ["--streams", "0"],
        ["--adapters", "-1"],
        ["--rows", "nobody"],
        ["--streams", "2", "--adapters", "8"],
    ],
)
def test_what_makes_no_sense_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_llama_cpp_serves_one_stream_of_the_base_alone():
    served = [cell for cell in whole_plan() if rows.BY_NAME["llama.cpp"].can(cell)]
    assert served == [Cell(SHORT, 1, 0), Cell(LONG, 1, 0)]


def test_vllm_serves_the_base_without_and_adapters_with_room_for_them():
    assert [rows.BY_NAME["vllm"].process_for(count) for count in (0, 1, 8, 32)] == [0, 8, 8, 32]


def test_a_row_whose_environment_is_missing_says_how_to_make_it(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    assert "make peers-vllm" in (rows.BY_NAME["vllm"].missing() or "")
    (tmp_path / ".peers-vllm").mkdir()
    (tmp_path / ".peers-vllm" / ".installed").touch()
    assert rows.BY_NAME["vllm"].missing() is None


def test_a_row_whose_quantised_base_is_missing_says_how_to_make_it(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("HEDDLE_CACHE", str(tmp_path))
    assert "heddle demo --quantization awq" in (rows.BY_NAME["awq"].missing() or "")
    rows.packed_base("awq").mkdir(parents=True)
    assert rows.BY_NAME["awq"].missing() is None


def test_every_prompt_is_fresh_and_every_adapter_is_used():
    cell = Cell(Size(40, 2), 4, 3)
    draw = random.Random(1)
    first, second = prompts(cell, 1000, draw), prompts(cell, 1000, draw)
    assert [len(prompt) for prompt in first] == [40] * 4
    assert len({tuple(prompt) for prompt in first + second}) == 8
    assert all(0 <= token < 1000 for prompt in first for token in prompt)
    assert choices(cell) == ["a0", "a1", "a2", "a0"]
    assert choices(Cell(Size(40, 2), 2, 0)) == [None, None]


def test_no_cell_has_more_adapters_than_streams():
    assert [(c.streams, c.adapters) for c in cells([SHORT], [1, 4], [0, 1, 8])] == [
        (1, 0),
        (4, 0),
        (1, 1),
        (4, 1),
    ]
