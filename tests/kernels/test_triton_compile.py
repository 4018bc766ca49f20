"""Triton's kernels as a GPU would get them, built without one: in a child, since here they are interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

ONE_OF_EACH = """
import json, sys, torch
from heddle.kernels.triton.compile_report import builds, compile_one
capability, seen = int(sys.argv[1]), set()
for build in builds((torch.float16,)):
    if build.launch.name not in seen:
        seen.add(build.launch.name)
        print(json.dumps(compile_one(build, capability)), flush=True)
"""
KEYS = """
import random, torch
from heddle.kernels.triton.compile_cases import cases
from heddle.kernels.triton.compile_report import builds, specialise
from heddle.kernels.triton.launch import recorded
known = {build.key for build in builds((torch.float16,))}
random.seed(1)
for _ in range(50):
    sequences, chunk = random.randrange(1, 200), random.choice((0, random.randrange(1, 2000)))
    batches = ((sequences, sequences + chunk, random.randrange(1, 600)),)
    rows, pairs = random.randrange(1, 3000), random.randrange(1, 3000)
    for case in cases((torch.float16,), rows=(rows,), pairs=(pairs,), batches=batches):
        with recorded(run=False) as launches:
            case()
        for launch in launches:
            assert specialise(launch).key in known, (rows, pairs, batches, specialise(launch))
print("no new key")
"""


def child(script: str, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *arguments],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_kernel_builds_without_spills_and_uses_what_the_chip_has() -> None:
    found: dict[str, dict[str, Any]] = {}
    for line in child(ONE_OF_EACH, "80").splitlines():
        report = json.loads(line)
        found[report["kernel"]] = report
    for name, report in found.items():
        assert report["status"] == "ok", (name, report.get("error"))
        assert report["spills"] == 0, name
        assert 0 < report["registers"] <= 255
    assert {
        "dequantise",
        "finish",
        "merge_parts",
        "rms_norm",
        "rope_and_write",
        "silu_mul",
        "embedding",
    } < set(found)
    for name in ("few_rows", "few_rows_packed", "many_rows", "shrink", "add_deltas", "decode", "prefill"):
        assert found[name]["tensor_cores"] == "mma.sync", name
        assert found[name]["copies_in_flight"] >= 2, name
        assert max(found[name]["copy_bits"]) == 128, name
    assert found["expand"]["tensor_cores"] == "mma.sync"


def test_no_number_of_rows_pairs_or_blocks_asks_for_another_build() -> None:
    """What a launch is compiled for depends on the model and on the tile, never on lengths."""
    assert child(KEYS).strip() == "no new key"
