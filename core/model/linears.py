"""The linears of a layer as the configuration has them: names in the checkpoint, shapes, biases."""

from __future__ import annotations

from ...quant.base import LinearSpec
from .config import ModelConfig


def layer_linears(config: ModelConfig, index: int) -> dict[str, LinearSpec]:
    """Of layer `index`, by module name, in the order of MODULES."""
    biases = dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.attention_bias)
    biases["o_proj"] = config.attention_output_bias
    specs = {}
    for module, (out_features, in_features) in config.linear_shapes.items():
        part = "self_attn" if module in biases else "mlp"
        name = f"model.layers.{index}.{part}.{module}"
        specs[module] = LinearSpec(name, out_features, in_features, biases.get(module, config.mlp_bias))
    return specs
