"""Tiny random models as transformers saves them, and a bench that runs them through the paged pool."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from heddle.core.model.config import ModelConfig
from heddle.core.model.forward_batch import ForwardBatch
from heddle.core.model.llama import LlamaModel
from heddle.core.model.loader import load_model
from heddle.kernels.ops import AttentionBatch, LoraBatch, for_device
from heddle.kernels.pool import Pool, PoolLayout

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def save_tiny(folder: Path, kind: str = "Llama", *, shards: str = "1GB", **changes: Any) -> Any:
    """A random model of `kind` with every weight and bias far from its usual start; returns it, float32."""
    config = getattr(transformers, f"{kind}Config")(**{**TINY, **changes})
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + ("norm" in name))
    model.save_pretrained(folder, max_shard_size=shards)
    return model


class Bench:
    """One model over its own pool: shuffled block ids, and NaN wherever nothing was written."""

    def __init__(self, model: LlamaModel, *, num_blocks: int = 64, block_size: int = 4) -> None:
        config = model.config
        self.model = model
        self.block_size = block_size
        layout = PoolLayout(
            config.num_layers, config.num_kv_heads, config.head_dim, block_size, torch.float32
        )
        self.pool = Pool(layout, num_blocks)
        self.pool.elements(torch.float32).fill_(torch.nan)
        self.free = list(range(num_blocks))
        random.Random(5).shuffle(self.free)
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def step(self, chunks: dict[str, list[int]], lora: LoraBatch | None = None) -> dict[str, torch.Tensor]:
        """One forward in which each named sequence gets its next tokens; its logits [tokens, vocab]."""
        slots, positions, ends = [], [], [0]
        for name, tokens in chunks.items():
            table = self.tables.setdefault(name, [])
            start = self.lengths.get(name, 0)
            self.lengths[name] = start + len(tokens)
            while len(table) * self.block_size < start + len(tokens):
                table.append(self.free.pop())
            for position in range(start, start + len(tokens)):
                block, offset = divmod(position, self.block_size)
                slots.append(table[block] * self.block_size + offset)
                positions.append(position)
            ends.append(len(positions))
        width = max(len(self.tables[name]) for name in chunks)
        tables = [self.tables[name] + [0] * (width - len(self.tables[name])) for name in chunks]
        attention = AttentionBatch(
            block_tables=torch.tensor(tables, dtype=torch.int32),
            cu_seqlens_q=torch.tensor(ends, dtype=torch.int32),
            context_lens=torch.tensor([self.lengths[name] for name in chunks], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
        )
        tokens = torch.tensor([token for chunk in chunks.values() for token in chunk])
        batch = ForwardBatch(tokens, torch.tensor(positions), attention, lora)
        logits = self.model.logits(self.model.forward(batch, self.pool))
        assert logits.dtype == torch.float32
        return {name: logits[ends[i] : ends[i + 1]] for i, name in enumerate(chunks)}


def load(folder: Path, backend: str = "reference", **options: Any) -> LlamaModel:
    """Load `folder` on the CPU in float32 unless `options` say otherwise."""
    settings: dict[str, Any] = {"quantization": "auto", "dtype": torch.float32, "device": "cpu", **options}
    return load_model(folder, ModelConfig.load(folder), ops=for_device("cpu", backend), **settings)


def oracle(model: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' logits [tokens, vocab] for one sequence."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float()


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Assert that the largest difference is within `tolerance` of the largest expected value."""
    assert found.shape == expected.shape
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tiny() -> Any:
    """The helpers of this file, for tests that cannot import it."""
    return SimpleNamespace(save=save_tiny, load=load, Bench=Bench, oracle=oracle, close=close)


@pytest.fixture
def prompts() -> dict[str, list[int]]:
    generator = random.Random(2)
    return {
        name: [generator.randrange(64) for _ in range(length)]
        for name, length in {"a": 21, "b": 1, "c": 8, "d": 13}.items()
    }
