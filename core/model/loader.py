"""From a Hugging Face folder to a model that can run: every tensor checked, then read once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ...kernels.ops import Ops
from ...quant.base import Expected, LinearMethod, LinearSpec, QuantError, Table, Target, sixteen_bits
from ...quant.detect import Form, Requested, detect
from ...quant.int8 import Int8Linear, quantize_named
from ...quant.none import FloatLinear
from ...quant.settings import SIDE_FILES
from ..engine.host_memory import give_back
from .config import ModelConfig
from .json_file import ModelError, read_json
from .linears import layer_linears
from .llama import DOWN, GATE_UP, OUT, QKV, Layer, LlamaModel, Projection
from .rope import cos_sin_table
from .weights import Checkpoint

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
LM_HEAD, HEAD = "lm_head", "lm_head.weight"

ProgressReport = Callable[[str, int, int], None]
"""What is done, so many, of so many."""


def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    quantization: Requested,
    dtype: torch.dtype,
    device: torch.device | str,
    ops: Ops,
    int8_activations: bool = False,
    quantize_head: bool = False,
    batch_invariant: bool = False,
    max_positions: int | None = None,
    progress: ProgressReport | None = None,
) -> LlamaModel:
    """Load the weights in `folder` tensor by tensor: memory is that of the result and one tensor of the files.

    `dtype` is that of activations and float weights; `max_positions` bounds the rotary table (None: all that
    config.json allows). Raises ModelError, naming tensor or setting, before any weight is read where it can.
    """
    folder = Path(folder)
    checkpoint = Checkpoint.open(folder)
    side_files = {name: read_json(folder / name) for name in SIDE_FILES if (folder / name).is_file()}
    target = Target(ops, dtype, torch.device(device), batch_invariant)
    try:
        form = detect(
            quantization,
            config.quantization_config,
            checkpoint.dtypes,
            side_files,
            int8_activations=int8_activations,
        )
        return _Loader(config, checkpoint, form, target, progress).load(
            quantize_head,
            min(max_positions or config.max_position_embeddings, config.max_position_embeddings),
        )
    except QuantError as error:
        raise ModelError(str(error)) from error
    finally:
        give_back()


class _Loader:
    """One load in progress."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        form: Form,
        target: Target,
        progress: ProgressReport | None,
    ) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.form = form
        self.target = target
        self.progress = progress
        self.notes = list(form.notes)
        self.packed_head = form.packs_head(LM_HEAD, checkpoint)
        self.head_spec = LinearSpec(LM_HEAD, config.vocab_size, config.hidden_size, bias=False)

    def load(self, quantize_head: bool, max_positions: int) -> LlamaModel:
        config, target = self.config, self.target
        self.checkpoint.check(self._expected(), self.notes)
        self._report(0)
        embedding, head = self._embedding_and_head(quantize_head)
        layers = []
        for index in range(config.num_layers):
            layers.append(self._layer(index))
            self._report(index + 1)
        norm = self._norm(NORM)
        cos, sin = (t.to(target.device) for t in cos_sin_table(config.rope, config.head_dim, max_positions))
        return LlamaModel(
            config,
            ops=target.ops,
            dtype=target.dtype,
            device=target.device,
            embedding=embedding,
            layers=layers,
            norm=norm,
            head=head,
            cos_sin=(cos, sin),
            quantization=self.form.name,
            quantization_reason=self.form.reason,
            notes=self.notes,
        )

    def _report(self, done: int) -> None:
        if self.progress is not None:
            self.progress("Loading layers", done, self.config.num_layers)

    def _expected(self) -> dict[str, Expected]:
        config = self.config
        table = Expected((config.vocab_size, config.hidden_size))
        found = {EMBEDDING: table, NORM: Expected((config.hidden_size,))}
        if self.packed_head:
            found.update(self.form.expected(self.head_spec, self.checkpoint))
        elif not config.tie_word_embeddings or self.checkpoint.dtype(HEAD) is not None:
            found[HEAD] = table
        for index in range(config.num_layers):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                found[f"model.layers.{index}.{norm}.weight"] = Expected((config.hidden_size,))
            for spec in layer_linears(config, index).values():
                found.update(self.form.expected(spec, self.checkpoint))
        return found

    def _layer(self, index: int) -> Layer:
        linears = layer_linears(self.config, index)
        specs = list(linears.values())  # in the order of MODULES

        def projection(modules: tuple[int, ...]) -> Projection:
            group = [specs[module] for module in modules]
            linear = self.form.load(self.checkpoint, group, self.target)
            return Projection(linear, modules, [spec.out_features for spec in group])

        return Layer(
            input_norm=self._norm(f"model.layers.{index}.input_layernorm.weight"),
            qkv=projection(QKV),
            out=projection(OUT),
            mlp_norm=self._norm(f"model.layers.{index}.post_attention_layernorm.weight"),
            gate_up=projection(GATE_UP),
            down=projection(DOWN),
        )

    def _norm(self, name: str) -> torch.Tensor:
        return self.checkpoint.read(name).to(self.target.device, self.target.dtype, copy=True)

    def _embedding_and_head(self, quantize: bool) -> tuple[Table, LinearMethod]:
        """Both [vocab, hidden]. Where they are tied they are one table, in float or, `quantize`, in INT8."""
        tied = self.config.tie_word_embeddings
        if self.packed_head:
            if tied:
                self.notes.append(
                    f"{LM_HEAD} is packed and used, although config.json ties it to the embedding"
                )
            if quantize:
                self.notes.append(f"--quantize-head changes nothing: {LM_HEAD} is packed in the checkpoint")
            return self._table(EMBEDDING), self.form.load(self.checkpoint, [self.head_spec], self.target)
        if tied:
            if self.checkpoint.dtype(HEAD) is not None:
                self._compare_tied_head()
            table = self._int8_table(EMBEDDING) if quantize else self._table(EMBEDDING)
            return table, table
        return self._table(EMBEDDING), self._int8_table(HEAD) if quantize else self._table(HEAD)

    def _table(self, name: str) -> FloatLinear:
        """A table in float, whatever form the layers are in: in 16 bits where these hold its values exactly."""
        stored = self.checkpoint.read(name)
        dtype = sixteen_bits(stored) if self.target.dtype == torch.float32 else self.target.dtype
        weight = self.target.ops.room(tuple(stored.shape), dtype, self.target.device)
        return FloatLinear(weight.copy_(stored), None, self.target)

    def _int8_table(self, name: str) -> Int8Linear:
        return Int8Linear(*quantize_named(name, self.checkpoint.read(name)), None, self.target)

    def _compare_tied_head(self) -> None:
        head, embedding = self.checkpoint.read(HEAD), self.checkpoint.read(EMBEDDING)
        if head.dtype != embedding.dtype or not torch.equal(head, embedding):
            self.notes.append(f"{HEAD} differs from the embedding, but config.json ties them: it is not used")
