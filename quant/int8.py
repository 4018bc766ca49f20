"""LLM.int8(): weights as int8 with one scale a row, exactly bitsandbytes'; activations stay float.

Because activations stay float there is no rounding on their side and nothing to split off as outliers: the
result is that of the dequantised weights, and no row of a batch can influence another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .base import Expected, LinearMethod, LinearSpec, QuantError, Target, TensorReader, read_bias
from .none import FloatForm

ROW_FORMAT = 0
"""bitsandbytes' `weight_format` of the plain row-major layout; others are orders of old GPU kernels."""

INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)

CHUNK = 1 << 24
"""Elements quantised at a time, which bounds the float32 products to 64 MiB."""


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
        quantized[first : first + step] = torch.round(part * factor.unsqueeze(1)).to(torch.int8)
        absmax[first : first + step] = largest
    return quantized, absmax


class Int8Form:
    """From `{name}.weight` in float, or bitsandbytes' `{name}.weight` in int8, `SCB` and `weight_format`."""

    def __init__(self) -> None:
        self._float = FloatForm()

    def expected(self, spec: LinearSpec, reader: TensorReader) -> Mapping[str, Expected]:
        found = dict(self._float.expected(spec, reader))
        weight, scales, layout = (f"{spec.name}.{part}" for part in ("weight", "SCB", "weight_format"))
        if reader.dtype(weight) == torch.int8:
            found[weight] = Expected((spec.out_features, spec.in_features), (torch.int8,))
            found[scales] = Expected((spec.out_features,), (torch.float32,))
            if reader.dtype(layout) is not None:  # older files go without: they are row-major
                found[layout] = Expected((), INTEGERS)
        return found

    def from_checkpoint(
        self, reader: TensorReader, specs: Sequence[LinearSpec], target: Target
    ) -> LinearMethod:
        rows = sum(spec.out_features for spec in specs)
        weight = torch.empty((rows, specs[0].in_features), dtype=torch.int8)
        absmax = torch.empty(rows, dtype=torch.float32)
        row = 0
        for spec in specs:
            part = slice(row, row + spec.out_features)
            weight[part], absmax[part] = self._read(reader, spec)
            row += spec.out_features
        return Int8Linear(weight, absmax, read_bias(reader, specs, target.dtype), target)

    def _read(self, reader: TensorReader, spec: LinearSpec) -> tuple[torch.Tensor, torch.Tensor]:
        stored = reader.read(f"{spec.name}.weight")
        if stored.dtype != torch.int8:
            weight, absmax = quantize_rows(stored)
            if not absmax.isfinite().all():
                raise QuantError(
                    f"{spec.name}.weight has values that float16, and so INT8, cannot hold; "
                    "use --quantization none"
                )
            return weight, absmax
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
    """weight int8 [N, K]; a row stands for weight * absmax / 127."""

    def __init__(
        self, weight: torch.Tensor, absmax: torch.Tensor, bias: torch.Tensor | None, target: Target
    ) -> None:
        self.weight = weight.to(target.device)
        self.absmax = absmax.to(target.device)
        self.scale = self.absmax / 127
        self.bias = None if bias is None else bias.to(target.device)
        tensors = (self.weight, self.absmax, self.scale, self.bias)
        self.weight_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        self._ops = target.ops

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.linear_int8(x, self.weight, self.scale, self.bias)

    def dequantize(self) -> torch.Tensor:
        return self.weight.float() * self.absmax.unsqueeze(1) * (1 / 127)
