"""The one rule that maps tensor names of an adapter file to the base's linears.

    [base_model.model.] [model.] layers.{layer}.{self_attn|mlp}.{module}.lora_{A|B} [.default] .weight

The parts in brackets may be missing: PEFT writes `base_model.model.` before the base's own path, which has no
`model.` if the adapter was trained on the bare decoder, and `.default` (an adapter's name) stays in raw state
dicts. The path that patterns of the config are matched against is what stands between `base_model.model.` and
`.lora_`.
"""

from __future__ import annotations

import re
from collections import Counter

import msgspec

from .base import MODULES
from .errors import AdapterInvalid
from .spec import Part

PREFIX = "base_model.model."
_BLOCK = {
    module: "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn" for module in MODULES
}
_LORA = re.compile(
    r"(?:base_model\.model\.)?(?P<path>(?:model\.)?layers\.(?P<layer>0|[1-9][0-9]{0,5})"
    rf"\.(?P<block>self_attn|mlp)\.(?P<module>{'|'.join(MODULES)}))\.lora_(?P<part>[AB])(?:\.default)?\.weight"
)
_COPY = re.compile(
    r"(?:base_model\.model\.)?(?:(?:model\.)?(?P<embedding>embed_tokens)|(?P<head>lm_head))(?:\.base_layer)?\.weight"
)
_NOT_SERVED = (
    (re.compile(r"lora_magnitude_vector"), "DoRA changes the base's own weights and is not served"),
    (re.compile(r"trainable_tokens_delta"), "trained token rows of the embedding are not served"),
    (re.compile(r"(embed_tokens|lm_head)\..*lora_"), "LoRA on the embedding or the head is not served"),
    (re.compile(r"lora_embedding_[AB]"), "LoRA on an embedding is not served"),
    (re.compile(r"modules_to_save|original_module"), "fully trained modules are not served"),
    (re.compile(r"\.bias$"), "trained biases are not served"),
)


class Place(msgspec.Struct, frozen=True):
    """Which half of which linear's delta a tensor is."""

    layer: int
    module: int
    part: Part


class Names(msgspec.Struct, frozen=True):
    """A file's tensor names, understood."""

    tensors: dict[Place, str]
    paths: dict[tuple[int, int], str]
    """(layer, module) -> path inside the base as the file spells it, for patterns."""
    bare: bool
    """Spelled without `model.`: trained on the bare decoder."""
    copies: list[tuple[str, str]]
    """(tensor name, `embed_tokens` or `lm_head`): whole matrices that must equal the base's."""


def module_path(layer: int, module: int, *, bare: bool) -> str:
    """Where the base has the linear."""
    name = MODULES[module]
    return f"{'' if bare else 'model.'}layers.{layer}.{_BLOCK[name]}.{name}"


def understand(names: list[str]) -> Names:
    """Map every name. Raises AdapterInvalid for one that is not understood, or two of one meaning."""
    if not names:
        raise AdapterInvalid("adapter_model.safetensors holds no tensors")
    for name in names:
        reason = next((reason for found, reason in _NOT_SERVED if found.search(name)), None)
        if reason is not None:
            raise AdapterInvalid(f"{name}: {reason}")
    tensors: dict[Place, str] = {}
    paths: dict[tuple[int, int], str] = {}
    copies: list[tuple[str, str]] = []
    unknown: list[str] = []
    for name in names:
        if copy := _COPY.fullmatch(name):
            copies.append((name, copy["embedding"] or copy["head"]))
        elif (found := _LORA.fullmatch(name)) and _BLOCK[found["module"]] == found["block"]:
            module = MODULES.index(found["module"])
            place = Place(int(found["layer"]), module, "A" if found["part"] == "A" else "B")
            if place in tensors:
                raise AdapterInvalid(f"{tensors[place]} and {name} are the same tensor twice")
            tensors[place] = name
            paths[place.layer, module] = found["path"]
        else:
            unknown.append(name)
    if unknown:
        matched = len(names) - len(unknown)
        raise AdapterInvalid(
            f"{matched} of {len(names)} tensors matched the base: it has nothing for {unknown[0]!r}; "
            f"a name it has is '{PREFIX}{module_path(0, 0, bare=False)}.lora_A.weight'"
        )
    if not tensors:
        raise AdapterInvalid(f"adapter_model.safetensors holds no LoRA tensors, only {copies[0][0]}")
    twice = next((which for which, count in Counter(which for _, which in copies).items() if count > 1), None)
    if twice is not None:
        raise AdapterInvalid(
            f"{' and '.join(name for name, which in copies if which == twice)} are the same twice"
        )
    spellings = {path.startswith("model.") for path in paths.values()}
    if len(spellings) > 1:
        raise AdapterInvalid("some tensor names have 'model.' before 'layers.' and some have not")
    return Names(tensors, paths, bare=spellings == {False}, copies=copies)
