"""More adapters than there is memory for, under mixed traffic: the benchmark, at a size for every day."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "many_adapters.py"


def test_thirty_adapters_with_memory_for_three_answer_each_as_alone_and_as_in_peft(
    world: dict[str, Path],
) -> None:
    sizes = {"adapters": 30, "room": 3, "requests": 150, "new": 12, "sample": 25, "peft": 5}
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-P", BENCH, "--base", world["base"], *flags],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
