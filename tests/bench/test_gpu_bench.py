"""The whole GPU bench at tiny shapes under Triton's interpreter, with a stand-in for the clock; and without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from heddle.bench.gpu import __main__ as bench
from heddle.bench.gpu.bases import Sizes, base
from heddle.bench.gpu.cases import TOLERANCE
from heddle.bench.gpu.random_weights import random_model
from heddle.bench.gpu.rows import LeftOut, OpRow, Peaks, Row, StepRow
from heddle.bench.gpu.steps import Steps
from heddle.bench.gpu.table import report
from heddle.core.engine.accelerator import Captured, Host
from heddle.kernels import reference, triton

CPU = torch.device("cpu")
TINY = base("tiny", layers=1, hidden=32, heads=2, kv_heads=1, inner=48, vocab=64)
SIZES = Sizes(
    rows=(2,), many_rows=65, contexts=(20, 260), adapters=(2,), rank=2, mixed=(1, 3), block_size=16, group_size=16,
    max_model_len=272, copied=1 << 10, side=8,
)  # fmt: skip


class StandIn:
    """A clock of its own: every call is made once and takes a millisecond."""

    def __init__(self) -> None:
        self.calls = 0

    def alone(self, call: Callable[[], torch.Tensor]) -> float:
        self.calls += 1
        assert call().numel()
        return 1e-3

    def in_a_row(self, call: Callable[[], object]) -> float:
        self.calls += 1
        call()
        return 1e-3


@dataclass
class Again:
    function: Callable[[], torch.Tensor]
    output: torch.Tensor

    def replay(self) -> None:
        self.output.copy_(self.function())


class Replaying(Host):
    """Replays by calling again."""

    def capture(self, function: Callable[[], torch.Tensor]) -> Captured:
        return Again(function, function())


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    torch.manual_seed(0)
    return list(bench.measure([TINY], SIZES, CPU, StandIn(), Replaying(), "stand-in", lambda: True, ("W4",)))


def test_every_operation_s_call_is_valid_and_gives_what_the_reference_gives(rows: list[Row]) -> None:
    assert not [row for row in rows if isinstance(row, LeftOut)]
    operations = [row for row in rows if isinstance(row, OpRow)]
    compared = [row for row in operations if row.error is not None]
    assert {row.op for row in compared} >= {
        "linear", "attention", "add_lora", "add_lora: other way", "rms_norm", "add_rms_norm", "rope_and_write",
        "silu_mul", "embedding", "choose_tokens",
    }  # fmt: skip
    for row in compared:
        assert row.error is not None
        assert row.error <= TOLERANCE, row
    assert {row.op for row in operations if row.error is None} == {"add_lora: shrink", "add_lora: expand"}
    assert {row.detail for row in operations if row.op == "linear"} == {
        f"{group} {form}" for group in ("qkv", "out", "gate_up", "down") for form in ("fp16", "INT8", "W4")
    } | {"head fp16"}
    assert {row.rows for row in operations if row.op == "linear"} == {2, 65}
    assert {(row.context, row.detail) for row in operations if row.op == "attention"} == {
        (context, f"KV {form}") for context in (20, 260) for form in ("fp16", "INT8")
    }
    assert {row.ranks for row in operations if row.op == "add_lora"} == {(2, 2), (1, 3)}


def test_rates_are_floors_over_times_and_shares_are_of_the_peaks(rows: list[Row]) -> None:
    (peaks,) = (row for row in rows if isinstance(row, Peaks))
    assert peaks.copy_bytes_per_second == pytest.approx(2 * 1024 / 1e-3)
    assert peaks.product_flops_per_second == pytest.approx(2 * 8**3 / 1e-3)
    norm = next(row for row in rows if isinstance(row, OpRow) and row.op == "rms_norm")
    moved = 128 + 128 + 64  # 2 rows of 32 values are read and written, and the weight
    assert norm.bytes_per_second == pytest.approx(moved / 1e-3)
    assert norm.of_copy == pytest.approx(moved / 2048)
    assert norm.of_product == pytest.approx(norm.flops / 1024)
    assert norm.times_torch == pytest.approx(1)


def test_steps_are_measured_with_and_without_adapters(rows: list[Row]) -> None:
    steps = [row for row in rows if isinstance(row, StepRow)]
    assert [(row.form, row.rows, row.ranks) for row in steps] == [
        ("W4", 2, ranks) for ranks in ((), (2, 2), (1, 3))
    ]
    assert all(row.replay_equals_eager for row in steps)
    assert all((row.of_base is None) == (row.ranks == ()) for row in steps)
    assert all(row.over_floor == pytest.approx(1e-3 * 2048 / 1e-3 / row.bytes) for row in steps)


@pytest.mark.parametrize("form", ["fp16", "INT8", "W4"])
def test_a_step_s_hidden_states_are_the_reference_s(form: str) -> None:
    hidden = {}
    for ops in (reference, triton):
        torch.manual_seed(3)
        model = random_model(TINY, form, SIZES, ops, CPU)
        steps = Steps(model, TINY, SIZES, 2, 20, (1, 3))
        hidden[ops] = model.forward(steps.batch(Host()), steps.pool)
    assert (hidden[triton] - hidden[reference]).abs().max() <= TOLERANCE * hidden[reference].abs().max()


def test_the_table_names_what_was_left_out_and_counts_goals(rows: list[Row]) -> None:
    said = report([*rows, LeftOut(what="steps of a giant", reason="no room")])
    assert "left out: steps of a giant: no room" in said
    assert "| tiny | W4" in said
    goals = [goal for row in rows if isinstance(row, OpRow | StepRow) for goal in row.goals]
    assert f"goals: {sum(goal.met for goal in goals)} of {len(goals)} met" in said
    assert "NOT MET" in said


def test_what_does_not_fit_and_what_there_is_no_time_for_is_left_out_by_name() -> None:
    class NoRoom(StandIn):
        def in_a_row(self, call: Callable[[], object]) -> float:
            raise torch.OutOfMemoryError("CUDA out of memory")

        def alone(self, call: Callable[[], torch.Tensor]) -> float:
            if self.calls == 2:  # both peaks are known
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().alone(call)

    found = list(
        bench.measure(
            [TINY],
            SIZES,
            CPU,
            NoRoom(),
            Replaying(),
            "stand-in",
            iter([True] * 2 + [False] * 999).__next__,
            ("W4",),
        )
    )
    left_out = [row for row in found if isinstance(row, LeftOut)]
    assert [row.reason for row in left_out[:2]] == ["CUDA out of memory"] * 2
    assert left_out[0].what == "steps of tiny W4"
    assert {row.reason for row in left_out[2:]} == {"no time left (--minutes)"}
    assert len(found) == 1 + len(left_out)


def test_wrong_results_are_faults() -> None:
    operation = OpRow(
        base="tiny", op="linear", detail="out W4", rows=1, context=0, ranks=(), seconds=1.0, bytes=1, flops=1,
        of_copy=1.0, of_product=1.0, torch_seconds=None, error=float("nan"),
    )  # fmt: skip
    step = StepRow(
        base="tiny", form="W4", rows=2, context=20, ranks=(2,), seconds=1.0, bytes=1, flops=1, over_floor=1.0,
        of_base=None, replay_equals_eager=False,
    )  # fmt: skip
    assert bench.faults([operation, step]) == [
        "tiny linear out W4, 1 rows: nan from the reference",
        "tiny W4, 2 rows, 1 adapters: the replayed step is not the eager one",
    ]


def test_without_a_gpu_it_says_so_in_one_line_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert bench.main([]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "no CUDA device" in said.err


def test_floors_count_launches_at_most_16_a_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--floors", "--models", "Llama-3-8B"]) == 0
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| W4")]
    assert [int(line[2]) for line in lines] == [1, 1, 16, 16, 16, 64, 64, 64, 64]
    assert {int(line[3]) == 0: int(line[9]) for line in lines} == {True: 4 + 32 * 10, False: 4 + 32 * 16}
