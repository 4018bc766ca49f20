"""Bytes, operations and goals of the GPU bench, against arithmetic by hand."""

from __future__ import annotations

import pytest
from heddle.bench.gpu import costs
from heddle.bench.gpu.bases import LLAMA_2_7B, LLAMA_3_8B, Sizes, base
from heddle.bench.gpu.rows import OpRow, op_goals, step_goals

SMALL = base("small", layers=2, hidden=64, heads=4, kv_heads=2, inner=96, vocab=128)
"""Head size 16: q has 64 out-features, k and v 32 each."""
SIZES = Sizes()


def test_the_bases_are_as_published():
    """Llama 2 7B has 6,738,415,616 parameters, Llama 3 8B 8,030,261,248."""
    for each, parameters in ((LLAMA_2_7B, 6_738_415_616), (LLAMA_3_8B, 8_030_261_248)):
        config = each.config
        linears = sum(n * k for n, k in config.linear_shapes.values())
        tables = 2 * config.vocab_size * config.hidden_size
        norms = (2 * config.num_layers + 1) * config.hidden_size
        assert config.num_layers * linears + tables + norms == parameters


def test_a_weight_in_each_form():
    assert costs.weight_bytes(10, 256, "fp16", 128) == 5120
    assert costs.weight_bytes(10, 256, "INT8", 128) == 2560 + 40
    assert costs.weight_bytes(10, 256, "W4", 128) == 1280 + 10 * 2 * 3
    assert costs.weight_bytes(10, 300, "W4", 128) == 1500 + 10 * 3 * 3  # the last group is not full


def test_a_linear_reads_weight_and_input_and_writes_its_output():
    cost = costs.linear(3, 10, 256, "fp16", 128)
    assert cost == costs.Cost(5120 + 3 * 256 * 2 + 3 * 10 * 2, 2 * 3 * 10 * 256)


def test_adapters_of_different_ranks_on_a_group_of_modules():
    """Ranks 2 and 3 on modules of 100 in-features, 10 and 20 out-features; rows 0 and 2 take the first, row 1 the
    other."""
    ranks, widths, rows, k = (2, 3), (10, 20), 3, 100
    assert costs.adapter_bytes(ranks, widths, k) == ((100 + 10) + (100 + 20)) * (2 + 3) * 2
    of_rows = 2 + 3 + 2
    outputs = 2 * rows * (10 + 20) * 2
    add = costs.add_lora(rows, ranks, widths, k)
    assert add.bytes == 2300 + rows * k * 2 + outputs
    assert add.flops == 2 * of_rows * (2 * k + 10 + 20)
    shrink = costs.shrink(rows, ranks, widths, k)
    assert shrink == costs.Cost(rows * k * 2 + (2 + 3) * 2 * k * 2 + of_rows * 2 * 4, 2 * of_rows * 2 * k)
    expand = costs.expand(rows, ranks, widths)
    assert expand == costs.Cost(of_rows * 2 * 4 + (2 + 3) * 30 * 2 + outputs, 2 * of_rows * 30)
    assert shrink.flops + expand.flops == add.flops


def test_attention_reads_each_context_once_for_all_query_heads_of_a_key_head():
    """3 sequences of 40 tokens in blocks of 16: K and V of 2 heads of 16 values; 4 query heads."""
    cost = costs.attention(SMALL, 3, 40, 16, "fp16")
    assert cost.bytes == 3 * 40 * (2 * 2 * 16 * 2) + 3 * 3 * 4 + 3 * 4 * 16 * 2 * 2
    assert cost.flops == 3 * 40 * 4 * (2 * 16 + 2 * 16)
    assert costs.kv_bytes(SMALL, "INT8") == 2 * 2 * (16 + 4)


def test_the_other_operations():
    assert costs.rms_norm(3, 64).bytes == 3 * 64 * 2 + 64 * 2 + 3 * 64 * 2
    assert costs.add_rms_norm(3, 64).bytes == 2 * 3 * 64 * 2 + 64 * 2 + 2 * 3 * 64 * 2
    assert costs.silu_mul(3, 96).bytes == 3 * 2 * 96 * 2 + 3 * 96 * 2
    assert costs.embedding(3, 64).bytes == 2 * 3 * 64 * 2
    q, kv, angles = 64 * 2, 32 * 2, 2 * 8 * 4
    assert costs.rope_and_write(SMALL, 3, "fp16").bytes == 3 * (2 * q + 2 * kv + angles + 2 * kv)
    assert costs.choose_tokens(3, 128) == costs.Cost(3 * 128 * 4, 3 * 128)


def test_a_step_of_a_small_model():
    """Two rows of 5 tokens on one adapter of rank 3, float16."""
    floor = costs.step(SMALL, "fp16", 2, 5, [3], SIZES)
    linears = (64 + 32 + 32) * 64 + 64 * 64 + 2 * 96 * 64 + 64 * 96
    head, embedding, norms = 128 * 64, 2 * 64, 5 * 64
    assert floor.weights == 2 * (2 * linears + head + embedding + norms)
    assert floor.kv == 2 * 2 * (5 + 1) * (2 * 2 * 16 * 2)
    ends = (64 + 64) + 2 * (64 + 32) + (64 + 64) + 2 * (64 + 96) + (96 + 64)
    assert floor.adapters == 2 * 3 * ends * 2
    deltas, mixed = 2 * 2 * 3 * ends, 2 * 5 * 4 * 4 * 16
    assert floor.flops == 2 * (2 * 2 * linears + deltas + mixed) + 2 * 2 * head
    assert floor.bytes == floor.weights + floor.kv + floor.adapters


def test_a_step_of_llama_3_8b_at_one_row():
    """8,030,261,248 parameters less the embedding's 525,336,576, of which one row is read, in two bytes each."""
    floor = costs.step(LLAMA_3_8B, "fp16", 1, 512, [], SIZES)
    assert floor.weights == 2 * (8_030_261_248 - 128256 * 4096 + 4096)
    assert floor.kv == 32 * 513 * 4096
    assert floor.adapters == 0


def row(**changes: object) -> OpRow:
    values = {
        "base": "Llama-3-8B", "op": "linear", "detail": "gate_up W4", "rows": 16, "context": 0, "ranks": (),
        "seconds": 1e-4, "bytes": 10**8, "flops": 1, "of_copy": 0.5, "of_product": 0.1, "torch_seconds": 2.4e-4,
        "error": 0.0,
    }  # fmt: skip
    return OpRow(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "aim", "met"),
    [
        ({}, ">= 2.5 x torch fp16", False),
        ({"torch_seconds": 2.6e-4}, ">= 2.5 x torch fp16", True),
        ({"detail": "down W4"}, ">= 2.5 x torch fp16", False),
        ({"rows": 1024, "torch_seconds": 0.9e-4}, ">= 0.85 x torch fp16", True),
        ({"op": "attention", "detail": "KV fp16", "bytes": 256 * 10**6, "of_copy": 0.8}, ">= 0.8 of bandwidth", True),
        ({"op": "add_lora", "detail": "qkv", "ranks": (16,) * 64, "of_copy": 0.26}, "<= 4 x byte floor", True),
        ({"op": "add_lora: shrink", "detail": "qkv", "ranks": (16,) * 64, "of_copy": 0.24}, "<= 4 x byte floor", False),
    ],
)  # fmt: skip
def test_goals_of_operations(changes: dict[str, object], aim: str, met: bool):
    (goal,) = op_goals(row(**changes), LLAMA_3_8B, SIZES)
    assert (goal.aim, goal.met) == (aim, met)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 64},
        {"detail": "out W4"},  # 4096 x 4096 in float16 has 34 MB
        {"detail": "gate_up INT8"},
        {"op": "attention", "detail": "KV fp16", "bytes": 255 * 10**6},
        {"op": "add_lora", "detail": "qkv", "ranks": (16,) * 8},
    ],
)
def test_rows_without_a_goal(changes: dict[str, object]):
    assert op_goals(row(**changes), LLAMA_3_8B, SIZES) == ()


def test_goals_of_steps():
    def words(*step: object) -> list[tuple[str, bool]]:
        return [(goal.aim, goal.met) for goal in step_goals(*step)]  # type: ignore[arg-type]

    assert words("fp16", 16, 0, 1.5, None) == [("<= 1.5 x byte floor", True)]
    assert words("fp16", 64, 0, 1.5, None) == []
    assert words("W4", 64, 8, 2.1, 0.86) == [("<= 2 x byte floor", False), (">= 0.85 of base", True)]
    assert words("fp16", 1, 1, 1.4, 0.91) == [("<= 1.5 x byte floor", True), (">= 0.92 of base", False)]
    assert words("fp16", 64, 8, 9.0, 0.9) == [(">= 0.88 of base", True)]
    assert words("INT8", 1, 8, 9.0, 0.5) == []


def test_mixes_of_adapters_are_no_more_than_rows():
    sizes = Sizes(adapters=(1, 2, 4), rank=16, mixed=(4, 8, 64))
    assert sizes.mixes(2) == [[16], [16, 16], [4, 8]]
    assert sizes.mixes(4) == [[16], [16] * 2, [16] * 4, [4, 8], [4, 8, 64, 4]]
