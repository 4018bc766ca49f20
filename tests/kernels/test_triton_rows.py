"""Triton's adapters' deltas and attention: a row's bits show neither its company nor which launches made it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from heddle.kernels import triton
from heddle.kernels.ops import AttentionBatch
from heddle.kernels.triton import lora
from heddle.kernels.triton.launch import recorded

from . import interpreted

Case = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_integer_overflows() -> Iterator[None]:
    interpreted.check_overflow(True)
    yield
    interpreted.check_overflow(False)


def test_deltas_are_the_same_from_parts_from_whole_rows_and_from_one_launch(
    lora_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K of two parts: with few pairs a program each, with many one program; a small module all at once; and in a
    segment of any length."""
    shapes = {0: (33, 700), 3: (40, 700)}
    case = lora_case([(1, list(range(18))), (0, [19])], [{0: 5, 3: 17}, {0: 3}], shapes)
    out, x = torch.randn(20, 73), torch.randn(20, 700)

    def run(batch: Any) -> torch.Tensor:
        result = out.clone()
        triton.add_lora(result, x, case.pool, case.layer, [0, 3], [0, 33, 73], batch)
        return result

    with recorded() as launches:
        fused = run(replace(case.lora, rounds=(0, 2)))
    assert [launch.name for launch in launches] == ["add_deltas"]
    monkeypatch.setattr(lora, "FUSED_K", 699)
    with recorded() as launches:
        few = run(replace(case.lora, rounds=(0, 2)))
    assert torch.equal(few, fused)
    assert [launch.name for launch in launches] == ["shrink", "expand"]
    assert launches[0].grid[2] == 2 * 2
    monkeypatch.setattr(lora, "FEW_PAIRS", 0)
    with recorded() as launches:
        many = run(replace(case.lora, rounds=(0, 2)))
    assert launches[0].grid[2] == 2
    assert torch.equal(few, many)
    one = replace(
        case.lora,
        pair_rows=case.lora.pair_rows[17:18],
        pair_weights=case.lora.pair_weights[17:18],
        starts=torch.tensor([0, 1], dtype=torch.int32),
        slots=case.lora.slots[:1],
    )
    assert torch.equal(run(one)[17], few[17])


@pytest.mark.parametrize("cache", [torch.float16, torch.int8])
@pytest.mark.parametrize(("head_dim", "rows"), [(16, 64), (128, 64), (192, 32), (256, 32)])
def test_attention_is_the_same_for_a_chunk_and_for_its_rows_one_by_one(
    attention_case: Case, check: Callable[..., None], head_dim: int, rows: int, cache: torch.dtype
) -> None:
    """A chunk over the end of a part of 256 tokens, merged in registers; each row as a decode, merged by a launch."""
    case = attention_case(
        [(250, 9), (0, 1)], heads=2, kv_heads=1, head_dim=head_dim, dtype=torch.float16, kv_dtype=cache,
        block_size=16,
    )  # fmt: skip
    with recorded() as launches:
        whole = triton.paged_attention(case.q, case.pool, case.layer, case.batch, 0.25)
    assert [launch.name for launch in launches] == ["prefill", "decode", "merge_parts"]
    assert launches[0].options["BLOCK_M"] == (rows if cache != torch.int8 else 32)
    check(whole, case.expected(0.25))
    for row in (0, 5, 6, 8):
        batch = AttentionBatch(
            block_tables=case.batch.block_tables[:1].clone(),
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=torch.tensor([251 + row], dtype=torch.int32),
            slot_mapping=case.batch.slot_mapping[:1],
            max_query_len=1,
        )
        with recorded() as launches:
            alone = triton.paged_attention(case.q[row : row + 1], case.pool, case.layer, batch, 0.25)
        assert [launch.name for launch in launches] == ["decode", "merge_parts"]
        assert torch.equal(alone[0], whole[row]), row
