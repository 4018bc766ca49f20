"""The LLaMA forward: any mix of sequences, chunks and adapters in one pass over the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...kernels.ops import Ops
from ...kernels.pool import Pool
from ...lora.base import MODULES
from ...quant.base import LinearMethod, Table
from ..memory import MemoryPart, total
from .config import ModelConfig
from .forward_batch import ForwardBatch

QKV = (MODULES.index("q_proj"), MODULES.index("k_proj"), MODULES.index("v_proj"))
OUT = (MODULES.index("o_proj"),)
GATE_UP = (MODULES.index("gate_proj"), MODULES.index("up_proj"))
DOWN = (MODULES.index("down_proj"),)


class Projection:
    """Linears of one input, side by side, and the adapters' deltas on them."""

    def __init__(self, linear: LinearMethod, modules: Sequence[int], widths: Sequence[int]) -> None:
        self.linear = linear
        self.modules = tuple(modules)
        self.offsets = (0, *(sum(widths[: i + 1]) for i in range(len(widths))))

    def __call__(
        self, x: torch.Tensor, layer: int, batch: ForwardBatch, pool: Pool, ops: Ops
    ) -> torch.Tensor:
        """[T, K] -> [T, sum of widths]"""
        out = self.linear.apply(x)
        if batch.lora is not None:
            ops.add_lora(out, x, pool, layer, self.modules, self.offsets, batch.lora)
        return out


@dataclass(frozen=True)
class Layer:
    """One decoder layer's weights."""

    input_norm: torch.Tensor
    qkv: Projection
    out: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection


class LlamaModel:
    """A loaded base. It holds no request's state: KV and adapters are in the pool that `forward` is given."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        embedding: Table,
        layers: Sequence[Layer],
        norm: torch.Tensor,
        head: LinearMethod,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        quantization: str,
        quantization_reason: str,
        notes: Sequence[str],
    ) -> None:
        self.config = config
        self.ops = ops
        self.dtype = dtype
        self.device = device
        self.embedding = embedding
        """The head itself where the two are tied."""
        self.layers = tuple(layers)
        self.norm = norm
        self.head = head
        self.cos, self.sin = cos_sin
        self.quantization = quantization
        self.quantization_reason = quantization_reason
        self.notes = tuple(notes)
        """What the user should know of how the checkpoint was read."""

    def parts(self) -> list[MemoryPart]:
        """What its tensors take, by what they are for. A head that is the embedding is not counted twice."""
        config, layers, head = self.config, self.layers, self.head
        table = config.vocab_size * config.hidden_size
        projections = [
            p.linear for layer in layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]
        linears = config.num_layers * sum(rows * columns for rows, columns in config.linear_shapes.values())
        norms = [self.norm, *(norm for layer in layers for norm in (layer.input_norm, layer.mlp_norm))]
        parts = [MemoryPart.of_model("projections", sum(p.weight_bytes for p in projections), linears)]
        if head is self.embedding:
            parts.append(MemoryPart.of_model("embedding and head", head.weight_bytes, table))
        else:
            parts.append(MemoryPart.of_model("embedding", self.embedding.weight_bytes, table))
            parts.append(MemoryPart.of_model("head", head.weight_bytes, table))
        parts.append(
            MemoryPart.of_model("norms", sum(n.nbytes for n in norms), sum(n.numel() for n in norms))
        )
        return [*parts, MemoryPart(part="rotary tables", bytes=self.cos.nbytes + self.sin.nbytes)]

    @property
    def weight_bytes(self) -> int:
        """All of `parts`."""
        return total(self.parts())

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: Pool) -> torch.Tensor:
        """Hidden states [T, hidden] after the final norm; the rows' K and V are in the pool afterwards."""
        ops, eps = self.ops, self.config.rms_norm_eps
        residual = self.embedding.rows(batch.token_ids, self.dtype)
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms)):
            x = self._attention(x, layer, index, batch, pool)
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = ops.silu_mul(layer.gate_up(x, index, batch, pool, ops))
            x = layer.down(x, index, batch, pool, ops)
            x, residual = ops.add_rms_norm(x, residual, next_norm, eps)
        return x

    def _attention(
        self, x: torch.Tensor, layer: Layer, index: int, batch: ForwardBatch, pool: Pool
    ) -> torch.Tensor:
        config = self.config
        qkv = layer.qkv(x, index, batch, pool, self.ops).unflatten(1, (-1, config.head_dim))
        q, k, v = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        rows = batch.attention
        q = self.ops.rope_and_write_kv(
            q, k, v, batch.positions, self.cos, self.sin, pool, index, rows.slot_mapping
        )
        mixed = self.ops.paged_attention(q, pool, index, rows, config.head_dim**-0.5)
        return layer.out(mixed.flatten(1), index, batch, pool, self.ops)

    @torch.inference_mode()
    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[R, hidden], rows of what `forward` returned -> float32 [R, vocab]."""
        return self.head.apply(hidden_rows).float()
