"""`heddle doctor --compile`: its arguments, what it prints, and its exit status."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

COMPILE = importlib.import_module("heddle.api.cli.compile_kernels")
GOOD = {
    "kernel": "few_rows", "target": "sm_80", "config": {"BLOCK_M": 16}, "status": "ok", "registers": 48, "spills": 0,
    "shared_bytes": 30720, "tensor_cores": "mma.sync", "copies_in_flight": 8, "copy_bits": [128], "load_bits": [],
}  # fmt: skip
BAD = {
    "kernel": "decode",
    "target": "sm_90",
    "config": {},
    "status": "failed",
    "error": "CompilationError: no",
}


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Puts another program in the compiler's place: it prints these lines and ends with this status."""

    def put(lines: list[object], status: int = 0) -> Path:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "stand_in.py").write_text(
            "import os, sys, pathlib\n"
            "asked = (sys.argv[1:], 'TRITON_INTERPRET' in os.environ)\n"
            f"pathlib.Path({str(tmp_path / 'asked')!r}).write_text(repr(asked))\n"
            f"sys.stdout.write({text!r})\nsys.stdout.flush()\n"
            f"sys.exit({'' if not status else repr('the last line')})\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(COMPILE, "CHILD", "stand_in")
        return tmp_path / "asked"

    return put


def test_json_lists_every_build_and_the_kernels_are_compiled_not_interpreted(heddle, child, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    asked = child([{"total": 1}, GOOD])
    result = heddle("doctor", "--compile", "sm_80, sm_90,sm_80", "--compile-dtypes", "float16", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"kernels": [GOOD]}
    assert asked.read_text() == repr((["sm_80,sm_90", "float16"], False))


def test_a_kernel_that_does_not_build_is_named_and_the_status_is_1(heddle, child):
    child([{"total": 2}, GOOD, BAD])
    result = heddle("doctor", "--compile", "sm_80,sm_90", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["kernels"][1]["error"] == "CompilationError: no"
    result = heddle("doctor", "--compile", "sm_80,sm_90")
    assert result.exit_code == 1
    assert "few_rows" in result.stdout
    assert "30720" in result.stdout
    assert "decode sm_90 {}: CompilationError: no" in result.stderr


def test_the_table_tells_how_a_kernel_computes_and_loads(heddle, child):
    other = GOOD | {"tensor_cores": None, "copies_in_flight": 3, "copy_bits": [], "load_bits": [64]}
    child([{"total": 2}, GOOD, other])
    result = heddle("doctor", "--compile", "sm_80")
    assert result.exit_code == 0
    words = result.stdout.split()
    for shown in ("mma.sync,", "none", "3-8", "128", "64"):
        assert shown in words, shown


@pytest.mark.parametrize("lines", [[], [{"total": 2}, GOOD]])
def test_a_compiler_that_dies_is_an_error_with_its_last_words(heddle, child, lines):
    child(lines, status=1)
    result = heddle("doctor", "--compile", "sm_80", "--json")
    assert result.exit_code == 1
    assert "cannot be compiled here: the last line" in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("arguments", [("sm_70",), ("sm_80,",), ("sm_80", "--compile-dtypes", "int8")])
def test_unknown_chips_and_dtypes_are_wrong_usage(heddle, arguments):
    result = heddle("doctor", "--compile", *arguments)
    assert result.exit_code == 2
    assert "is not one of" in result.stderr
