"""What is asked: sizes of request, numbers of streams, adapters; the requests of a round."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from heddle.core.model.config import ModelConfig
from safetensors.numpy import save_file

RANKS = (4, 6, 8, 8, 10, 12, 16, 16)
"""Of the adapters, again and again."""
STRENGTH = 0.01
"""Standard deviation of B: the deltas are small beside the base's own outputs, as trained ones are."""
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Size:
    """Tokens of one request."""

    prompt: int
    new: int

    def __str__(self) -> str:
        return f"{self.prompt}+{self.new}"


@dataclass(frozen=True)
class Cell:
    """One point of the workload."""

    size: Size
    streams: int
    adapters: int
    """0: the base alone."""

    @property
    def load(self) -> str:
        return {0: "base", 1: "1 adapter"}.get(self.adapters, f"{self.adapters} adapters")

    def __str__(self) -> str:
        return f"{self.size}, {self.streams} stream{'s' * (self.streams > 1)}, {self.load}"


SHORT, LONG = Size(64, 64), Size(512, 32)
STREAMS, ADAPTERS = (1, 4, 16, 32), (0, 1, 8, 32)
LONG_STREAMS, LONG_ADAPTERS = (1, 16), (0, 8)
QUICK_PLAN = (Cell(SHORT, 1, 0), Cell(SHORT, 16, 0), Cell(SHORT, 16, 8))


def cells(sizes: Iterable[Size], streams: Iterable[int], adapters: Iterable[int]) -> list[Cell]:
    """Every combination that can be: no more adapters at once than streams."""
    counts, loads = sorted(set(streams)), sorted(set(adapters))
    return [Cell(size, count, load) for size in sizes for load in loads for count in counts if load <= count]


def whole_plan() -> list[Cell]:
    """What the table has by itself; the long prompts with fewer combinations."""
    return cells([SHORT], STREAMS, ADAPTERS) + cells([LONG], LONG_STREAMS, LONG_ADAPTERS)


def adapter_name(number: int) -> str:
    return f"a{number}"


def prompts(cell: Cell, vocab: int, draw: random.Random) -> list[list[int]]:
    """A fresh one for each stream: token ids that nobody has in a cache."""
    return [
        [draw.randrange(vocab // 50, vocab) for _ in range(cell.size.prompt)] for _ in range(cell.streams)
    ]


def choices(cell: Cell) -> list[str | None]:
    """Each stream's adapter: all in turn."""
    return [adapter_name(i % cell.adapters) if cell.adapters else None for i in range(cell.streams)]


def make_adapters(model: ModelConfig, count: int, folder: Path) -> dict[str, Path]:
    """PEFT folders in float16 on all seven projections, random, by name. Raises OSError."""
    made = {}
    for number in range(count):
        rank, chance = RANKS[number % len(RANKS)], np.random.default_rng(number)
        tensors = {}
        for layer in range(model.num_layers):
            for module, (outputs, inputs) in model.linear_shapes.items():
                block = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
                key = f"base_model.model.model.layers.{layer}.{block}.{module}"
                a = chance.standard_normal((rank, inputs), np.float32) / np.sqrt(inputs)
                b = chance.standard_normal((outputs, rank), np.float32) * STRENGTH
                tensors[f"{key}.lora_A.weight"] = a.astype(np.float16)
                tensors[f"{key}.lora_B.weight"] = b.astype(np.float16)
        path = folder / adapter_name(number)
        path.mkdir(parents=True)
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(_settings(rank, list(model.linear_shapes))))
        made[path.name] = path
    return made


def _settings(rank: int, modules: Sequence[str]) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(modules),
        "bias": "none",
    }


def operations(model: ModelConfig, size: Size) -> float:
    """Of one request: two for each weight of the layers and token fed, and for each of the head and new token.

    Attention and adapters are left out: it measures how well the products with the base's weights run.
    """
    layers = model.num_layers * sum(outputs * inputs for outputs, inputs in model.linear_shapes.values())
    head = model.vocab_size * model.hidden_size
    return 2.0 * (layers * (size.prompt + size.new - 1) + head * size.new)
