"""What the quality tables rest on: inputs from transformers, errors as products written out, AWQ's scales undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heddle.bench import quantised_weights
from heddle.bench.layer_errors import INPUTS, input_grams, layer_errors
from safetensors.torch import load_file, save_file

from ..model.conftest import save_tiny
from .packers import quantize_model

WINDOWS = [[5, 9, 33, 2, 60, 17, 17, 4], [1, 2, 3, 40, 50, 63, 8]]
GROUP = 16


@pytest.fixture
def base(tmp_path: Path) -> tuple[Path, Any]:
    return tmp_path, save_tiny(tmp_path)


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """float64 [K, tokens] of every linear, from the modules' own calls."""
    seen: dict[str, list[torch.Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda module, args, output, name=name: seen.setdefault(name, []).append(args[0][0].T.double())
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    with torch.no_grad():
        for window in WINDOWS:
            model(torch.tensor([window]))
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts, dim=1) for name, parts in seen.items()}


def test_errors_are_those_of_the_products_with_the_float_models_inputs(
    base: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, model = base
    inputs = inputs_of(model)
    rounded = tmp_path_factory.mktemp("rounded")
    quantised_weights.write_rounded_to_nearest(folder, rounded, GROUP)
    reference = quantised_weights.load(folder, "none")
    forms = {"rounded": quantised_weights.load(rounded, "none")}
    errors, nearest, whole = layer_errors(forms, reference, input_grams(folder, WINDOWS), GROUP)
    changed = load_file(rounded / "model.safetensors")
    total = 0.0
    for name, x in inputs.items():
        weight = model.get_submodule(name).weight.detach().double()
        expected = float(((weight - changed[f"{name}.weight"].double()) @ x).norm())
        total += float((weight @ x).norm())
        _, _, layer, _, module = name.split(".")
        assert module in INPUTS
        assert expected > 0
        assert errors["rounded"].by_linear[f"{layer}.{module}"] == pytest.approx(expected, rel=1e-4)
    assert len(inputs) == len(nearest.by_linear) == 14
    assert nearest.by_linear == pytest.approx(errors["rounded"].by_linear)
    assert whole == pytest.approx(total, rel=1e-4)
    assert list(errors["rounded"].ratios(nearest).values()) == pytest.approx([1.0] * 14)


def test_a_rounded_copy_differs_from_the_base_in_its_linears_alone(base: tuple[Path, Any]) -> None:
    folder, _ = base
    before = load_file(folder / "model.safetensors")
    target = folder / "rounded"
    target.mkdir()
    quantised_weights.write_rounded_to_nearest(folder, target, GROUP)
    after = load_file(target / "model.safetensors")
    assert after.keys() == before.keys()
    for name, weight in before.items():
        same = torch.equal(weight, after[name])
        assert same != name.endswith("_proj.weight"), name
        groups = after[name].unflatten(-1, (-1, GROUP)) if not same else None
        assert groups is None or max(len(group.unique()) for group in groups.flatten(0, -2)) <= 16


def test_scales_that_awq_moved_into_norms_and_up_are_undone(base: tuple[Path, Any]) -> None:
    folder, _ = base
    reference = quantised_weights.load(folder, "none")
    originals = [quantised_weights.of_layer(reference, index, reference) for index in range(2)]
    tensors = load_file(folder / "model.safetensors")
    target = folder / "scaled"
    target.mkdir()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    scales = {}
    for index in range(2):
        prefix = f"model.layers.{index}"
        attention, mlp, inner = (
            torch.exp(torch.randn(size, generator=torch.Generator().manual_seed(seed + index)) * 0.4)
            for seed, size in ((10, 32), (20, 32), (30, 64))
        )
        for part in "qkv":
            tensors[f"{prefix}.self_attn.{part}_proj.weight"] *= attention
        tensors[f"{prefix}.input_layernorm.weight"] /= attention
        tensors[f"{prefix}.mlp.gate_proj.weight"] *= mlp
        tensors[f"{prefix}.mlp.up_proj.weight"] *= mlp
        tensors[f"{prefix}.post_attention_layernorm.weight"] /= mlp
        tensors[f"{prefix}.mlp.up_proj.weight"] /= inner.unsqueeze(1)
        tensors[f"{prefix}.mlp.down_proj.weight"] *= inner
        scales[index] = {"qkv": attention, "gate": mlp, "inner": inner}
    save_file(tensors, target / "model.safetensors")
    import transformers

    scaled: Any = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    packed = quantize_model(scaled, target, "awq", group_size=GROUP)  # its weights: the dequantised ones
    model = quantised_weights.load(target)
    for index in range(2):
        found = quantised_weights.of_layer(model, index, reference)
        held, own = packed.model.layers[index], scales[index]
        exact = {
            part: held.get_submodule(f"self_attn.{part}").weight / own["qkv"] for part in ("q_proj", "v_proj")
        }
        exact["gate_proj"] = held.mlp.gate_proj.weight / own["gate"]
        exact["up_proj"] = held.mlp.up_proj.weight / own["gate"] * own["inner"].unsqueeze(1)
        exact["down_proj"] = held.mlp.down_proj.weight / own["inner"]
        for module, expected in exact.items():
            weight = expected.detach()
            near = (
                1e-5 if module in ("q_proj", "v_proj", "gate_proj") else 0.04
            )  # fitted, on 32 values a feature
            assert (found[module] - weight).norm() < near * weight.norm(), module
            assert (found[module] - originals[index][module]).norm() < 0.3 * weight.norm(), module
