"""The rows of the table: which engine in which number form, in which environment, over which cells."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from heddle.core.checkpoint import demo
from heddle.core.checkpoint.cache import FORMAT, cache_root

from .workload import Cell

ROOT = Path(__file__).resolve().parents[2]
NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Row:
    """One line of each cell."""

    name: str
    """On the command line and in JSON."""
    title: str
    peer: str
    """The module of `peers`."""
    options: Mapping[str, Any] = field(default_factory=lambda: NONE)
    packed: Literal["gptq", "awq"] | None = None
    """Serves the demo base in this form, which somebody must have made before."""
    environment: str | None = None
    """A folder beside `.venv` with an environment of its own."""
    can: Callable[[Cell], bool] = lambda cell: True
    process_for: Callable[[int], int] = lambda adapters: 0
    """Cells whose number of adapters gives the same here are served by one process."""

    @property
    def python(self) -> Path:
        return ROOT / self.environment / "bin" / "python" if self.environment else Path(sys.executable)

    @property
    def base(self) -> Path:
        """The model's folder. Raises `CheckpointError` where the demo base cannot be fetched."""
        return packed_base(self.packed) if self.packed else demo.demo_base()

    def missing(self) -> str | None:
        """Why it cannot be measured here, and what would help; None where it can."""
        if self.environment and not (ROOT / self.environment / ".installed").exists():
            return f"its environment {self.environment} is not there: `make {self.environment.removeprefix('.')}`"
        if self.packed and not packed_base(self.packed).is_dir():
            return (
                f"the demo base in {self.packed} has not been made: `heddle demo --quantization {self.packed}` "
                f"makes it in some minutes, and keeps it in {packed_base(self.packed).parent}"
            )
        return None


def packed_base(method: str) -> Path:
    """Where `heddle demo --quantization` keeps it, made or not."""
    return cache_root() / FORMAT / f"{demo.NAME}-{method}"


def one_stream_of_the_base(cell: Cell) -> bool:
    return cell.streams == 1 and cell.adapters == 0


INT8 = {"quantization": "int8"}
ROWS = (
    Row("int8", "Heddle INT8", "heddle_engine", INT8),
    Row(
        "int8-activations",
        "Heddle INT8, int8 activations",
        "heddle_engine",
        INT8 | {"int8_activations": True},
    ),
    Row("gptq", "Heddle GPTQ 4 bit", "heddle_engine", packed="gptq"),
    Row("awq", "Heddle AWQ 4 bit", "heddle_engine", packed="awq"),
    Row(
        "awq-int8-head",
        "Heddle AWQ 4 bit, head in INT8",
        "heddle_engine",
        {"quantize_head": True},
        packed="awq",
    ),
    Row("float32", "Heddle float32", "heddle_engine", {"quantization": "none", "dtype": "float32"}),
    Row("peft", "transformers / PEFT float32", "transformers_peft", process_for=lambda n: n),
    Row(
        "llama.cpp",
        "llama.cpp Q4_1",
        "llama_cpp_python",
        environment=".peers-llama",
        can=one_stream_of_the_base,
    ),
    # Without adapters it compiles the model, with them it does not; and it holds room for as many as it is told.
    Row(
        "vllm",
        "vLLM CPU float32",
        "vllm_cpu",
        environment=".peers-vllm",
        process_for=lambda n: max(8, n) if n else 0,
    ),
)
BY_NAME = {row.name: row for row in ROWS}
OURS = tuple(row.name for row in ROWS if row.peer == "heddle_engine")
ON_REQUEST = ("vllm",)
QUICK = ("int8", "peft")


def cores() -> int:
    """Threads of every engine: the cores that this process may use."""
    return len(os.sched_getaffinity(0))
