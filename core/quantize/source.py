"""The float checkpoint that is to be quantised: checked whole, then read layer by layer."""

from __future__ import annotations

from pathlib import Path

import torch

from ...quant.base import Expected, LinearSpec, QuantError
from ...quant.detect import detect
from ...quant.none import FloatForm
from ...quant.settings import SIDE_FILES
from ..model.config import ModelConfig
from ..model.json_file import ModelError, read_json
from ..model.linears import layer_linears
from ..model.loader import EMBEDDING, HEAD, NORM
from ..model.weights import Checkpoint
from .float_layer import FloatLayer

NORMS = ("input_layernorm", "post_attention_layernorm")


class Source:
    """A model's folder. ModelError where it is quantised already, or not what its config.json says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = ModelConfig.load(folder)
        self.checkpoint = Checkpoint.open(folder)
        side_files = {name: read_json(folder / name) for name in SIDE_FILES if (folder / name).is_file()}
        try:
            form = detect("auto", self.config.quantization_config, self.checkpoint.dtypes, side_files)
        except QuantError as error:
            raise ModelError(str(error)) from error
        if form.name != "none":
            raise ModelError(f"{folder} is quantised already: {form.reason}")
        self.checkpoint.check(self._expected(), [])

    def _expected(self) -> dict[str, Expected]:
        config = self.config
        table, norm = Expected((config.vocab_size, config.hidden_size)), Expected((config.hidden_size,))
        found = {EMBEDDING: table, NORM: norm}
        if not config.tie_word_embeddings or self.checkpoint.dtype(HEAD) is not None:
            found[HEAD] = table
        for index in range(config.num_layers):
            found |= dict.fromkeys(self.norm_names(index), norm)
            for spec in self.linears(index).values():
                found.update(FloatForm().expected(spec, self.checkpoint))
        return found

    def linears(self, index: int) -> dict[str, LinearSpec]:
        """Of layer `index`, by module name."""
        return layer_linears(self.config, index)

    def norm_names(self, index: int) -> tuple[str, str]:
        """Tensors of the norms before attention and before the MLP."""
        first, second = (f"model.layers.{index}.{norm}.weight" for norm in NORMS)
        return first, second

    def others(self) -> list[str]:
        """Tensors outside of layers that are kept as they are."""
        return [name for name in (EMBEDDING, NORM, HEAD) if self.checkpoint.dtype(name) is not None]

    def layer(self, index: int) -> FloatLayer:
        """Layer `index` in float32, a copy."""
        specs = self.linears(index)
        first, second = self.norm_names(index)
        return FloatLayer(
            input_norm=self._wide(first),
            mlp_norm=self._wide(second),
            weights={module: self._wide(f"{spec.name}.weight") for module, spec in specs.items()},
            biases={
                module: self._wide(f"{spec.name}.bias") if spec.bias else None
                for module, spec in specs.items()
            },
        )

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [S, T] -> what the first layer gets: float32 [S, T, hidden]."""
        return self.checkpoint.read(EMBEDDING)[tokens].float()

    def _wide(self, name: str) -> torch.Tensor:
        return self.checkpoint.read(name).to(torch.float32, copy=True)
