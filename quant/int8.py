"""LLM.int8(): weights as int8 with one scale a row, exactly bitsandbytes'; activations in float or int8.

As a rule activations stay float: there is no rounding on their side and nothing to split off as outliers, and the
result is that of the dequantised weights. With int8 activations (Dettmers et al., arXiv 2208.07339) each row is
rounded by a scale of its own and has outliers of its own, so that here too no row of a batch can influence another.
Which of the two runs is decided once, never by the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..kernels.ops import W8A8_MAX_K
from .base import CHUNK, Expected, LinearMethod, LinearSpec, QuantError, Target, TensorReader, read_bias
from .none import FloatForm

ROW_FORMAT = 0
"""bitsandbytes' `weight_format` of the plain row-major layout; others are orders of old GPU kernels."""

INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vector-wise absmax quantisation of a float matrix [N, K] -> int8 [N, K], absmax float32 [N] ("SCB").

    Bit for bit as bitsandbytes 0.50 (`nn.Int8Params`, `int8_vectorwise_quant` on a CPU): the weight is first
    rounded to float16; then q = round(w * (127 / absmax)), ties to even, the product in float32. A row of
    zeros gives zeros.
    """
    rows, columns = weight.shape
    quantized = torch.empty((rows, columns), dtype=torch.int8)
    absmax = torch.empty(rows, dtype=torch.float32)
    step = max(1, CHUNK // columns)
    for first in range(0, rows, step):
        part = weight[first : first + step].to(torch.float16)
        largest = part.abs().amax(dim=1).float()
        factor = torch.where(largest > 0, 127.0 / largest, 0.0)
        quantized[first : first + step] = (part * factor.unsqueeze(1)).round_()
        absmax[first : first + step] = largest
    return quantized, absmax


def quantize_named(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_rows` of the tensor `name`. Raises QuantError where float16 cannot hold its values."""
    quantized, absmax = quantize_rows(weight)
    if not absmax.isfinite().all():
        raise QuantError(
            f"{name} has values that float16, and so INT8, cannot hold; leave it in float (--quantization none, "
            "no --quantize-head)"
        )
    return quantized, absmax


class Int8Form:
    """From `{name}.weight` in float, or bitsandbytes' `{name}.weight` in int8, `SCB` and `weight_format`.

    With a `threshold` activations are rounded to int8 where they are below it (0: everywhere).
    """

    def __init__(self, threshold: float | None = None) -> None:
        self.threshold = threshold
        self._float = FloatForm()

    def expected(self, spec: LinearSpec, reader: TensorReader) -> Mapping[str, Expected]:
        found = dict(self._float.expected(spec, reader))
        weight, scales, layout = (f"{spec.name}.{part}" for part in ("weight", "SCB", "weight_format"))
        if reader.dtype(weight) == torch.int8:
            source = f"{weight} in int8"
            found[weight] = Expected((spec.out_features, spec.in_features), (torch.int8,))
            found[scales] = Expected((spec.out_features,), (torch.float32,), source)
            if reader.dtype(layout) is not None:  # older files go without: they are row-major
                found[layout] = Expected((), INTEGERS, source)
        return found

    def from_checkpoint(
        self, reader: TensorReader, specs: Sequence[LinearSpec], target: Target
    ) -> LinearMethod:
        rows, columns = sum(spec.out_features for spec in specs), specs[0].in_features
        if self.threshold is not None and columns > W8A8_MAX_K:
            raise QuantError(
                f"{specs[0].name} has {columns} inputs, more than int8 activations allow ({W8A8_MAX_K})"
            )
        weight = target.ops.room((rows, columns), torch.int8, torch.device("cpu"))
        absmax = torch.empty(rows, dtype=torch.float32)
        row = 0
        for spec in specs:
            part = slice(row, row + spec.out_features)
            weight[part], absmax[part] = self._read(reader, spec)
            row += spec.out_features
        bias = read_bias(reader, specs, target.dtype)
        return Int8Linear(weight, absmax, bias, target, self.threshold)

    def _read(self, reader: TensorReader, spec: LinearSpec) -> tuple[torch.Tensor, torch.Tensor]:
        stored = reader.read(f"{spec.name}.weight")
        if stored.dtype != torch.int8:
            return quantize_named(f"{spec.name}.weight", stored)
        layout = f"{spec.name}.weight_format"
        if reader.dtype(layout) is not None:
            found = int(reader.read(layout))
            if found != ROW_FORMAT:
                raise QuantError(f"{layout} is {found}; only {ROW_FORMAT}, row-major, can be read")
        absmax = reader.read(f"{spec.name}.SCB")
        if not absmax.isfinite().all() or (absmax < 0).any():
            raise QuantError(f"{spec.name}.SCB holds values that are no scales (negative or not finite)")
        return stored, absmax


class Int8Linear:
    """weight int8 [N, K]; a row stands for weight * absmax / 127. `threshold`: as `Int8Form`'s."""

    def __init__(
        self,
        weight: torch.Tensor,
        absmax: torch.Tensor,
        bias: torch.Tensor | None,
        target: Target,
        threshold: float | None = None,
    ) -> None:
        self.weight = target.ops.hold(weight.to(target.device))
        self.absmax = absmax.to(target.device)
        self.scale = self.absmax / 127
        self.bias = None if bias is None else bias.to(target.device)
        held = (self.weight, self.absmax, self.scale, self.bias)
        self.weight_bytes = sum(part.nbytes for part in held if part is not None)
        self.threshold = threshold
        self._ops = target.ops

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        if self.threshold is not None:
            return self._ops.linear_w8a8(x, self.weight, self.scale, self.bias, self.threshold)
        return self._ops.linear_int8(x, self.weight, self.scale, self.bias)

    def dequantize(self) -> torch.Tensor:
        return self.weight.matrix().float() * self.absmax.unsqueeze(1) * (1 / 127)

    def rows(self, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._ops.embedding(indices, self.weight, self.absmax, dtype)
