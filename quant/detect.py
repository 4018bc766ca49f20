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
from .int8_settings import left_in_float, outlier_threshold
from .none import FloatForm
from .packed import PackedForm
from .settings import CONFIG, SIDE_FILES, Exceptions, PackedSettings, combine, parse
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
    notes: tuple[str, ...] = ()
    """What else the user should know at the start."""

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
        plain = f"{name}.weight"
        if self.settings is None:
            # bitsandbytes quantises the head too where a list of modules to skip was given that does not name it
            return self.exceptions is not None and reader.dtype(plain) == torch.int8
        said, source = self.settings.head, self.settings.source
        found = next((n for n in _packed_names(name) if reader.dtype(n) is not None), None)
        if found is not None and said is False:
            raise QuantError(f"{found} is there, but lm_head is false in {source}")
        if said and found is None and reader.dtype(plain) is not None:
            raise QuantError(f"lm_head is true in {source}, but {plain} is in plain float")
        return found is not None or bool(said)

    def _form_of(self, spec: LinearSpec, reader: TensorReader) -> LinearForm:
        if self.exceptions is None:
            return self.main
        plain = f"{spec.name}.weight"
        stored = reader.dtype(plain)
        packed = next((n for n in _packed_names(spec.name) if reader.dtype(n) is not None), None)
        if stored not in FLOATS or packed is not None:
            found = f"{plain} is int8" if stored == torch.int8 else packed and f"{packed} is there"
            if found and self.exceptions.must_be_float(spec.name):
                raise QuantError(f"{found}, but {self.exceptions.key} leaves {spec.name} in float")
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
    *,
    int8_activations: bool = False,
) -> Form:
    """Decide the form from the request, the settings, the tensors' names and dtypes.

    `settings` are config.json's `quantization_config`, `side_files` the contents of those of
    `settings.SIDE_FILES` that are there. Raises QuantError where any of these contradict each other or name a
    form that cannot be served, and where another form than INT8 is to have int8 activations.
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
        if int8_activations:
            raise _not_int8(reason)
        return Form(packed.method, reason, PACKED[packed.method](packed), packed.exceptions, packed)
    if stored == "int8":
        exceptions = left_in_float(combined or {}, source)
        return _int8(reason, combined or {}, source, int8_activations, exceptions)
    if requested == "int8":
        reason = "asked for; made on loading from the checkpoint's float weights"
        return _int8(reason, {}, source, int8_activations)
    if int8_activations:
        raise _not_int8(reason)
    return Form("none", reason if requested == "auto" else "asked for", FLOAT)


def _int8(
    reason: str,
    settings: Mapping[str, Any],
    source: str,
    int8_activations: bool,
    exceptions: Exceptions | None = None,
) -> Form:
    """INT8 with activations in float, or in int8 but for outliers as `settings` define them."""
    if not int8_activations:
        return Form("int8", reason, INT8, exceptions)
    threshold = outlier_threshold(settings, source)
    but = f", but for values of {threshold:g} and more" if threshold else ""
    note = f"activations too are rounded to 8 bits, each row by its own largest{but} (--int8-activations)"
    return Form("int8", reason, Int8Form(threshold), exceptions, notes=(note,))


def _not_int8(reason: str) -> QuantError:
    return QuantError(f"--int8-activations needs --quantization int8 or a checkpoint in INT8, but {reason}")


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
