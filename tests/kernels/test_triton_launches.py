"""How many launches a layer takes at Llama-3-8B's shapes, listed on the "meta" device: second passes included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heddle.core.model.forward_batch import ForwardBatch
from heddle.core.model.llama import DOWN, GATE_UP, OUT, QKV, Layer, LlamaModel, Projection
from heddle.kernels import triton
from heddle.kernels.ops import AdapterTables, AttentionBatch, LoraBatch
from heddle.kernels.packed_weight import PackedWeight
from heddle.kernels.pool import Pool, PoolLayout
from heddle.kernels.triton.launch import Launch, recorded

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
SIXTEEN = torch.float16


def meta(*shape: int, dtype: torch.dtype = SIXTEEN) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class FourBit:
    """A linear of 4 bit weights, for `Projection`."""

    weight_bytes = 0

    def __init__(self, n: int, k: int) -> None:
        self.weight = PackedWeight(
            codes=meta(n, k // 2, dtype=torch.uint8),
            scales=meta(n, k // 128),
            zeros=meta(n, k // 128, dtype=torch.uint8),
            order=None,
            bits=4,
            group_size=128,
        )

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return triton.linear_w4(x, self.weight, None)


def model(layers: int) -> LlamaModel:
    kv = KV_HEADS * HEAD_DIM

    def projection(modules: tuple[int, ...], widths: list[int], k: int) -> Projection:
        return Projection(FourBit(sum(widths), k), modules, widths)  # type: ignore[arg-type]

    layer = Layer(
        input_norm=meta(HIDDEN),
        qkv=projection(QKV, [HIDDEN, kv, kv], HIDDEN),
        out=projection(OUT, [HIDDEN], HIDDEN),
        mlp_norm=meta(HIDDEN),
        gate_up=projection(GATE_UP, [INTERMEDIATE, INTERMEDIATE], HIDDEN),
        down=projection(DOWN, [HIDDEN], INTERMEDIATE),
    )
    config: Any = SimpleNamespace(
        rms_norm_eps=1e-5, head_dim=HEAD_DIM, num_heads=HEADS, num_kv_heads=KV_HEADS, hidden_size=HIDDEN
    )
    table: Any = SimpleNamespace(rows=lambda ids, dtype: meta(len(ids), HIDDEN))
    angles = meta(8192, HEAD_DIM // 2, dtype=torch.float32)
    return LlamaModel(
        config, ops=triton, dtype=SIXTEEN, device=torch.device("meta"), embedding=table, layers=[layer] * layers,
        norm=meta(HIDDEN), head=table, cos_sin=(angles, angles), quantization="", quantization_reason="", notes=(),
    )  # fmt: skip


def step(rows: int, blocks: int, adapters: int, layers: int) -> list[Launch]:
    """A decode of `rows` sequences with `blocks` of 16 tokens in a table."""
    count = torch.int32
    tables = AdapterTables(
        ranks=meta(64, layers, 7, dtype=count),
        first_row=meta(64, layers, 7, dtype=count),
        scales=meta(64, layers, 7, dtype=torch.float32),
        rows=meta(1 << 20, dtype=count),
        dtype=SIXTEEN,
    )
    lora = LoraBatch(
        tables=tables,
        pair_rows=meta(rows, dtype=count),
        pair_weights=meta(rows, dtype=torch.float32),
        starts=meta(adapters + 1, dtype=count),
        slots=meta(adapters, dtype=count),
        rounds=(0, adapters),
    )
    batch = ForwardBatch(
        token_ids=meta(rows, dtype=torch.int64),
        positions=meta(rows, dtype=torch.int64),
        attention=AttentionBatch(
            block_tables=meta(rows, blocks, dtype=count),
            cu_seqlens_q=meta(rows + 1, dtype=count),
            context_lens=meta(rows, dtype=count),
            slot_mapping=meta(rows, dtype=torch.int64),
            max_query_len=1,
        ),
        lora=lora if adapters else None,
    )
    pool = Pool(PoolLayout(layers, KV_HEADS, HEAD_DIM, 16, SIXTEEN), 64, "meta")
    with recorded(run=False) as launches:
        model(layers).forward(batch, pool)
    return launches


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize(("blocks", "most"), [(16, 9), (512, 10)])
@pytest.mark.parametrize("adapters", [0, 1, 8])
def test_a_layer_of_a_decode_takes_at_most_10_launches_and_16_with_adapters(
    rows: int, blocks: int, most: int, adapters: int
) -> None:
    """256 and 8192 tokens of context: the longer takes a second pass of attention."""
    one, three = step(rows, blocks, adapters, 1), step(rows, blocks, adapters, 3)
    a_layer, rest = divmod(len(three) - len(one), 2)
    assert rest == 0
    assert a_layer == most + (6 if adapters else 0)
    assert a_layer <= (16 if adapters else 10)
