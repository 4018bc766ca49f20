"""Compiled kernels are kept on disk, under the sources they were compiled from, wherever a folder can be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
from heddle.kernels import cpu
from heddle.kernels.cpu import norm_rope
print(cpu.silu_mul(torch.tensor([[1.0, 2.0]])).item(), sum(norm_rope._silu_all.stats.cache_hits.values()))
"""


def run(cache: Path) -> tuple[float, int]:
    """silu(1) * 2 in a fresh process, and how many kernels it took from the disk."""
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | {
        "XDG_CACHE_HOME": str(cache)
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    value, hits = done.stdout.split()
    return float(value), int(hits)


def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    first, second = run(tmp_path), run(tmp_path)
    assert first == (1.4621171951293945, 0)
    assert second == (1.4621171951293945, 1)
    [folder] = (tmp_path / "heddle").iterdir()
    assert list(folder.rglob("*.nbc"))


def test_without_a_writable_folder_kernels_still_run(tmp_path: Path) -> None:
    """The home is a file, so that not even root can make a folder in it."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert run(blocked) == (1.4621171951293945, 0)
