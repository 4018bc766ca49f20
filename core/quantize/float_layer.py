"""One decoder layer computed plainly in float32 over whole samples: what quantisation measures on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..model.config import ModelConfig
from ..model.rope import cos_sin_table

BATCH = 8
"""Samples computed at a time, which bounds what is needed besides inputs and outputs."""


@dataclass
class FloatLayer:
    """The weights of one layer, by module name; float32, for the driver to change."""

    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    weights: dict[str, torch.Tensor]
    """[N, K] each."""
    biases: dict[str, torch.Tensor | None]

    def linear(
        self, module: str, x: torch.Tensor, weights: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """[..., K] -> [..., N]; `weights` count before the layer's own."""
        return F.linear(x, (weights or self.weights)[module], self.biases[module])


class LayerMath:
    """The parts of a layer's forward, for sequences of `length` tokens from position 0 on."""

    def __init__(self, config: ModelConfig, length: int) -> None:
        self._config = config
        self._cos, self._sin = cos_sin_table(config.rope, config.head_dim, length)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)

    def attention(
        self, layer: FloatLayer, x: torch.Tensor, weights: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Normed input [S, T, hidden] -> the input of o_proj [S, T, heads * head_dim]."""
        q, k, v = (
            layer.linear(module, x, weights).unflatten(2, (-1, self._config.head_dim)).transpose(1, 2)
            for module in ("q_proj", "k_proj", "v_proj")
        )
        mixed = F.scaled_dot_product_attention(
            self._rotate(q), self._rotate(k), v, is_causal=True, enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(2)

    def gated(
        self, layer: FloatLayer, x: torch.Tensor, weights: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Normed input [S, T, hidden] -> the input of down_proj [S, T, intermediate]."""
        return F.silu(layer.linear("gate_proj", x, weights)) * layer.linear("up_proj", x, weights)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """[S, heads, T, head_dim], each half's dimension i turned with the other's (as transformers pairs them)."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            [first * self._cos - second * self._sin, second * self._cos + first * self._sin], dim=-1
        )


def over_samples(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function` of x [S, T, K], a few samples at a time."""
    return torch.cat([function(part) for part in x.split(BATCH)])
