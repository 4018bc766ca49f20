"""What is set aside for a step, against what its kernels are given to write to: listed on the "meta" device."""

from __future__ import annotations

import pytest
import torch
from heddle.bench.gpu.bases import LLAMA_3_8B
from heddle.core.config import EngineConfig
from heddle.core.engine.device import step_bytes
from heddle.kernels.ops import AttentionBatch
from heddle.kernels.pool import Pool, PoolLayout
from heddle.kernels.triton import attention
from heddle.kernels.triton.launch import recorded

MODEL = LLAMA_3_8B.config


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def partial_results(sequences: int, context: int) -> int:
    """Bytes that attention of an eager step has for parts of contexts; its tables are as wide as the longest."""
    batch = AttentionBatch(
        block_tables=meta(sequences, -(-context // 16)),
        cu_seqlens_q=meta(sequences + 1),
        context_lens=meta(sequences),
        slot_mapping=meta(sequences, dtype=torch.int64),
        max_query_len=1,
    )
    pool = Pool(PoolLayout(2, MODEL.num_kv_heads, MODEL.head_dim, 16, torch.float16), 4, "meta")
    q = meta(sequences, MODEL.num_heads, MODEL.head_dim, dtype=torch.float16)
    with recorded(run=False) as launches:
        attention.paged_attention(q, pool, 0, batch, 1.0)
    decode = next(launch for launch in launches if launch.name == "decode")
    arguments = dict(zip(decode.kernel.arg_names, decode.arguments))
    return sum(arguments[name].nbytes for name in ("part_mixed", "part_stats"))


@pytest.mark.parametrize("context", [257, 8192, 131_000])
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 2048), (64, 2048), (64, 16)])
def test_long_contexts_are_set_aside_for(context: int, sequences: int, tokens: int) -> None:
    def bound(length: int | None) -> int:
        config = EngineConfig(model="", max_num_seqs=sequences, max_model_len=length)
        return step_bytes(config, MODEL, torch.float16, tokens)

    rows = min(sequences, tokens)
    assert bound(context) - bound(1) == partial_results(rows, context) - partial_results(rows, 1)
    assert bound(None) == bound(MODEL.max_position_embeddings)
