"""How far each linear of a quantised model is from the float one on calibration inputs: |(W - W') X|, Frobenius."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from heddle.bench import float_model, quantised_weights
from heddle.core.model.llama import LlamaModel

INPUTS = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "o_proj": "out",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
}
"""Which of a layer's four inputs each linear takes."""

HOOKED = {
    "qkv": "self_attn.q_proj",
    "out": "self_attn.o_proj",
    "gate_up": "mlp.gate_proj",
    "down": "mlp.down_proj",
}

Grams = Sequence[Mapping[str, torch.Tensor]]
"""For each layer and each of its four inputs X [K, tokens]: X X', float32 [K, K]."""


@torch.inference_mode()
def input_grams(base: Path, windows: Sequence[Sequence[int]]) -> Grams:
    """Of the float32 model in transformers; |D X|² is then the trace of D X X' D'."""
    model = float_model.load(base)
    grams: list[dict[str, torch.Tensor]] = [{} for _ in model.model.layers]

    def hook(layer: int, name: str) -> Callable[[Any, tuple[torch.Tensor, ...]], None]:
        def add(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].flatten(0, -2)
            known = grams[layer].get(name)
            grams[layer][name] = x.T @ x if known is None else known.addmm_(x.T, x)

        return add

    for index, layer in enumerate(model.model.layers):
        for name, path in HOOKED.items():
            layer.get_submodule(path).register_forward_pre_hook(hook(index, name))
    for window in windows:
        model.model(torch.tensor([list(window)]), use_cache=False)
    return grams


@dataclass
class LayerErrors:
    """|(W - W') X| of every linear, by "layer.module", of one form."""

    by_linear: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.by_linear.values())

    def ratios(self, other: LayerErrors) -> dict[str, float]:
        """By linear, this form's error over the other's."""
        return {name: error / other.by_linear[name] for name, error in self.by_linear.items()}


@torch.inference_mode()
def layer_errors(
    forms: Mapping[str, LlamaModel], reference: LlamaModel, grams: Grams, group_size: int
) -> tuple[dict[str, LayerErrors], LayerErrors, float]:
    """The errors of each of `forms` and of rounding to nearest, and the sum of |W X|."""
    found = {name: LayerErrors() for name in forms}
    nearest, whole = LayerErrors(), 0.0
    for index in range(reference.config.num_layers):
        floats = quantised_weights.of_layer(reference, index, reference)
        weights = {name: quantised_weights.of_layer(model, index, reference) for name, model in forms.items()}
        for module, original in floats.items():
            gram, linear = grams[index][INPUTS[module]], f"{index}.{module}"
            whole += _norm(original, gram)
            rounded = quantised_weights.rounded_to_nearest(original, group_size)
            nearest.by_linear[linear] = _norm(original - rounded, gram)
            for name in forms:
                found[name].by_linear[linear] = _norm(original - weights[name][module], gram)
    return found, nearest, whole


def _norm(difference: torch.Tensor, gram: torch.Tensor) -> float:
    return float(((difference @ gram) * difference).sum(dtype=torch.float64).clamp(min=0).sqrt())
