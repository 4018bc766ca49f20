"""Which number form a checkpoint's linears are in, which one is to be served, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from .awq import AwqForm
from .base import FLOATS, Expected, LinearForm, LinearMethod, LinearSpec, QuantError, Target, TensorReader
from .gptq import GptqForm
from .int8 import Int8Form
from .none import FloatForm
from .packed import PackedForm
from .settings import CONFIG, SIDE_FILES, Exceptions, PackedSettings, combine, covers, parse
from .side_by_side import SideBySide

Requested = Literal["auto", "none", "int8", "gptq", "awq"]

FLOAT, INT8 = FloatForm(), Int8Form()
PACKED: Mapping[str, Callable[[PackedSettings], PackedForm]] = MappingProxyType(
    {"gptq": GptqForm, "awq": AwqForm}
)

PACKED_SUFFIXES = (".qweight", ".qzeros")


@dataclass(frozen=True)
class Form:
    """The choice, and how a group of linears is read under it."""

    name: Literal["none", "int8", "gptq", "awq"]
    reason: str
    """For the user: what in the checkpoint or the settings decided."""
    main: LinearForm
    """Of the linears that are in this form."""
    exceptions: Exceptions | None = None
    """Where the checkpoint itself is quantised."""
    settings: PackedSettings | None = None
    """GPTQ and AWQ alone."""

    def expected(self, spec: LinearSpec, reader: TensorReader) -> Mapping[str, Expected]:
        """The tensors that `load` will read for `spec`."""
        return self._form_of(spec, reader).expected(spec, reader)

    def load(self, reader: TensorReader, specs: Sequence[LinearSpec], target: Target) -> LinearMethod:
        """Read linears of one input as one; side by side where some are in another form than others."""
        forms = [self._form_of(spec, reader) for spec in specs]
        if all(form is forms[0] for form in forms):
            return forms[0].from_checkpoint(reader, specs, target)
        return SideBySide([form.from_checkpoint(reader, [spec], target) for form, spec in zip(forms, specs)])

    def packs_head(self, name: str, reader: TensorReader) -> bool:
        """Whether the head, the linear `name`, is packed as the layers are.

        QuantError where settings that mention it say otherwise than the tensors.
        """
        if self.settings is None:
            return False
        said, source = self.settings.head, self.settings.source
        found = next((n for n in _packed_names(name) if reader.dtype(n) is not None), None)
        if found is not None and said is False:
            raise QuantError(f"{found} is there, but lm_head is false in {source}")
        plain = f"{name}.weight"
        if said and found is None and reader.dtype(plain) is not None:
            raise QuantError(f"lm_head is true in {source}, but {plain} is in plain float")
        return found is not None or bool(said)

    def _form_of(self, spec: LinearSpec, reader: TensorReader) -> LinearForm:
        if self.exceptions is None:
            return self.main
        plain = f"{spec.name}.weight"
        stored = reader.dtype(plain)
        packed = next((name for name in _packed_names(spec.name) if reader.dtype(name) is not None), None)
        if stored is None or stored not in FLOATS or packed is not None:
            if packed is not None and self.exceptions.must_be_float(spec.name):
                raise QuantError(f"{packed} is there, but {self.exceptions.key} leaves {spec.name} in float")
            return self.main
        if not self.exceptions.may_be_float(spec.name):
            raise QuantError(
                f"{plain} is {stored}, but {self.reason}, "
                f"and {self.exceptions.key} does not leave it in float"
            )
        return FLOAT


def detect(
    requested: Requested,
    settings: Mapping[str, Any] | None,
    tensors: Mapping[str, torch.dtype],
    side_files: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Form:
    """Decide the form from the request, the settings, the tensors' names and dtypes.

    `settings` are config.json's `quantization_config`, `side_files` the contents of those of
    `settings.SIDE_FILES` that are there. Raises QuantError where any of these contradict each other or name a
    form that cannot be served.
    """
    combined, source = combine(settings, side_files)
    stored, why = _stored_form(combined, source, tensors)
    if stored != "float" and requested not in ("auto", stored):
        raise QuantError(f"quantization {requested} was asked for, but this checkpoint is {why}")
    if requested in ("gptq", "awq") and stored == "float":
        raise QuantError(f"quantization {requested} needs a checkpoint in that form, but this one is {why}")
    reason = f"the checkpoint is {why}"
    if stored in ("gptq", "awq"):
        assert combined is not None
        packed = parse(combined, source)
        reason = f"the checkpoint is {packed.describe()}"
        return Form(packed.method, reason, PACKED[packed.method](packed), packed.exceptions, packed)
    if stored == "int8":
        skipped = (combined or {}).get("llm_int8_skip_modules") or []
        exceptions = Exceptions(
            "llm_int8_skip_modules", lambda name: any(covers(module, name) for module in skipped)
        )
        return Form("int8", reason, INT8, exceptions)
    if requested == "int8":
        return Form("int8", "asked for; made on loading from the checkpoint's float weights", INT8)
    return Form("none", reason if requested == "auto" else "asked for", FLOAT)


def _stored_form(
    settings: Mapping[str, Any] | None, source: str, tensors: Mapping[str, torch.dtype]
) -> tuple[Literal["float", "int8", "gptq", "awq"], str]:
    """The form of the tensors, and how that shows."""
    packed = next((name for name in tensors if name.endswith(PACKED_SUFFIXES)), None)
    integers = next(
        (name for name, dtype in tensors.items() if name.endswith("_proj.weight") and dtype == torch.int8),
        None,
    )
    if settings is None:
        if packed is not None:
            raise QuantError(
                f"packed tensors ({packed}) but no quantisation settings in config.json or "
                f"{' or '.join(SIDE_FILES)}"
            )
        if integers is not None:
            return "int8", f"bitsandbytes INT8 ({integers} is int8)"
        return "float", "in plain float"
    where = "quantization_config" if source == CONFIG else source
    method = settings.get("quant_method")
    if method in ("gptq", "awq"):
        if packed is None:
            raise QuantError(f"{where} says {method}, but no tensor is packed")
        return method, f"{method.upper()} ({where})"
    if method != "bitsandbytes":
        raise QuantError(f"{where}: the method {method!r} is not supported")
    if settings.get("load_in_4bit") or settings.get("_load_in_4bit"):
        kind = settings.get("bnb_4bit_quant_type", "")
        raise QuantError(f"{where}: bitsandbytes 4 bit ({kind}) is not supported, only 8 bit")
    if not settings.get("load_in_8bit") and not settings.get("_load_in_8bit"):
        raise QuantError(f"{where}: bitsandbytes without load_in_8bit is not supported")
    if packed is not None:
        raise QuantError(f"{where} says bitsandbytes, but there are packed tensors ({packed})")
    if integers is None:
        raise QuantError(f"{where} says bitsandbytes 8 bit, but no weight is int8")
    return "int8", f"bitsandbytes INT8 ({where})"


def _packed_names(name: str) -> list[str]:
    """The tensors that a packed linear has and no other."""
    return [f"{name}.{part}" for part in ("qweight", "qzeros", "scales")]
