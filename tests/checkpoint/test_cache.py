"""A folder of the cache is made once and is whole, whoever is interrupted or comes at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from heddle.core.checkpoint import CheckpointError
from heddle.core.checkpoint.cache import cache_root, make_once, silent

SCRIPT = """
import sys, time
from pathlib import Path
from heddle.core.checkpoint.cache import make_once, silent

def build(folder):
    (folder / "first").write_text("1")
    print("building", flush=True)
    time.sleep(float(sys.argv[2]))
    (folder / "second").write_text("2")

print(make_once("model", build, cache_dir=Path(sys.argv[1]), progress=silent), flush=True)
"""


def start(cache: Path, seconds: float) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", SCRIPT, str(cache), str(seconds)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def entries(cache: Path) -> set[str]:
    return {entry.name for entry in (cache / "v1").iterdir() if not entry.name.endswith(".lock")}


def test_the_cache_lies_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HEDDLE_CACHE", raising=False)
    assert cache_root() == tmp_path / ".cache" / "heddle"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_root() == Path("/x/heddle")
    monkeypatch.setenv("HEDDLE_CACHE", "~/own")
    assert cache_root() == tmp_path / "own"
    assert cache_root(Path("/given")) == Path("/given")


def test_a_folder_is_built_once(tmp_path):
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "file").write_text("x")

    for _ in range(2):
        folder = make_once("model", build, cache_dir=tmp_path, progress=silent)
        assert (folder / "file").read_text() == "x"
    assert len(built) == 1


def test_a_build_that_fails_leaves_nothing_behind(tmp_path):
    def build(folder: Path) -> None:
        (folder / "file").write_text("x")
        raise CheckpointError("broken")

    with pytest.raises(CheckpointError, match="broken"):
        make_once("model", build, cache_dir=tmp_path, progress=silent)
    assert entries(tmp_path) == set()


def test_a_killed_build_is_never_used_and_is_cleared_away(tmp_path):
    process = start(tmp_path, 60)
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "v1" / "model").exists()
    assert len(entries(tmp_path)) == 1
    folder = make_once("model", lambda work: (work / "whole").touch(), cache_dir=tmp_path, progress=silent)
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert entries(tmp_path) == {"model"}


def test_processes_that_come_at_the_same_time_build_it_once(tmp_path):
    processes = [start(tmp_path, 0.5) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert sum(lines.count("building") for lines in outputs) == 1
    assert {lines[-1] for lines in outputs} == {str(tmp_path / "v1" / "model")}
    assert {path.name for path in (tmp_path / "v1" / "model").iterdir()} == {"first", "second"}


def test_threads_wait_for_each_other_and_say_so(tmp_path):
    started, reports, built = threading.Event(), [], []

    def build(folder: Path) -> None:
        started.set()
        built.append(folder)
        time.sleep(0.3)

    first = threading.Thread(
        target=make_once, args=("m", build), kwargs={"cache_dir": tmp_path, "progress": silent}
    )
    first.start()
    started.wait()
    make_once("m", build, cache_dir=tmp_path, progress=lambda *report: reports.append(report))
    first.join()
    assert len(built) == 1
    assert reports == [("waiting for another process to make m", 0, 0)]


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=f"cannot write the model cache {tmp_path}"):
        make_once("model", lambda folder: None, cache_dir=tmp_path / "file", progress=silent)
