"""The bases whose shapes are measured, and at which sizes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice

from ...core.model.config import ModelConfig, Rope
from ...lora.base import MODULES

FORMS = ("fp16", "INT8", "W4")
"""Of the layers' linears; the head stays in float16."""
GROUPS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Linears of one input, which are one product."""


@dataclass(frozen=True)
class Base:
    """A model by its shapes."""

    name: str
    config: ModelConfig

    def widths(self, group: str) -> list[int]:
        """out_features of the group's modules, in order."""
        return [self.config.linear_shapes[module][0] for module in GROUPS[group]]

    def shape(self, group: str) -> tuple[int, int]:
        """(N, K) of the group as one product."""
        return sum(self.widths(group)), self.config.linear_shapes[GROUPS[group][0]][1]

    def modules(self, group: str) -> tuple[int, ...]:
        return tuple(MODULES.index(module) for module in GROUPS[group])


def base(name: str, *, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int) -> Base:
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner,
        num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=hidden // heads, rms_norm_eps=1e-5,
        rope=Rope(), max_position_embeddings=8192, tie_word_embeddings=False, attention_bias=False,
        attention_output_bias=False, mlp_bias=False, torch_dtype="float16", bos_token_id=0, eos_token_ids=(1,),
        quantization_config=None,
    )  # fmt: skip
    return Base(name, config)


LLAMA_2_7B = base("Llama-2-7B", layers=32, hidden=4096, heads=32, kv_heads=32, inner=11008, vocab=32000)
LLAMA_3_8B = base("Llama-3-8B", layers=32, hidden=4096, heads=32, kv_heads=8, inner=14336, vocab=128256)
BASES = {each.name: each for each in (LLAMA_2_7B, LLAMA_3_8B)}


@dataclass(frozen=True)
class Sizes:
    """What is measured of each base."""

    rows: tuple[int, ...] = (1, 16, 64)
    many_rows: int = 1024
    """Of linears, as in a prefill."""
    contexts: tuple[int, ...] = (512, 8192)
    """Tokens of each sequence, the new one among them; steps are measured at the first."""
    adapters: tuple[int, ...] = (1, 8, 64)
    """Distinct ones in a step; as many rows at least."""
    rank: int = 16
    mixed: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Ranks of adapters that differ, in turn."""
    block_size: int = 16
    group_size: int = 128
    max_model_len: int = 8192
    """A captured step's block tables are as wide as this asks for."""
    copied: int = 1 << 30
    """Bytes of the copy that bandwidth is measured by."""
    side: int = 8192
    """Of the square matrices of the product that the rate is measured by."""

    def mixes(self, rows: int) -> list[list[int]]:
        """The adapters of a step of `rows`, by their ranks: equal ones of each number, then mixed ones."""
        counts = [count for count in self.adapters if count <= rows]
        equal = [[self.rank] * count for count in counts]
        return equal + [list(islice(cycle(self.mixed), count)) for count in counts if count > 1]
