"""What `heddle quantize` can be asked for, checked against the model before anything is read. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from ...lora.base import MODULES
from ..model.config import ModelConfig
from ..model.json_file import ModelError

Method = Literal["int8", "gptq", "awq"]

BITS: dict[Method, tuple[int, ...]] = {"int8": (8,), "gptq": (4, 8), "awq": (4,)}
"""What a weight can be rounded to; the first is the default."""

GROUP_SIZES = (128, 64, 32)
"""Where none is asked for: the first that divides every linear's inputs."""

SAMPLES: dict[Method, int] = {"int8": 0, "gptq": 128, "awq": 32}
"""Pieces of calibration text. AWQ's twenty trials a layer each go over all of them, so they are fewer."""

MULTIPLE = 16
"""Group sizes and in-features must be multiples of it to be served."""


class QuantizeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One quantisation, as the flags of `heddle quantize` have it; None: the method's own default."""

    method: Method
    bits: int | None = None
    group_size: int | None = None
    """-1: one group a row."""
    desc_act: bool | None = None
    """GPTQ: columns in the order of their activations' size. By default so, as in AutoGPTQ: where a few features are
    much larger than the rest, as in most language models, what is rounded first matters."""
    sym: bool = True
    """GPTQ: zero in the middle of every grid."""
    damp: float = 0.01
    """GPTQ: added to the Hessian's diagonal, as a share of its mean."""
    calibration: Path | None = None
    """A text in UTF-8; None: the one in the package."""
    samples: int | None = None
    sample_tokens: int = 256

    def complete(self, config: ModelConfig) -> QuantizeSettings:
        """With every default filled in. ModelError, naming the setting, for what the method or model rules out."""
        method = self.method
        bits = BITS[method][0] if self.bits is None else self.bits
        if bits not in BITS[method]:
            raise ModelError(f"bits {bits} is not available for {method}, only {_listed(BITS[method])}")
        if method == "int8":
            self._refuse_for_int8()
            return msgspec.structs.replace(self, bits=bits, group_size=-1, samples=0)
        if method == "awq" and self.desc_act:
            raise ModelError("desc_act is a setting of gptq; awq leaves features in their order")
        if method == "awq" and not self.sym:
            raise ModelError("sym is a setting of gptq; awq's grids are asymmetric always")
        if not 0 < self.damp < 1:
            raise ModelError(f"damp must lie between 0 and 1, got {self.damp:g}")
        samples = SAMPLES[method] if self.samples is None else self.samples
        for name, value in (("samples", samples), ("sample_tokens", self.sample_tokens)):
            if value < 1:
                raise ModelError(f"{name} must be at least 1, got {value}")
        if self.sample_tokens > config.max_position_embeddings:
            raise ModelError(
                f"sample_tokens {self.sample_tokens} is beyond the model's context of "
                f"{config.max_position_embeddings}"
            )
        group_size = self._group_size(config, bits)
        desc_act = method == "gptq" if self.desc_act is None else self.desc_act
        return msgspec.structs.replace(
            self, bits=bits, group_size=group_size, samples=samples, desc_act=desc_act
        )

    def _refuse_for_int8(self) -> None:
        given = [
            name
            for name, value in (
                ("group_size", self.group_size not in (None, -1)),
                ("desc_act", self.desc_act),
                ("calibration", self.calibration),
                ("samples", self.samples),
            )
            if value
        ]
        if given:
            raise ModelError(f"int8 rounds each row by its largest value alone: it takes no {given[0]}")

    def _group_size(self, config: ModelConfig, bits: int) -> int:
        shapes = {module: config.linear_shapes[module] for module in MODULES}
        per_word = 32 // bits
        for module, (outputs, inputs) in shapes.items():
            if inputs % MULTIPLE or outputs % per_word:
                raise ModelError(
                    f"{module} has {inputs} inputs and {outputs} outputs; {self.method} in {bits} bits needs "
                    f"multiples of {MULTIPLE} and {per_word}"
                )
        fitting = [size for size in GROUP_SIZES if all(k % size == 0 for _, k in shapes.values())]
        if self.group_size is None:
            return fitting[0] if fitting else -1
        size = self.group_size
        if size != -1 and (size < MULTIPLE or size % MULTIPLE):
            raise ModelError(f"group_size {size} is not available, only -1 and multiples of {MULTIPLE}")
        for module, (_, inputs) in shapes.items():
            if size != -1 and inputs % size:
                hint = f"; {_listed(fitting)} would fit" if fitting else ""
                raise ModelError(f"group_size {size} does not divide the {inputs} inputs of {module}{hint}")
        return size


def _listed(values: tuple[int, ...] | list[int]) -> str:
    return " or ".join(map(str, values))
