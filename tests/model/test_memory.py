"""How much memory a loaded model takes, and the loading, as the kernel counts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..quant.random_checkpoint import LARGEST, PROJECTIONS, TABLE, random_checkpoint
from .conftest import save_tiny
from .engine_memory import OVERHEAD, Memory, empty, started

MIB = 1 << 20
LOADS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "float16": ("none", False, {}),
    "int8 as bitsandbytes saved it": ("int8", False, {}),
    "int8 made on loading": ("none", False, {"quantization": "int8"}),
    "int8 made on loading, head too": ("none", False, {"quantization": "int8", "quantize_head": True}),
    "int8, one table for embedding and head": ("none", True, {"quantization": "int8", "quantize_head": True}),
    "gptq with act-order": ("gptq", False, {}),
    "awq": ("awq", False, {}),
}
"""By name: the checkpoint's form, whether head and embedding are tied, and settings."""
PER_WEIGHT = {"none": 2.0, "int8": 1.0 + 4 / 1024, "gptq": 0.5 + 2.5 / 64 + 4 / 1024, "awq": 0.5 + 2.5 / 64}
"""Bytes a weight in the files: codes, scales, zeros, order."""


def packed_bytes(name: str) -> int:
    """What the tensors that are to be held take in files: worked out by hand."""
    form, tied, settings = LOADS[name]
    layers = PER_WEIGHT[settings.get("quantization", form)] * PROJECTIONS
    tables = [2.0] if tied else [2.0, 2.0]
    if settings.get("quantize_head"):
        tables[-1] = PER_WEIGHT["int8"]
    return int(layers + sum(tables) * TABLE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    kinds = {(form, tied) for form, tied, _ in LOADS.values()}
    made = {kind: random_checkpoint(root / f"{kind[0]}-{kind[1]}", kind[0], tied=kind[1]) for kind in kinds}
    return {name: made[form, tied] for name, (form, tied, _) in LOADS.items()}


MEASURED = ("int8 as bitsandbytes saved it", "int8 made on loading", "gptq with act-order", "awq")


@pytest.fixture(scope="module")
def engines(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Memory]:
    """Engine processes on some of the checkpoints, and one that holds nothing."""
    base = empty(tmp_path_factory.mktemp("empty"))
    found = started(
        (base, {"quantization": "int8", "block_size": 128}),
        *((folders[name], LOADS[name][2]) for name in MEASURED),
    )
    return dict(zip(("empty", *MEASURED), found))


@pytest.mark.parametrize("name", MEASURED)
def test_an_engine_s_resident_memory_grows_by_the_packed_weights_alone(
    engines: dict[str, Memory], name: str
) -> None:
    growth = engines[name].resident - engines["empty"].resident
    assert packed_bytes(name) - OVERHEAD <= growth <= packed_bytes(name) + OVERHEAD, (
        f"{growth / MIB:.1f} MiB for {packed_bytes(name) / MIB:.1f} MiB of packed weights"
    )
    peak = engines[name].peak - engines["empty"].peak
    assert peak <= packed_bytes(name) + LARGEST + OVERHEAD, f"{peak / MIB:.1f} MiB at most"


@pytest.mark.parametrize("name", MEASURED)
def test_an_engine_s_own_report_agrees(engines: dict[str, Memory], name: str) -> None:
    report = engines[name].report
    parts = {part.part: part for part in report.weights}
    expected = PER_WEIGHT[LOADS[name][2].get("quantization", LOADS[name][0])]
    assert parts["projections"].bytes_per_weight == pytest.approx(expected, abs=0.02)
    assert parts["projections"].weights == PROJECTIONS
    assert parts["head"].bytes_per_weight == parts["embedding"].bytes_per_weight == 2
    assert abs(report.process_bytes - engines[name].resident) < OVERHEAD
    assert abs(report.process[-1].bytes - engines["empty"].report.process[-1].bytes) < OVERHEAD, (
        "what is not accounted for does not grow with the model"
    )


LOAD = """
import gc, json, sys
from pathlib import Path
import torch
from heddle.core.engine.host_memory import give_back
from heddle.core.model.config import ModelConfig
from heddle.core.model.loader import load_model
from heddle.kernels.ops import for_device

def load(folder, quantization="auto", **settings):
    folder = Path(folder)
    return load_model(
        folder, ModelConfig.load(folder), ops=for_device("cpu", "cpu"), dtype=torch.float32, device="cpu",
        quantization=quantization, **settings,
    )

def status(field):
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field + ":")]
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
load(sys.argv[1], "int8")  # what is imported late is there now
for folder, settings in json.loads(sys.argv[2]):
    model = None
    gc.collect()
    give_back()
    Path("/proc/self/clear_refs").write_text("5")  # its peak counts from here
    before = status("VmRSS")
    model = load(folder, **settings)
    print(json.dumps([status("VmRSS") - before, status("VmHWM") - before, model.weight_bytes]))
"""


@pytest.fixture(scope="module")
def loads(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """A process that does nothing but load, one after another, so that nothing hides a peak: bytes that became
    resident, at most, and by the model's own count."""
    small = tmp_path_factory.mktemp("small")
    save_tiny(small)
    work = [(str(folders[name]), settings) for name, (_, _, settings) in LOADS.items()]
    command = [sys.executable, "-c", LOAD, str(small), json.dumps(work)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    return dict(zip(LOADS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", LOADS)
def test_loading_takes_the_packed_weights_and_one_tensor_more(loads: dict[str, list[int]], name: str) -> None:
    resident, peak, counted = loads[name]
    packed = packed_bytes(name)
    found = (
        f"{resident / MIB:.1f} MiB, at most {peak / MIB:.1f}, for {packed / MIB:.1f} MiB of packed weights"
    )
    assert packed - OVERHEAD <= resident <= packed + OVERHEAD, found
    assert peak <= packed + LARGEST + OVERHEAD, found
    assert abs(counted - packed) < MIB, "the model's own count is right too"
