"""Triton's kernels as a GPU would get them, built without one: in a child, since here they are interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

CHOSEN = """
import json, sys, torch
from heddle.kernels.triton.compile_report import builds, compile_one
capability, kernels, seen = int(sys.argv[1]), sys.argv[2].split(), set()
for build in builds((torch.float16,)):
    name = build.launch.name
    label = (name, build.signature["pool"], build.constants["D"]) if name in kernels else name
    if (kernels and name not in kernels) or label in seen:
        continue
    seen.add(label)
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


def chosen(capability: int, *kernels: str) -> list[dict[str, Any]]:
    """One build of each kernel; or of these, one for each cache and size of head. All work, and spill nothing."""
    reports = [json.loads(line) for line in child(CHOSEN, str(capability), " ".join(kernels)).splitlines()]
    for report in reports:
        assert report["status"] == "ok", report
        assert report["spills"] == 0, report
        assert 0 < report["registers"] <= 255
        assert not report["contracted"], f"{report['kernel']}: its bits would depend on where"
    return reports


def test_every_kernel_builds_without_spills_and_uses_what_the_chip_has() -> None:
    found = {report["kernel"]: report for report in chosen(80)}
    assert {
        "codes_and_outliers",
        "dequantise",
        "draw",
        "finish",
        "merge_parts",
        "rms_norm",
        "rope_and_write",
        "silu_mul",
        "embedding",
        "weigh",
    } < set(found)
    for name in ("few_rows", "few_rows_packed", "many_rows", "shrink", "add_deltas", "decode", "prefill"):
        assert found[name]["tensor_cores"] == "mma.sync", name
        assert found[name]["copies_in_flight"] >= 2, name
        assert max(found[name]["copy_bits"]) == 128, name
    assert found["expand"]["tensor_cores"] == "mma.sync"


@pytest.mark.parametrize("capability", [80, 86])
def test_prompts_are_attended_to_over_every_cache_and_size_of_head_without_spills(capability: int) -> None:
    """Where shared memory is smallest, and where registers were too few."""
    reports = chosen(capability, "prefill")
    caches = {(report["config"]["pool"], report["config"]["D"]) for report in reports}
    assert caches == {(cache, size) for cache in ("*fp16", "*i8") for size in (64, 128, 256)}


def test_no_number_of_rows_pairs_or_blocks_asks_for_another_build() -> None:
    """What a launch is compiled for depends on the model and on the tile, never on lengths."""
    assert child(KEYS).strip() == "no new key"
