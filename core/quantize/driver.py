"""`heddle quantize`: a float checkpoint read layer by layer, rounded, and written as another.

Memory is that of one layer in float32, the hidden states of all samples, one linear's inputs, and the tensors
that wait for their file to be complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ...quant.base import QuantError
from ...quant.int8 import quantize_named
from ...quant.quantize import gptq
from ...quant.quantize.tensors import awq_tensors, gptq_tensors, int8_tensors
from ..checkpoint.cache import Progress, silent, write_folder
from ..checkpoint.errors import CheckpointError
from ..model.json_file import ModelError
from ..model.loader import EMBEDDING, HEAD
from ..text.tokenizer import Tokenizer, TokenizerError
from .calibration import pieces, read_text
from .float_layer import LayerMath
from .layers import awq_layer, gptq_layer
from .settings import QuantizeSettings
from .source import Source
from .writer import Shards, write_settings

Tensors = dict[str, torch.Tensor]


def quantize(source: Path, target: Path, settings: QuantizeSettings, progress: Progress = silent) -> None:
    """Write the quantised form of the model in `source` as the new folder `target`, whole or not at all.

    Raises ModelError, naming what is wrong with model, settings, calibration text or target, and CheckpointError
    where the target cannot be written.
    """
    if target.exists():
        raise ModelError(f"{target} exists already; choose another output folder or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_folder(target, lambda folder: write(source, folder, settings, progress))
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error}") from error


@torch.no_grad()
def write(folder: Path, target: Path, settings: QuantizeSettings, progress: Progress = silent) -> None:
    """Write the quantised form of the model in `folder` into the empty folder `target`."""
    source = Source(folder)
    settings = settings.complete(source.config)
    layers = source.config.num_layers
    convert = _int8(source) if settings.method == "int8" else _measured(source, settings)
    shards = Shards(target)
    shards.add((name, source.checkpoint.read(name)) for name in source.others())
    if settings.method == "gptq" and HEAD not in source.others():
        # AutoGPTQ writes a copy of a tied head, and without one it loads the embedding as zeros.
        shards.add([(HEAD, source.checkpoint.read(EMBEDDING))])
    what = f"quantising layers to {settings.method}"
    progress(what, 0, layers)
    for index in range(layers):
        try:
            shards.add(convert(index).items())
        except QuantError as error:
            raise ModelError(f"layer {index}: {error}") from error
        progress(what, index + 1, layers)
    shards.close()
    write_settings(folder, target, settings)


def _int8(source: Source) -> Callable[[int], Tensors]:
    def convert(index: int) -> Tensors:
        read = source.checkpoint.read
        found = {name: read(name) for name in source.norm_names(index)}
        for spec in source.linears(index).values():
            weight = f"{spec.name}.weight"
            found |= _named(spec.name, int8_tensors(*quantize_named(weight, read(weight))))
            if spec.bias:
                found[f"{spec.name}.bias"] = read(f"{spec.name}.bias")
        return found

    return convert


def _measured(source: Source, settings: QuantizeSettings) -> Callable[[int], Tensors]:
    """Layers in their order: each call goes on from the outputs of the one before."""
    bits, group_size, samples = settings.bits, settings.group_size, settings.samples
    assert bits
    assert group_size
    assert samples
    text = read_text(settings.calibration)
    try:
        tokenizer = Tokenizer.load(source.folder)
    except TokenizerError as error:
        raise ModelError(str(error)) from error
    tokens = pieces(text, tokenizer, samples, settings.sample_tokens)
    hidden = source.embedded(torch.tensor(tokens))
    math = LayerMath(source.config, settings.sample_tokens)
    how = gptq.Settings(bits, group_size, bool(settings.desc_act), settings.sym, settings.damp)

    def convert(index: int) -> Tensors:
        nonlocal hidden
        layer, names = source.layer(index), source.norm_names(index)
        dtypes = [source.checkpoint.read(name).dtype for name in names]
        if settings.method == "gptq":
            rounded, hidden = gptq_layer(layer, math, hidden, how)
        else:
            rounded, hidden = awq_layer(layer, math, hidden, group_size, dtypes)
        norms = (layer.input_norm, layer.mlp_norm)
        found = {name: norm.to(dtype) for name, norm, dtype in zip(names, norms, dtypes)}
        for module, spec in source.linears(index).items():
            if settings.method == "gptq":
                found |= _named(spec.name, gptq_tensors(rounded[module], bits))
            else:
                found |= _named(spec.name, awq_tensors(rounded[module]))
            bias = layer.biases[module]
            if bias is not None:
                found[f"{spec.name}.bias"] = bias.to(source.checkpoint.read(f"{spec.name}.bias").dtype)
            elif settings.method == "gptq":  # AutoGPTQ's linears always have one
                found[f"{spec.name}.bias"] = torch.zeros(spec.out_features, dtype=torch.float16)
        return found

    return convert


def _named(name: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {f"{name}.{part}": tensor for part, tensor in tensors.items()}
