"""From a Hugging Face folder to a model that can run: every tensor checked, then read once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ...kernels.ops import Ops
from ...quant.base import Expected, LinearMethod, LinearSpec, QuantError, Target, held_dtype
from ...quant.detect import Form, Requested, detect
from ...quant.int8 import Int8Linear, quantize_rows
from ...quant.none import FloatLinear
from ...quant.settings import SIDE_FILES
from .config import ModelConfig
from .json_file import ModelError, read_json
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
    """Load the weights in `folder` tensor by tensor; memory is that of the result and one group of linears.

    `dtype` is that of activations and float weights; `max_positions` bounds the rotary table (None: all that
    config.json allows). Raises ModelError, naming tensor or setting, before any weight is read where it can.
    """
    if int8_activations:
        raise ModelError("int8 activations are not available; leave out --int8-activations")
    folder = Path(folder)
    checkpoint = Checkpoint.open(folder)
    side_files = {name: read_json(folder / name) for name in SIDE_FILES if (folder / name).is_file()}
    target = Target(ops, dtype, torch.device(device), batch_invariant)
    try:
        form = detect(quantization, config.quantization_config, checkpoint.dtypes, side_files)
        return _Loader(config, checkpoint, form, target, progress).load(
            quantize_head,
            min(max_positions or config.max_position_embeddings, config.max_position_embeddings),
        )
    except QuantError as error:
        raise ModelError(str(error)) from error


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
        self.weight_bytes = 0
        self.notes: list[str] = []
        self.packed_head = form.packs_head(LM_HEAD, checkpoint)
        self.head_spec = LinearSpec(LM_HEAD, config.vocab_size, config.hidden_size, bias=False)

    def load(self, quantize_head: bool, max_positions: int) -> LlamaModel:
        config, target = self.config, self.target
        self.checkpoint.check(self._expected(), self.notes)
        self._report(0)
        embedding = self._table(EMBEDDING)
        head, shared = self._head(embedding, quantize_head)
        self.weight_bytes += embedding.nbytes + (0 if shared else head.weight_bytes)
        layers = []
        for index in range(config.num_layers):
            layers.append(self._layer(index))
            self._report(index + 1)
        norm = self._norm(NORM)
        cos, sin = (t.to(target.device) for t in cos_sin_table(config.rope, config.head_dim, max_positions))
        self.weight_bytes += cos.nbytes + sin.nbytes
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
            weight_bytes=self.weight_bytes,
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
            for spec in self._linears(index).values():
                found.update(self.form.expected(spec, self.checkpoint))
        return found

    def _linears(self, index: int) -> dict[str, LinearSpec]:
        config = self.config
        biases = dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.attention_bias)
        biases["o_proj"] = config.attention_output_bias
        specs = {}
        for module, (out_features, in_features) in config.linear_shapes.items():
            part = "self_attn" if module in biases else "mlp"
            name = f"model.layers.{index}.{part}.{module}"
            specs[module] = LinearSpec(name, out_features, in_features, biases.get(module, config.mlp_bias))
        return specs

    def _layer(self, index: int) -> Layer:
        linears = self._linears(index)
        specs = list(linears.values())  # in the order of MODULES

        def projection(modules: tuple[int, ...]) -> Projection:
            group = [specs[module] for module in modules]
            linear = self.form.load(self.checkpoint, group, self.target)
            self.weight_bytes += linear.weight_bytes
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
        weight = self.checkpoint.read(name).to(self.target.device, self.target.dtype, copy=True)
        self.weight_bytes += weight.nbytes
        return weight

    def _table(self, name: str) -> torch.Tensor:
        """Embedding or head, [vocab, hidden]: float, whatever form the layers are in."""
        stored = self.checkpoint.read(name)
        return stored.to(self.target.device, held_dtype([stored.dtype], self.target.dtype), copy=True)

    def _head(self, embedding: torch.Tensor, quantize: bool) -> tuple[LinearMethod, bool]:
        """The head, and whether its weight is the embedding's own."""
        tied = self.config.tie_word_embeddings
        if self.packed_head:
            if tied:
                self.notes.append(
                    f"{LM_HEAD} is packed and used, although config.json ties it to the embedding"
                )
            return self.form.load(self.checkpoint, [self.head_spec], self.target), False
        if tied and self.checkpoint.dtype(HEAD) is not None:
            self._compare_tied_head()
        weight = embedding if tied else self._table(HEAD)
        if quantize:
            return Int8Linear(*quantize_rows(weight.cpu()), None, self.target), False
        return FloatLinear(weight, None, self.target), tied

    def _compare_tied_head(self) -> None:
        head, embedding = self.checkpoint.read(HEAD), self.checkpoint.read(EMBEDDING)
        if head.dtype != embedding.dtype or not torch.equal(head, embedding):
            self.notes.append(f"{HEAD} differs from the embedding, but config.json ties them: it is not used")
