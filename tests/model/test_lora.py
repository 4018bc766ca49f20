"""Adapters in pool blocks against PEFT: each module, several adapters in one batch, several on one row."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from heddle.core.model.llama import LlamaModel
from heddle.kernels.ops import AdapterTables, LoraBatch
from heddle.kernels.pool import Pool
from heddle.lora.base import MODULES

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": list(MODULES)},
    "attention": {"r": 5, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
    "mlp": {"r": 1, "lora_alpha": 2, "target_modules": ["up_proj", "down_proj"], "use_rslora": True},
    "patterns": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["k_proj", "o_proj", "gate_proj"],
        "rank_pattern": {"o_proj": 7},
        "layers_to_transform": [1],
    },
}


def adapted(reference: Any) -> Any:
    """`reference` with all of ADAPTERS loaded by PEFT, A and B random."""
    names = iter(ADAPTERS)
    first = next(names)
    model = peft.get_peft_model(reference, peft.LoraConfig(**ADAPTERS[first]), adapter_name=first)
    for name in names:
        model.add_adapter(name, peft.LoraConfig(**ADAPTERS[name]))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn_like(weight) * 0.2)
    return model.eval()


def expected_logits(model: Any, weights: dict[str, float], tokens: list[int]) -> torch.Tensor:
    """PEFT's logits with the adapters in `weights` active, their scales multiplied by the weights."""
    if not weights:
        with model.disable_adapter(), torch.no_grad():
            return model(torch.tensor([tokens])).logits[0]
    model.base_model.set_adapter(list(weights))
    layers = [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    scales = [dict(layer.scaling) for layer in layers]
    for layer in layers:
        for name, weight in weights.items():
            if name in layer.scaling:
                layer.scaling[name] *= weight
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    for layer, scale in zip(layers, scales):
        layer.scaling.update(scale)
    return logits


class Arena:
    """Adapters written row by row at random aligned places of free pool blocks."""

    def __init__(
        self, pool: Pool, blocks: list[int], num_layers: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.pool = pool
        self.dtype = dtype
        self.places = [
            (block * pool.layout.block_bytes + offset) // 16
            for block in blocks
            # 256 bytes hold any row of the toy model in float32.
            for offset in range(0, pool.layout.block_bytes - 255, 256)
        ]
        random.Random(4).shuffle(self.places)
        shape = (len(ADAPTERS), num_layers, len(MODULES))
        self.ranks = torch.zeros(shape, dtype=torch.int32)
        self.first_row = torch.zeros(shape, dtype=torch.int32)
        self.scales = torch.zeros(shape)
        self.rows: list[int] = []

    def write(self, slot: int, name: str, model: Any) -> None:
        for path, module in model.named_modules():
            if not isinstance(module, peft.tuners.lora.LoraLayer) or name not in module.scaling:
                continue
            layer, index = int(path.split(".layers.")[1].split(".")[0]), MODULES.index(path.split(".")[-1])
            a, b = module.lora_A[name].weight.data, module.lora_B[name].weight.data
            self.ranks[slot, layer, index] = len(a)
            self.first_row[slot, layer, index] = len(self.rows)
            self.scales[slot, layer, index] = module.scaling[name]
            for row in [*a, *b.T]:
                place = self.places.pop()
                first = place * 16 // self.dtype.itemsize
                self.pool.elements(self.dtype)[first : first + len(row)] = row.to(self.dtype)
                self.rows.append(place)

    def tables(self) -> AdapterTables:
        rows = torch.tensor(self.rows, dtype=torch.int32)
        return AdapterTables(self.ranks, self.first_row, self.scales, rows, self.dtype)


def segments(
    tables: AdapterTables, chunks: dict[str, list[int]], uses: dict[str, dict[str, float]]
) -> LoraBatch:
    """One segment an adapter over all rows that use it; a row's adapters come in the order of ADAPTERS."""
    rows_of: dict[str, list[int]] = {}
    first = 0
    for name, tokens in chunks.items():
        rows_of[name] = list(range(first, first + len(tokens)))
        first += len(tokens)
    rows: list[int] = []
    weights: list[float] = []
    starts, slots = [0], []
    for slot, adapter in enumerate(ADAPTERS):
        for name in chunks:
            if adapter in uses[name]:
                rows += rows_of[name]
                weights += [uses[name][adapter]] * len(rows_of[name])
        if len(rows) > starts[-1]:
            starts.append(len(rows))
            slots.append(slot)
    return LoraBatch(
        tables,
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor(weights),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int32),
    )


def prepare(tiny: Any, model: LlamaModel, peft_model: Any) -> tuple[Any, AdapterTables]:
    bench = tiny.Bench(model, num_blocks=160)
    blocks = [bench.free.pop() for _ in range(100)]
    arena = Arena(bench.pool, blocks, model.config.num_layers)
    for slot, name in enumerate(ADAPTERS):
        arena.write(slot, name, peft_model)
    return bench, arena.tables()


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_any_mix_of_adapters_and_base_in_one_forward_equals_peft(
    tiny: Any, tmp_path: Path, backend: str, quantization: str
) -> None:
    reference = tiny.save(tmp_path, attention_bias=True)
    model = tiny.load(tmp_path, backend, quantization=quantization)
    if quantization == "int8":
        for i, layer in enumerate(model.layers):
            widths = {"qkv": layer.qkv, "out": layer.out, "gate_up": layer.gate_up, "down": layer.down}
            for projection in widths.values():
                weight = projection.linear.dequantize()
                for module, begin, end in zip(
                    projection.modules, projection.offsets, projection.offsets[1:], strict=False
                ):
                    part = "self_attn" if module < 4 else "mlp"
                    linear = reference.get_submodule(f"model.layers.{i}.{part}.{MODULES[module]}")
                    linear.weight.data = weight[begin:end].clone()
    peft_model = adapted(reference)
    bench, tables = prepare(tiny, model, peft_model)

    generator = random.Random(1)
    uses: dict[str, dict[str, float]] = {
        "base": {},
        **{name: {name: 1.0} for name in ADAPTERS},
        "again": {"all": 1.0},
        "half": {"attention": 0.5},
        "sum": {"all": 0.7, "mlp": 0.3},
        "three": {"patterns": 1.5, "attention": -0.4, "all": 0.2},
        "base too": {},
    }
    tokens = {name: [generator.randrange(64) for _ in range(generator.randrange(2, 12))] for name in uses}
    expected = {name: expected_logits(peft_model, uses[name], tokens[name]) for name in uses}

    # All prompts but their last token in one forward, in shuffled order, then all last tokens in another.
    names = list(uses)
    generator.shuffle(names)
    begun = {name: tokens[name][:-1] for name in names}
    found = bench.step(begun, segments(tables, begun, uses))
    generator.shuffle(names)
    rest = {name: tokens[name][-1:] for name in names}
    for name, logits in bench.step(rest, segments(tables, rest, uses)).items():
        tiny.close(torch.cat([found[name], logits]), expected[name])


def test_an_adapter_changes_the_answer_and_base_rows_stay_bit_equal(
    tiny: Any, tmp_path: Path, backend: str
) -> None:
    peft_model = adapted(tiny.save(tmp_path))
    model = tiny.load(tmp_path, backend)
    tokens = [5, 9, 2, 44, 17]
    alone = tiny.Bench(model).step({"base": tokens})["base"]
    bench, tables = prepare(tiny, model, peft_model)
    chunks = {"a": tokens, "base": tokens, "b": tokens}
    found = bench.step(chunks, segments(tables, chunks, {"a": {"all": 1.0}, "base": {}, "b": {"mlp": 1.0}}))
    if model.ops.ROWS_INVARIANT:
        assert torch.equal(found["base"], alone)
    tiny.close(found["base"], alone)
    for name in ("a", "b"):
        assert (found[name] - alone).abs().max() > 0.01


def test_the_adapter_read_is_the_one_in_the_pool(tiny: Any, tmp_path: Path, backend: str) -> None:
    """Writing over its pages changes the answer to that of what was written."""
    peft_model = adapted(tiny.save(tmp_path))
    model = tiny.load(tmp_path, backend)
    bench, tables = prepare(tiny, model, peft_model)
    tokens = [5, 9, 2, 44, 17]
    one, two = {"x": tokens}, {"y": tokens}
    before = bench.step(one, segments(tables, one, {"x": {"all": 1.0}}))["x"]
    elements = bench.pool.elements(torch.float32)
    for place in np.unique(tables.rows.numpy()):
        row = elements[place * 4 : place * 4 + 64]
        row[~row.isnan()] = 0.0
    after = bench.step(two, segments(tables, two, {"y": {"all": 1.0}}))["y"]
    tiny.close(after, expected_logits(peft_model, {}, tokens))
    assert (after - before).abs().max() > 0.01
