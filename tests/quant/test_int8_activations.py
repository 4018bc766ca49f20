"""Whole models whose activations are rounded to int8 too, on request and over INT8 bases alone."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from heddle.core.model.config import ModelError
from heddle.kernels.ops import W8A8_MAX_K
from heddle.quant.base import LinearSpec, QuantError, Target
from heddle.quant.detect import detect
from heddle.quant.int8 import Int8Form, Int8Linear
from heddle.quant.side_by_side import SideBySide

from ..model.conftest import Bench, close, load, oracle, save_tiny
from ..model.test_int8_model import save_packed, with_dequantised_weights
from ..model.test_lora import ADAPTERS, Arena, adapted, expected_logits, segments
from .packers import configure, quantize_model

TOKENS = [(i * 37) % 64 for i in range(21)]


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """bitsandbytes warns at each product of the activations it rounds to float16."""
    caplog.set_level(logging.ERROR)


def logits(folder: Path, backend: str = "cpu", **options: Any) -> torch.Tensor:
    return Bench(load(folder, backend, **options)).step({"a": TOKENS})["a"]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def bitsandbytes_logits(packed: Path) -> torch.Tensor:
    """transformers and bitsandbytes on one token a step, so that no row meets another's outlier columns."""
    model = transformers.AutoModelForCausalLM.from_pretrained(packed, device_map="cpu", dtype=torch.float32)
    cache, rows = transformers.DynamicCache(), []
    with torch.no_grad():
        for token in TOKENS:
            rows.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0, 0])
    return torch.stack(rows).float()


def test_logits_are_as_near_to_the_float_models_as_bitsandbytes_own(tmp_path: Path, backend: str) -> None:
    """Within 5 %; float activations, the default, are nearer than either."""
    reference = save_packed(_Tiny, tmp_path, attention_bias=True)
    plain = oracle(reference, TOKENS)
    theirs = error(bitsandbytes_logits(tmp_path / "packed"), plain)
    packed = logits(tmp_path / "packed", backend, int8_activations=True)
    ours, weight_only = error(packed, plain), error(logits(tmp_path / "packed", backend), plain)
    assert 0.005 < ours < 0.05
    assert ours < 1.25 * theirs
    assert weight_only < 0.8 * theirs
    made = logits(tmp_path / "float", backend, quantization="int8", int8_activations=True)
    assert torch.equal(made, packed)


class _Tiny:
    save = staticmethod(save_tiny)


def test_a_note_at_the_start_says_so(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (note,) = load(tmp_path, quantization="int8", int8_activations=True).notes
    assert "8 bits" in note
    assert "6 and more" in note
    assert "--int8-activations" in note
    assert load(tmp_path, quantization="int8").notes == ()


def test_a_threshold_of_the_checkpoint_is_used(tmp_path: Path, backend: str) -> None:
    save_packed(_Tiny, tmp_path)
    packed = tmp_path / "packed"
    settings = load_settings(packed)
    assert settings["llm_int8_threshold"] == 6.0
    default = logits(packed, backend, int8_activations=True)
    weight_only = logits(packed, backend)
    configure(packed, quantization_config={**settings, "llm_int8_threshold": 1e-6})
    close(logits(packed, backend, int8_activations=True), weight_only, 1e-5)  # everything is an outlier
    configure(packed, quantization_config={**settings, "llm_int8_threshold": 0.5})
    model = load(packed, backend, int8_activations=True)
    assert "0.5 and more" in model.notes[0]
    assert error(Bench(model).step({"a": TOKENS})["a"], default) > 1e-3
    configure(packed, quantization_config={**settings, "llm_int8_threshold": 0})
    assert "and more" not in load(packed, backend, int8_activations=True).notes[0]


def load_settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = transformers.AutoConfig.from_pretrained(folder).quantization_config
    return dict(settings)


@pytest.mark.parametrize("bad", [-1, "6.0", True, float("inf"), float("nan")])
def test_a_threshold_that_is_no_magnitude_is_refused(bad: Any) -> None:
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": bad}
    tensors = {"model.layers.0.self_attn.q_proj.weight": torch.int8}
    assert detect("auto", settings, tensors).notes == ()
    with pytest.raises(QuantError, match=r"config\.json: llm_int8_threshold"):
        detect("auto", settings, tensors, int8_activations=True)


@pytest.mark.parametrize("form", ["none", "gptq", "awq"])
def test_other_forms_are_refused(tmp_path: Path, form: str) -> None:
    reference = save_tiny(tmp_path)
    if form != "none":
        quantize_model(reference, tmp_path, form)
    with pytest.raises(ModelError, match=rf"--int8-activations needs .*int8.*(float|{form.upper()})"):
        load(tmp_path, int8_activations=True)


def test_rows_too_long_for_sums_of_32_bits_are_refused_by_name(tmp_path: Path) -> None:
    target = Target(load(save_tiny(tmp_path) and tmp_path).ops, torch.float32, torch.device("cpu"))
    with pytest.raises(QuantError, match=rf"p has {W8A8_MAX_K + 1} inputs"):
        Int8Form(6.0).from_checkpoint(
            {},  # type: ignore[arg-type]
            [LinearSpec("p", 1, W8A8_MAX_K + 1, False)],
            target,
        )


def test_linears_left_in_float_stay_so(tmp_path: Path) -> None:
    save_packed(_Tiny, tmp_path, skip=["lm_head", "k_proj"])
    model = load(tmp_path / "packed", "cpu", int8_activations=True)
    layer = model.layers[0]
    assert isinstance(layer.qkv.linear, SideBySide)
    assert isinstance(layer.down.linear, Int8Linear)
    assert layer.down.linear.threshold == 6.0
    assert not isinstance(model.head, Int8Linear)


def test_a_head_in_int8_on_request_keeps_float_activations(tmp_path: Path) -> None:
    """What decides the next token is not rounded further."""
    save_tiny(tmp_path)
    model = load(tmp_path, "cpu", quantization="int8", int8_activations=True, quantize_head=True)
    assert isinstance(model.head, Int8Linear)
    assert model.head.threshold is None


def test_any_chunks_and_neighbours_give_the_same_bits(tmp_path: Path) -> None:
    save_tiny(tmp_path, attention_bias=True, mlp_bias=True)
    model = load(tmp_path, "cpu", quantization="int8", int8_activations=True)
    generator = random.Random(3)
    prompts = {
        name: [generator.randrange(64) for _ in range(length)]
        for name, length in {"a": 21, "b": 1, "c": 8, "d": 13}.items()
    }
    alone = {name: Bench(model).step({name: tokens})[name] for name, tokens in prompts.items()}
    together = Bench(model).step(prompts)
    assert all(torch.equal(together[name], alone[name]) for name in prompts)
    bench, found = Bench(model), {name: [torch.empty(0, 64)] for name in prompts}
    while left := {name: tokens for name, tokens in prompts.items() if tokens}:
        names = generator.sample(sorted(left), generator.randrange(1, len(left) + 1))
        sizes = {name: generator.randrange(1, len(left[name]) + 1) for name in names}
        for name, rows in bench.step({name: left[name][: sizes[name]] for name in names}).items():
            found[name].append(rows)
            prompts[name] = prompts[name][sizes[name] :]
    assert all(torch.equal(torch.cat(found[name]), alone[name]) for name in alone)


def test_adapters_take_the_activations_as_they_are_before_rounding(tmp_path: Path, backend: str) -> None:
    """Their deltas have the error of the base's activations, never of a second rounding."""
    reference = save_tiny(tmp_path)
    peft_model = adapted(with_dequantised_weights(reference))
    model = load(tmp_path, backend, quantization="int8", int8_activations=True)
    bench = Bench(model, num_blocks=160)
    arena = Arena(bench.pool, [bench.free.pop() for _ in range(100)], model.config.num_layers)
    for slot, name in enumerate(ADAPTERS):
        arena.write(slot, name, peft_model)
    for name in ADAPTERS:
        chunk, use = {name: TOKENS}, {name: {name: 1.0}}
        found = bench.step(chunk, segments(arena.tables(), chunk, use))[name]
        assert error(found, expected_logits(peft_model, {name: 1.0}, TOKENS)) < 0.05
    layer = model.layers[0]
    x = torch.randn(3, 32)
    chunk, use = {"x": [0, 0, 0]}, {"x": {"all": 1.0}}
    batch = segments(arena.tables(), chunk, use)
    out = layer.out.linear.apply(x)
    base = out.clone()
    model.ops.add_lora(out, x, bench.pool, 0, layer.out.modules, layer.out.offsets, batch)
    proj = peft_model.base_model.model.model.layers[0].self_attn.o_proj
    delta = proj.lora_B["all"](proj.lora_A["all"](x)) * proj.scaling["all"]
    torch.testing.assert_close(out - base, delta.detach(), rtol=1e-4, atol=1e-4)
