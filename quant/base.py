"""The seam between number forms and the model: what a linear is read from, and what it can do afterwards.

A linear's life: `expected` says which tensors of the checkpoint it will read (so that everything is checked
before any is read), `from_checkpoint` reads and normalises them into one layout, `apply` and `dequantize` use
it. Linears that take the same input (q, k, v; gate, up) are made as one, their outputs side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..kernels.ops import Ops

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

CHUNK = 1 << 18
"""Elements looked at or converted at a time: a megabyte in float32, so that no copy of a tensor shows in memory."""


class QuantError(ValueError):
    """A checkpoint's number form cannot be served; the message names tensor or setting."""


@dataclass(frozen=True)
class LinearSpec:
    """One linear as the model's configuration has it."""

    name: str
    """Its tensors in the checkpoint begin with this and a dot."""
    out_features: int
    in_features: int
    bias: bool


@dataclass(frozen=True)
class Expected:
    """What a tensor of the checkpoint must look like."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    source: str = "config.json"
    """What says so, for the message where it looks otherwise."""


@dataclass(frozen=True)
class Target:
    """Where and how a linear will compute."""

    ops: Ops
    dtype: torch.dtype
    """Of activations; float weights may be held in a narrower one."""
    device: torch.device
    batch_invariant: bool = False
    """Only products whose order of sums does not depend on the number of rows."""


class TensorReader(Protocol):
    """A checkpoint's tensors, by name; on the CPU, as stored."""

    def dtype(self, name: str) -> torch.dtype | None:
        """None where there is no such tensor."""

    def read(self, name: str) -> torch.Tensor:
        """The values; may lie in mapped file memory, so keep a copy and not the tensor itself."""


class LinearMethod(Protocol):
    """One or several linears side by side, in one number form. N: all their out_features, K: in_features."""

    weight_bytes: int
    """What weights, scales and biases take."""

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] -> [T, N], of x's dtype; the bias is added."""

    def dequantize(self) -> torch.Tensor:
        """The weight as float32 [N, K], as the tool that defines the form computes it."""


class Table(LinearMethod, Protocol):
    """A matrix [vocab, K] that is multiplied as a head, and looked up as an embedding, or both."""

    def rows(self, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the dequantised matrix, for int64 indices [T]: [T, K] of `dtype`."""


class LinearForm(Protocol):
    """How linears of one number form come out of a checkpoint."""

    def expected(self, spec: LinearSpec, reader: TensorReader) -> Mapping[str, Expected]:
        """Every tensor that `from_checkpoint` will read for `spec`, whether the checkpoint has it or not."""

    def from_checkpoint(
        self, reader: TensorReader, specs: Sequence[LinearSpec], target: Target
    ) -> LinearMethod:
        """Read `specs` side by side. Raises QuantError for contents that have no exact meaning."""


def held_dtype(stored: Iterable[torch.dtype | None], computed: torch.dtype) -> torch.dtype:
    """In which dtype float weights stay that are computed with in `computed`.

    Under float32 those of 16 bits remain as they are: products widen them, which is exact.
    """
    (only, *others) = set(stored)
    return only if only is not None and not others and computed == torch.float32 else computed


def sixteen_bits(values: torch.Tensor) -> torch.dtype:
    """The 16-bit dtype that holds every one of these values exactly, else their own."""
    if values.dtype == torch.float32:
        rows = values.reshape(-1, values.shape[-1]).split(max(1, CHUNK // values.shape[-1]))
        for dtype in (torch.bfloat16, torch.float16):
            if all(torch.equal(part.to(dtype).float(), part) for part in rows):
                return dtype
    return values.dtype


def read_bias(reader: TensorReader, specs: Sequence[LinearSpec], dtype: torch.dtype) -> torch.Tensor | None:
    """The biases of `specs` side by side [N], zeros for a spec without one; None where none has one."""
    if not any(spec.bias for spec in specs):
        return None
    parts = [
        reader.read(f"{spec.name}.bias").to(dtype)
        if spec.bias
        else torch.zeros(spec.out_features, dtype=dtype)
        for spec in specs
    ]
    return torch.cat(parts)
