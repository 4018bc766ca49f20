"""Adapters over packed bases: PEFT's answer on the dequantised weights, and a base they leave untouched."""

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


@pytest.fixture(params=FORMS)
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A checkpoint's folder, and transformers' model of its weights."""
    method, how = FORMS[request.param]
    return tmp_path, quantize_model(save_tiny(tmp_path, attention_bias=True), tmp_path, method, **how)


def prepare(model: LlamaModel, peft_model: Any) -> tuple[Bench, Arena]:
    bench = Bench(model, num_blocks=160)
    arena = Arena(bench.pool, [bench.free.pop() for _ in range(100)], model.config.num_layers)
    for slot, name in enumerate(ADAPTERS):
        arena.write(slot, name, peft_model)
    return bench, arena


def test_any_mix_of_adapters_equals_peft_on_the_dequantised_weights(
    packed: tuple[Path, Any], backend: str
) -> None:
    folder, reference = packed
    peft_model = adapted(reference)
    bench, arena = prepare(load(folder, backend), peft_model)
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
    packed: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    for name in list(ADAPTERS):
        monkeypatch.delitem(ADAPTERS, name)
    monkeypatch.setitem(ADAPTERS, "one", {"r": 3, "lora_alpha": 6, "target_modules": [module]})
    folder, reference = packed
    peft_model = adapted(reference)
    assert isinstance(peft_model, peft.PeftModel)
    bench, arena = prepare(load(folder, "cpu"), peft_model)
    tokens, use = [5, 9, 2, 44, 17, 3], {"x": {"one": 1.0}}
    prefill, decode = {"x": tokens[:-1]}, {"x": tokens[-1:]}
    steps = [bench.step(part, segments(arena.tables(), part, use))["x"] for part in (prefill, decode)]
    expected = expected_logits(peft_model, {"one": 1.0}, tokens)
    close(torch.cat(steps), expected, 1e-5)
    assert (expected - expected_logits(peft_model, {}, tokens)).abs().max() > 1e-3


def test_base_logits_are_the_same_bits_after_adapters_came_and_went(
    packed: tuple[Path, Any], backend: str
) -> None:
    folder, reference = packed
    peft_model = adapted(reference)
    model = load(folder, backend)
    tokens = [5, 9, 2, 44, 17]
    before = Bench(model).step({"a": tokens})["a"]
    for _ in range(20):
        bench, arena = prepare(model, peft_model)
        chunk = {"x": tokens}
        used = bench.step(chunk, segments(arena.tables(), chunk, {"x": {"all": 1.0}}))["x"]
        assert (used - before).abs().max() > 0.01
    assert torch.equal(Bench(model).step({"a": tokens})["a"], before)
