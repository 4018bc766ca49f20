"""Adapters over quantised bases: PEFT's answer on the dequantised weights, and a base they leave untouched."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from heddle.core.model.llama import LlamaModel
from heddle.lora.base import MODULES

from ..model.conftest import Bench, close, load, save_tiny
from ..model.test_int8_model import with_dequantised_weights
from ..model.test_lora import ADAPTERS, Arena, adapted, expected_logits, segments
from .packers import quantize_model

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("gptq", {}),
    "gptq in act-order": ("gptq", {"act_order": "each", "symmetric": True}),
    "gptq in 8 bit": ("gptq", {"bits": 8, "group_size": 32}),
    "awq": ("awq", {}),
}


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["int8", *FORMS])
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any, str]:
    """A checkpoint's folder, transformers' model of the dequantised weights, and what --quantization is."""
    reference = save_tiny(tmp_path, attention_bias=True)
    if request.param == "int8":
        return tmp_path, with_dequantised_weights(reference), "int8"
    method, how = FORMS[request.param]
    return tmp_path, quantize_model(reference, tmp_path, method, **how), "auto"


def prepare(model: LlamaModel, peft_model: Any, dtype: torch.dtype = torch.float32) -> tuple[Bench, Arena]:
    bench = Bench(model, num_blocks=160)
    blocks = [bench.free.pop() for _ in range(100)]
    arena = Arena(bench.pool, blocks, model.config.num_layers, dtype)
    for slot, name in enumerate(ADAPTERS):
        arena.write(slot, name, peft_model)
    return bench, arena


def rounded(peft_model: Any, dtype: torch.dtype) -> Any:
    """Adapters whose values a file in `dtype` holds exactly."""
    with torch.no_grad():
        for name, weight in peft_model.named_parameters():
            if "lora_" in name:
                weight.copy_(weight.to(dtype))
    return peft_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_mix_of_adapters_equals_peft_on_the_dequantised_weights(
    packed: tuple[Path, Any, str], backend: str, dtype: torch.dtype
) -> None:
    """Adapters kept in float32 and in float16; prefill, then decode."""
    folder, reference, quantization = packed
    peft_model = rounded(adapted(reference), dtype)
    bench, arena = prepare(load(folder, backend, quantization=quantization), peft_model, dtype)
    generator = random.Random(1)
    uses: dict[str, dict[str, float]] = {
        "base": {},
        **{name: {name: 1.0} for name in ADAPTERS},
        "three": {"patterns": 1.5, "attention": -0.4, "all": 0.2},
    }
    tokens = {name: [generator.randrange(64) for _ in range(generator.randrange(2, 12))] for name in uses}
    expected = {name: expected_logits(peft_model, uses[name], tokens[name]) for name in uses}
    begun = {name: tokens[name][:-1] for name in uses}
    found = bench.step(begun, segments(arena.tables(), begun, uses))
    rest = {name: tokens[name][-1:] for name in uses}
    for name, logits in bench.step(rest, segments(arena.tables(), rest, uses)).items():
        close(torch.cat([found[name], logits]), expected[name], 1e-5)


@pytest.mark.parametrize("module", MODULES)
def test_each_projection_alone_equals_peft(
    packed: tuple[Path, Any, str], monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    for name in list(ADAPTERS):
        monkeypatch.delitem(ADAPTERS, name)
    monkeypatch.setitem(ADAPTERS, "one", {"r": 3, "lora_alpha": 6, "target_modules": [module]})
    folder, reference, quantization = packed
    peft_model = adapted(reference)
    assert isinstance(peft_model, peft.PeftModel)
    bench, arena = prepare(load(folder, "cpu", quantization=quantization), peft_model)
    tokens, use = [5, 9, 2, 44, 17, 3], {"x": {"one": 1.0}}
    prefill, decode = {"x": tokens[:-1]}, {"x": tokens[-1:]}
    steps = [bench.step(part, segments(arena.tables(), part, use))["x"] for part in (prefill, decode)]
    expected = expected_logits(peft_model, {"one": 1.0}, tokens)
    close(torch.cat(steps), expected, 1e-5)
    assert (expected - expected_logits(peft_model, {}, tokens)).abs().max() > 1e-3


def test_base_logits_are_the_same_bits_after_adapters_came_and_went(
    packed: tuple[Path, Any, str], backend: str
) -> None:
    folder, reference, quantization = packed
    peft_model = adapted(reference)
    model = load(folder, backend, quantization=quantization)
    tokens = [5, 9, 2, 44, 17]
    before = Bench(model).step({"a": tokens})["a"]
    for _ in range(20):
        bench, arena = prepare(model, peft_model)
        chunk = {"x": tokens}
        used = bench.step(chunk, segments(arena.tables(), chunk, {"x": {"all": 1.0}}))["x"]
        assert (used - before).abs().max() > 0.01
    assert torch.equal(Bench(model).step({"a": tokens})["a"], before)
