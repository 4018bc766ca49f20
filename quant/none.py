"""Linears in float, as the checkpoint has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .base import Expected, LinearMethod, LinearSpec, Target, TensorReader, held_dtype, read_bias


class FloatForm:
    """`{name}.weight` [N, K] and, where the model has one, `{name}.bias` [N]."""

    def expected(self, spec: LinearSpec, reader: TensorReader) -> Mapping[str, Expected]:
        found = {f"{spec.name}.weight": Expected((spec.out_features, spec.in_features))}
        if spec.bias:
            found[f"{spec.name}.bias"] = Expected((spec.out_features,))
        return found

    def from_checkpoint(
        self, reader: TensorReader, specs: Sequence[LinearSpec], target: Target
    ) -> LinearMethod:
        rows = sum(spec.out_features for spec in specs)
        dtype = held_dtype((reader.dtype(f"{spec.name}.weight") for spec in specs), target.dtype)
        weight = target.ops.room((rows, specs[0].in_features), dtype, target.device)
        row = 0
        for spec in specs:
            weight[row : row + spec.out_features] = reader.read(f"{spec.name}.weight")
            row += spec.out_features
        bias = read_bias(reader, specs, target.dtype)
        return FloatLinear(weight, None if bias is None else bias.to(target.device), target)


class FloatLinear:
    """A weight [N, K] that is multiplied as it is; it may be narrower than the activations."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, target: Target) -> None:
        self.weight = target.ops.hold(weight)
        self.bias = bias
        self.weight_bytes = self.weight.nbytes + (0 if bias is None else bias.nbytes)
        self._ops = target.ops
        self._product = target.ops.linear_invariant if target.batch_invariant else target.ops.linear

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.weight, self.bias)

    def dequantize(self) -> torch.Tensor:
        return self.weight.matrix().float()

    def rows(self, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._ops.embedding(indices, self.weight, None, dtype)
