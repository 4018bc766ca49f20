"""AWQ in AutoAWQ's gemm layout: 4 bit, packed along the outputs in an order of its own, zeros as stored."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .base import Expected, LinearSpec, QuantError, TensorReader
from .packed import PackedForm
from .packing import awq_fields

MIDDLE = 8
"""The zero of a file that stores none."""


class AwqForm(PackedForm):
    """qweight int32 [K, N / 8], qzeros int32 [G, N / 8]; feature k of output n is (code - zero) * scale."""

    def packed_tensors(self, spec: LinearSpec, reader: TensorReader) -> Mapping[str, Expected]:
        if spec.in_features % self.group_size(spec):
            raise QuantError(
                f"{spec.name} has {spec.in_features} inputs, "
                f"which groups of {self.group_size(spec)} do not divide"
            )
        words, zeros = spec.out_features // 8, f"{spec.name}.qzeros"
        found = {f"{spec.name}.qweight": self.asked((spec.in_features, words), torch.int32)}
        if self.settings.zero_point or reader.dtype(zeros) is not None:
            found[zeros] = self.asked((self.groups(spec), words), torch.int32)
        return found

    def order(self, spec: LinearSpec, reader: TensorReader) -> torch.Tensor | None:
        return None

    def codes(self, words: torch.Tensor, first: int, last: int) -> torch.Tensor:
        return awq_fields(words[:, first // 8 : last // 8]).t().contiguous()

    def zeros(self, spec: LinearSpec, reader: TensorReader) -> torch.Tensor:
        name = f"{spec.name}.qzeros"
        if reader.dtype(name) is None:
            return torch.full((spec.out_features, self.groups(spec)), MIDDLE, dtype=torch.uint8)
        zeros = awq_fields(reader.read(name)).t().contiguous()
        if not self.settings.zero_point and (zeros != MIDDLE).any():
            raise QuantError(
                f"{name} is not {MIDDLE} throughout, but zero_point is false in {self.settings.source}"
            )
        return zeros
