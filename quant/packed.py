"""Linears in packed 4 or 8 bit codes, and what reading them has in common whichever tool wrote the file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from ..kernels.packed_weight import BLOCK, PackedWeight, pack
from .base import FLOATS, Expected, LinearMethod, LinearSpec, QuantError, Target, TensorReader, read_bias
from .settings import PackedSettings
from .side_by_side import SideBySide

CHUNK = 1 << 20
"""Codes unpacked at a time, a byte each: little enough not to show in the peak of memory."""


class PackedLinear:
    """A packed weight [N, K] that stays packed; multiplied as the values it stands for."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, target: Target) -> None:
        self.weight = target.ops.hold_packed(weight)
        self.bias = bias
        self.weight_bytes = self.weight.nbytes + (0 if bias is None else bias.nbytes)
        self._ops = target.ops

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.linear_w4(x, self.weight, self.bias)

    def dequantize(self) -> torch.Tensor:
        values = self.weight.values()
        if self.weight.order is None:
            return values
        weight = torch.empty_like(values)
        weight[:, self.weight.order] = values
        return weight


class PackedForm(ABC):
    """`{name}.qweight`, `qzeros`, `scales` [G, N] and perhaps `bias` [N], laid out as a subclass knows."""

    def __init__(self, settings: PackedSettings) -> None:
        self.settings = settings

    @abstractmethod
    def packed_tensors(self, spec: LinearSpec, reader: TensorReader) -> Mapping[str, Expected]:
        """What `expected` asks for besides scales and bias."""

    @abstractmethod
    def order(self, spec: LinearSpec, reader: TensorReader) -> torch.Tensor | None:
        """int64 [K]: the input's features sorted by group; None where they are so already."""

    @abstractmethod
    def codes(self, words: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Rows `first` to `last`, multiples of 8, of the weight whose qweight is `words`: uint8 [rows, K]."""

    @abstractmethod
    def zeros(self, spec: LinearSpec, reader: TensorReader) -> torch.Tensor:
        """uint8 [N, G]: what is subtracted from codes."""

    def group_size(self, spec: LinearSpec) -> int:
        size = self.settings.group_size
        return spec.in_features if size == -1 else min(size, spec.in_features)

    def groups(self, spec: LinearSpec) -> int:
        return -(-spec.in_features // self.group_size(spec))

    def asked(self, shape: tuple[int, ...], *dtypes: torch.dtype) -> Expected:
        return Expected(shape, dtypes, self.settings.describe())

    def expected(self, spec: LinearSpec, reader: TensorReader) -> Mapping[str, Expected]:
        per_word = 32 // self.settings.bits
        if spec.in_features % BLOCK or spec.out_features % per_word:
            raise QuantError(
                f"{spec.name} has {spec.in_features} inputs and {spec.out_features} outputs; "
                f"{self.settings.describe()} is read only for multiples of {BLOCK} and {per_word}"
            )
        found = dict(self.packed_tensors(spec, reader))
        found[f"{spec.name}.scales"] = self.asked((self.groups(spec), spec.out_features), *FLOATS)
        bias = f"{spec.name}.bias"
        if spec.bias or reader.dtype(bias) is not None:  # AutoGPTQ writes zeros for linears that have none
            found[bias] = Expected((spec.out_features,))
        return found

    def from_checkpoint(
        self, reader: TensorReader, specs: Sequence[LinearSpec], target: Target
    ) -> LinearMethod:
        """One linear for neighbours in the same order of features, as members of one group mostly are."""
        orders = [self.order(spec, reader) for spec in specs]
        starts = [i for i in range(len(specs)) if i == 0 or not _same(orders[i - 1], orders[i])]
        parts = [
            self._read(reader, specs[first:last], orders[first], target)
            for first, last in pairwise([*starts, len(specs)])
        ]
        return parts[0] if len(parts) == 1 else SideBySide(parts)

    def _read(
        self, reader: TensorReader, specs: Sequence[LinearSpec], order: torch.Tensor | None, target: Target
    ) -> PackedLinear:
        bits, k = self.settings.bits, specs[0].in_features
        codes = torch.empty((sum(spec.out_features for spec in specs), k * bits // 8), dtype=torch.uint8)
        step = max(8, CHUNK // k // 8 * 8)
        row = 0
        for spec in specs:
            self._check_bias(reader, spec)
            words = reader.read(f"{spec.name}.qweight")
            for first in range(0, spec.out_features, step):
                last = min(first + step, spec.out_features)
                part = self.codes(words, first, last)
                codes[row + first : row + last] = pack(part if order is None else part[:, order], bits)
            row += spec.out_features
        scales = [self._scales(reader, spec) for spec in specs]
        same = len({part.dtype for part in scales}) == 1
        weight = PackedWeight(
            codes=codes.to(target.device),
            scales=torch.cat(scales if same else [part.float() for part in scales]).to(target.device),
            zeros=torch.cat([self.zeros(spec, reader) for spec in specs]).to(target.device),
            order=None if order is None else order.to(target.device),
            bits=bits,
            group_size=self.group_size(specs[0]),
        )
        bias = read_bias(reader, specs, target.dtype)
        return PackedLinear(weight, None if bias is None else bias.to(target.device), target)

    def _scales(self, reader: TensorReader, spec: LinearSpec) -> torch.Tensor:
        scales = reader.read(f"{spec.name}.scales")
        if not scales.isfinite().all():
            raise QuantError(f"{spec.name}.scales holds values that are not finite")
        return scales.t().contiguous()

    def _check_bias(self, reader: TensorReader, spec: LinearSpec) -> None:
        name = f"{spec.name}.bias"
        if not spec.bias and reader.dtype(name) is not None and reader.read(name).count_nonzero():
            raise QuantError(f"{name} is not zero, but by config.json this linear has no bias")


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)
