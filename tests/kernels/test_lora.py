"""Adapter deltas for mixed batches, from rows scattered over a poisoned pool, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heddle.kernels import cpu, reference, triton
from heddle.kernels.ops import LoraBatch, Ops
from heddle.kernels.triton import lora as triton_lora

Case = Callable[..., Any]
Check = Callable[..., None]
K = 100
SHAPES = {0: (96, K), 1: (33, K), 2: (40, K), 4: (300, K)}
"""Module -> (N, K) of this file's fused layer of four."""
MODULES = [0, 1, 2, 4]
OFFSETS = [0, 96, 129, 169, 469]


@pytest.fixture(params=["reference", "cpu", "triton in one launch", "triton in two"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ops:
    """Modules as small as these take Triton one launch, larger ones two."""
    if request.param == "triton in two":
        monkeypatch.setattr(triton_lora, "FUSED_K", 0)
    return {"reference": reference, "cpu": cpu}.get(request.param, triton)


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, OFFSETS[-1]).to(dtype), torch.randn(rows, K).to(dtype)


def run(ops: Ops, case: Any, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    result = out.clone()
    ops.add_lora(result, x, case.pool, case.layer, MODULES, OFFSETS, case.lora)
    return result


def everywhere(rank: int) -> dict[int, int]:
    return dict.fromkeys(MODULES, rank)


@pytest.mark.parametrize("rank", [1, 2, 3, 5, 8, 16, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_any_rank_and_adapter_dtype(
    ops: Ops, lora_case: Case, check: Check, rank: int, dtype: torch.dtype
) -> None:
    case = lora_case([(0, [1, 4, 2]), (1, [0])], [everywhere(rank), everywhere(1)], SHAPES, dtype=dtype)
    out, x = inputs(6)
    check(run(ops, case, out, x), case.expected(out, x, MODULES, OFFSETS))


@pytest.mark.parametrize("implementation", [reference, cpu])
@pytest.mark.parametrize("rank", [1, 5, 16])
def test_adapters_of_different_dtypes_in_one_batch(
    implementation: Ops, lora_case: Case, check: Check, rank: int
) -> None:
    assert implementation.READS_ANY_FORM
    dtypes = [torch.float16, torch.float32, torch.bfloat16]
    segments = [(1, [0, 5]), (0, [1, 4, 2]), (2, [3]), (0, [0])]
    case = lora_case(segments, [everywhere(rank), everywhere(3), everywhere(8)], SHAPES, dtypes=dtypes)
    out, x = inputs(7)
    check(run(implementation, case, out, x), case.expected(out, x, MODULES, OFFSETS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_activations(ops: Ops, lora_case: Case, check: Check, dtype: torch.dtype) -> None:
    case = lora_case([(0, [0, 2])], [everywhere(4)], SHAPES, dtype=dtype)
    out, x = inputs(3, dtype)
    got = run(ops, case, out, x)
    assert got.dtype == dtype
    check(got, case.expected(out, x, MODULES, OFFSETS))


POPULARITY = {
    "identical": [0] * 24,
    "distinct": list(range(24)),
    "uniform": [i % 6 for i in range(24)],
    "zipf": [0] * 12 + [1] * 6 + [2] * 3 + [3] * 2 + [4],
    "skewed": [0] * 20 + [1, 2, 3, 4],
}


@pytest.mark.parametrize("popularity", POPULARITY)
def test_popularity(ops: Ops, lora_case: Case, check: Check, popularity: str) -> None:
    """How often each adapter occurs in a batch; rows in random order, some without any adapter."""
    chosen = POPULARITY[popularity]
    rows = torch.randperm(30).tolist()
    segments = [(slot, [r for r, c in zip(rows, chosen) if c == slot]) for slot in sorted(set(chosen))]
    ranks = [everywhere(1 + 3 * slot % 11) for slot in range(max(chosen) + 1)]
    case = lora_case(segments, ranks, SHAPES)
    out, x = inputs(30)
    got = run(ops, case, out, x)
    check(got, case.expected(out, x, MODULES, OFFSETS))
    without = sorted(set(range(30)) - set(rows[:24]))
    assert torch.equal(got[without], out[without])


def test_modules_and_segments_that_are_absent(ops: Ops, lora_case: Case, check: Check) -> None:
    """An adapter on one module only, one on none of these, an empty segment, a different rank per module."""
    ranks = [{1: 3}, {}, {0: 7, 4: 2}, everywhere(4)]
    case = lora_case([(0, [0, 1]), (1, [2]), (3, []), (2, [5, 3])], ranks, SHAPES)
    out, x = inputs(6)
    got = run(ops, case, out, x)
    check(got, case.expected(out, x, MODULES, OFFSETS))
    assert torch.equal(got[[2, 4]], out[[2, 4]])
    assert torch.equal(got[:2, :96], out[:2, :96])
    assert torch.equal(got[:2, 129:], out[:2, 129:])


@pytest.mark.parametrize("segments", [[], [(0, [])]])
def test_no_pairs_change_nothing(ops: Ops, lora_case: Case, segments: list[Any]) -> None:
    case = lora_case(segments, [everywhere(2)], SHAPES)
    out, x = inputs(4)
    assert torch.equal(run(ops, case, out, x), out)


def test_several_weighted_adapters_on_a_row(ops: Ops, lora_case: Case, check: Check) -> None:
    segments = [(0, [0, 1, 2]), (1, [1, 2]), (2, [2, 0])]
    case = lora_case(
        segments, [everywhere(r) for r in (2, 5, 9)], SHAPES, pair_weights=lambda pair: 0.3 * pair - 0.5
    )
    out, x = inputs(3)
    check(run(ops, case, out, x), case.expected(out, x, MODULES, OFFSETS))


def test_prefill_sized_segments(ops: Ops, lora_case: Case, check: Check) -> None:
    case = lora_case(
        [(1, list(range(70))), (0, list(range(80, 93)))], [everywhere(9), everywhere(16)], SHAPES
    )
    out, x = inputs(100)
    check(run(ops, case, out, x), case.expected(out, x, MODULES, OFFSETS))


def test_part_of_the_columns_of_a_wider_output(ops: Ops, lora_case: Case, check: Check) -> None:
    """Modules 1 and 2 alone, written from column 96 of a fused output on."""
    case = lora_case([(0, [0, 3])], [everywhere(4)], SHAPES)
    out, x = inputs(4)
    want = case.expected(out, x, [1, 2], [96, 129, 169])
    ops.add_lora(out, x, case.pool, case.layer, [1, 2], [96, 129, 169], case.lora)
    check(out, want)


def test_zero_b_leaves_the_base_exactly(ops: Ops, lora_case: Case) -> None:
    case = lora_case([(0, [0, 1])], [{0: 4}], SHAPES)
    entries = case.lora.tables.rows[3 + 4 :]  # the four columns of B
    for entry in entries.tolist():
        case.pool.memory.view(-1)[entry * 16 : entry * 16 + 96 * 4] = 0
    out, x = inputs(2)
    assert torch.equal(run(ops, case, out, x), out)


def test_nan_in_one_row_or_one_adapter_stays_there(ops: Ops, lora_case: Case) -> None:
    case = lora_case([(0, [0, 1, 2]), (1, [3, 4])], [everywhere(3), everywhere(3)], SHAPES)
    out, x = inputs(6)
    x[1, 5] = float("nan")
    broken = int(case.lora.tables.rows[case.lora.tables.first_row[1, case.layer, 0]])
    case.pool.memory.view(-1)[broken * 16 : broken * 16 + 4] = 0xFF
    got = run(ops, case, out, x)
    assert torch.isfinite(got[[0, 2, 5]]).all()
    assert got[1].isnan().all()
    assert got[3:5, :96].isnan().all()
    assert torch.isfinite(got[3:5, 96:]).all()


def test_bits_of_a_row_do_not_depend_on_its_company(lora_case: Case) -> None:
    """A row in a segment of 1 to 40 rows, and with other segments before and after it: the same bits."""
    ranks = [everywhere(rank) for rank in (5, 8, 3, 16)]
    segments = [(1, list(range(40))), (0, [41, 3, 7]), (2, list(range(45, 50))), (3, [44])]
    case = lora_case(segments, ranks, SHAPES, pair_weights=lambda pair: 0.1 * pair + 0.2)
    out, x = inputs(50)
    whole = run(cpu, case, out, x)
    full, starts = case.lora, case.lora.starts.tolist()

    def some(pairs: list[tuple[int, int]]) -> LoraBatch:
        """The batch with only these (first pair, last pair) of each of its segments."""
        index = [i for first, last in pairs for i in range(first, last)]
        return LoraBatch(
            tables=full.tables,
            pair_rows=full.pair_rows[index],
            pair_weights=full.pair_weights[index],
            starts=torch.tensor([0, *(b - a for a, b in pairs)]).cumsum(0).to(torch.int32),
            slots=full.slots[: len(pairs)],
        )

    for count in range(1, 41):
        case.lora = some([(40 - count, 40), (starts[1], starts[1] + 1 + count % 3)])
        got = run(cpu, case, out, x)
        rows = sorted({*range(40 - count, 40), 41} - {3, 7})
        assert torch.equal(got[rows], whole[rows]), count


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_with_two_adapters_changes_no_bit_of_the_others(lora_case: Case, threads: int) -> None:
    """With it a batch is worked on in two passes, without it segment by segment."""
    ranks = [everywhere(rank) for rank in (5, 8, 3, 16, 4)]
    alone = [row for row in range(2, 40) if row not in (3, 7)]
    segments = [(1, alone), (0, [41, 3, 7]), (2, list(range(45, 50))), (3, [44]), (4, [43])]
    stacked = [*segments[:2], (2, [44, *range(45, 50)]), *segments[3:]]
    out, x = inputs(50)
    before = cpu.team.TEAM.num_threads
    cpu.team.TEAM.resize(threads)
    results = []
    try:
        for batch in (segments, stacked):
            torch.manual_seed(1)  # the same adapters
            results.append(run(cpu, lora_case(batch, ranks, SHAPES), out, x))
    finally:
        cpu.team.TEAM.resize(before)
    apart, together = results
    others = torch.arange(50) != 44
    assert torch.equal(apart[others], together[others])
    assert not torch.equal(apart[44], together[44])
