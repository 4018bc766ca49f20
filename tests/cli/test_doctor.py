"""`heddle doctor`: findings about this machine, and what they mean for the exit status."""

from __future__ import annotations

import importlib
import json
import subprocess
from typing import Any

import pytest
import torch

DOCTOR = importlib.import_module(
    "heddle.api.cli.doctor"
)  # the package's attribute of that name is the command


def findings_of(heddle) -> tuple[int, dict[str, dict[str, Any]]]:
    result = heddle("doctor", "--json")
    return result.exit_code, {finding["what"]: finding for finding in json.loads(result.stdout)["findings"]}


def test_it_finds_what_torch_finds(heddle):
    status, findings = findings_of(heddle)
    assert status == 0
    assert findings["--device cpu"]["ok"]
    assert torch.__version__ in findings["--device cpu"]["why"]
    assert findings["--device cuda"]["ok"] == torch.cuda.is_available()


def test_a_table_for_people(heddle):
    result = heddle("doctor")
    assert result.exit_code == 0
    assert "--device cuda" in result.stdout
    assert "cache folder" in result.stdout


@pytest.mark.parametrize("probe", ["import no_such_torch", "import os; os.abort()"])
def test_a_torch_that_cannot_be_loaded_is_a_finding_and_status_1(heddle, monkeypatch, probe):
    monkeypatch.setattr(DOCTOR, "PROBE", probe)
    status, findings = findings_of(heddle)
    assert status == 1
    assert not findings["--device cpu"]["ok"]
    assert "torch cannot be used" in findings["--device cpu"]["why"]


def test_a_torch_without_cuda_says_so(heddle, monkeypatch):
    answer = {"torch": "2.13.0+cpu", "built_for": None, "devices": [], "cpu": "AVX2"}
    monkeypatch.setattr(
        DOCTOR.subprocess,
        "run",
        lambda *args, **_: subprocess.CompletedProcess(args, 0, json.dumps(answer) + "\n", ""),
    )
    _, findings = findings_of(heddle)
    assert findings["--device cuda"]["why"] == "torch 2.13.0+cpu is built without CUDA"


def test_a_cache_that_cannot_be_written_is_a_finding(heddle, monkeypatch, tmp_path):
    monkeypatch.setenv("HEDDLE_CACHE", str(tmp_path / "not yet" / "made"))
    monkeypatch.setattr(DOCTOR.os, "access", lambda path, mode: False)
    _, findings = findings_of(heddle)
    assert not findings["cache folder"]["ok"]
    assert f"{tmp_path} is not writable" in findings["cache folder"]["why"]
