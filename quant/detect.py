"""Which number form a checkpoint's linears are in, which one is to be served, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from .base import Expected, LinearForm, LinearMethod, LinearSpec, QuantError, Target, TensorReader
from .int8 import Int8Form
from .none import FloatForm
from .side_by_side import SideBySide

Requested = Literal["auto", "none", "int8", "gptq", "awq"]

FORMS: Mapping[str, LinearForm] = MappingProxyType({"none": FloatForm(), "int8": Int8Form()})

PACKED_SUFFIXES = (".qweight", ".qzeros")


@dataclass(frozen=True)
class Form:
    """The choice, and how a group of linears is read under it."""

    name: Literal["none", "int8"]
    reason: str
    """For the user: what in the checkpoint or the settings decided."""
    packed: bool = False
    """The checkpoint itself holds int8 weights."""
    float_modules: tuple[str, ...] = ()
    """With `packed`: modules that the checkpoint's settings leave in float."""

    def expected(self, spec: LinearSpec, reader: TensorReader) -> Mapping[str, Expected]:
        """The tensors that `load` will read for `spec`."""
        return FORMS[self._form_of(spec, reader)].expected(spec, reader)

    def load(self, reader: TensorReader, specs: Sequence[LinearSpec], target: Target) -> LinearMethod:
        """Read linears of one input as one; side by side where some are in another form than others."""
        names = [self._form_of(spec, reader) for spec in specs]
        if len(set(names)) == 1:
            return FORMS[names[0]].from_checkpoint(reader, specs, target)
        return SideBySide(
            [FORMS[name].from_checkpoint(reader, [spec], target) for name, spec in zip(names, specs)]
        )

    def _form_of(self, spec: LinearSpec, reader: TensorReader) -> str:
        stored = reader.dtype(f"{spec.name}.weight")
        if not self.packed or stored is None or stored == torch.int8:
            return self.name
        if not any(_covers(module, spec.name) for module in self.float_modules):
            raise QuantError(
                f"{spec.name}.weight is {stored}, but quantization_config says int8 and does not list it in "
                "llm_int8_skip_modules"
            )
        return "none"


def detect(
    requested: Requested, settings: Mapping[str, Any] | None, tensors: Mapping[str, torch.dtype]
) -> Form:
    """Decide the form from the request, config.json's `quantization_config`, the tensors' names and dtypes.

    Raises QuantError where they contradict each other or name a form that cannot be served.
    """
    stored, why = _stored_form(settings, tensors)
    if stored in ("gptq", "awq"):
        raise QuantError(f"this checkpoint is in {stored.upper()} form ({why}), which cannot be served yet")
    if requested in ("gptq", "awq"):
        raise QuantError(f"quantization {requested} needs a checkpoint in that form, but this one is {why}")
    if stored == "int8":
        if requested == "none":
            raise QuantError(f"quantization none needs float weights, but this checkpoint is {why}; use int8")
        skip = (settings or {}).get("llm_int8_skip_modules") or []
        return Form("int8", f"the checkpoint is {why}", packed=True, float_modules=tuple(skip))
    if requested == "int8":
        return Form("int8", "asked for; made on loading from the checkpoint's float weights")
    return Form("none", f"the checkpoint is {why}" if requested == "auto" else "asked for")


def _stored_form(
    settings: Mapping[str, Any] | None, tensors: Mapping[str, torch.dtype]
) -> tuple[Literal["float", "int8", "gptq", "awq"], str]:
    """The form of the tensors, and how that shows."""
    packed = next((name for name in tensors if name.endswith(PACKED_SUFFIXES)), None)
    integers = next(
        (name for name, dtype in tensors.items() if name.endswith("_proj.weight") and dtype == torch.int8),
        None,
    )
    if settings is None:
        if packed is not None:
            raise QuantError(f"packed tensors ({packed}) but no quantisation settings in config.json")
        if integers is not None:
            return "int8", f"bitsandbytes INT8 ({integers} is int8)"
        return "float", "in plain float"
    method = settings.get("quant_method")
    if method in ("gptq", "awq"):
        return method, f"quantization_config says {method}"
    if method != "bitsandbytes":
        raise QuantError(f"quantization_config: the method {method!r} is not supported")
    if settings.get("load_in_4bit") or settings.get("_load_in_4bit"):
        kind = settings.get("bnb_4bit_quant_type", "")
        raise QuantError(f"quantization_config: bitsandbytes 4 bit ({kind}) is not supported, only 8 bit")
    if not settings.get("load_in_8bit") and not settings.get("_load_in_8bit"):
        raise QuantError("quantization_config: bitsandbytes without load_in_8bit is not supported")
    if packed is not None:
        raise QuantError(f"quantization_config says bitsandbytes, but there are packed tensors ({packed})")
    if integers is None:
        raise QuantError("quantization_config says bitsandbytes 8 bit, but no weight is int8")
    return "int8", "bitsandbytes INT8 (quantization_config)"


def _covers(module: str, name: str) -> bool:
    """Whether an entry of a skip list (a module's name, or the end of one) means `name` or a parent of it."""
    return f".{module}." in f".{name}."
