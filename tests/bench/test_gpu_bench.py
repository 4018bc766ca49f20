"""The whole GPU bench at tiny shapes under Triton's interpreter, with a stand-in for the clock; and without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from heddle.bench.gpu import __main__ as bench
from heddle.bench.gpu import clock as clock_module
from heddle.bench.gpu.bases import Sizes, base
from heddle.bench.gpu.cases import TOLERANCE
from heddle.bench.gpu.clock import EventClock
from heddle.bench.gpu.random_weights import random_model
from heddle.bench.gpu.rows import LeftOut, OpRow, Peaks, Row, StepRow
from heddle.bench.gpu.steps import Steps
from heddle.bench.gpu.table import report
from heddle.core.engine.accelerator import Captured, Host
from heddle.kernels import reference, triton
from heddle.kernels.triton.launch import recorded

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
    return list(
        bench.measure([TINY], SIZES, CPU, StandIn(), Replaying(), "stand-in", lambda share: True, ("W4",))
    )


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


def test_steps_are_measured_with_and_without_adapters_and_draws(rows: list[Row]) -> None:
    steps = [row for row in rows if isinstance(row, StepRow)]
    assert [(row.form, row.rows, row.ranks, row.draws) for row in steps] == [
        ("W4", 2, *kind) for kind in (((), False), ((), True), ((2, 2), False), ((1, 3), False))
    ]
    assert all(row.replay_equals_eager for row in steps)
    assert [row.of_base for row in steps] == [None, 1, 1, 1]
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


def test_a_drawn_step_s_tokens_are_drawn_by_the_kernel() -> None:
    torch.manual_seed(3)
    model = random_model(TINY, "fp16", SIZES, triton, CPU)
    for draws in (False, True):
        steps = Steps(model, TINY, SIZES, 2, 20, (), draws=draws)
        with recorded() as launches:
            tokens = steps.whole(steps.batch(Host()))
        assert [launch.name for launch in launches].count("draw") == draws
        assert ((tokens >= 0) & (tokens < 64)).all()


def test_what_does_not_fit_is_left_out_by_name() -> None:
    class NoRoom(StandIn):
        def in_a_row(self, call: Callable[[], object]) -> float:
            raise torch.OutOfMemoryError("CUDA out of memory")

        def alone(self, call: Callable[[], torch.Tensor]) -> float:
            if self.calls == 2:  # both peaks are known
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().alone(call)

    found = list(
        bench.measure(
            [TINY], SIZES, CPU, NoRoom(), Replaying(), "stand-in", lambda share: share < 0.4, ("W4",)
        )
    )
    left_out = [row for row in found if isinstance(row, LeftOut)]
    assert len(found) == 1 + len(left_out)
    assert left_out[0].what == "step of tiny W4, 2 rows, 0 adapters of rank -"
    assert left_out[1].what == "step of tiny W4, 2 rows, 0 adapters of rank -, drawn"
    assert left_out[3].what == "step of tiny W4, 2 rows, 2 adapters of rank 1-3"
    assert [row.reason for row in left_out[:4]] == ["CUDA out of memory"] * 4
    assert {row.reason for row in left_out[4:]} == {"no time left (--minutes)"}


def test_a_section_that_takes_too_long_takes_nothing_from_those_behind_it() -> None:
    """A clock that moves with every call: sections begin as if all before them had taken just their time."""

    class Moving(StandIn):
        def time_left(self, share: float) -> bool:
            return self.calls < 2 + 20 * share

    clock = Moving()
    found = list(
        bench.measure([TINY], SIZES, CPU, clock, Replaying(), "stand-in", clock.time_left, ("fp16", "W4"))
    )
    assert {row.form for row in found if isinstance(row, StepRow)} == {"fp16", "W4"}
    operations = {row.op for row in found if isinstance(row, OpRow)}
    assert {"add_lora", "attention", "linear"} < operations
    assert operations & {"rms_norm", "embedding", "choose_tokens"}
    left_out = [row.what for row in found if isinstance(row, LeftOut)]
    assert any("add_lora" in what for what in left_out)
    assert any("linear" in what for what in left_out)


def test_a_call_finds_the_second_level_cache_full_of_what_is_written_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A write, then a read of all of it, before the first event."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def synchronize(self) -> None:
            return

        def elapsed_time(self, end: Event) -> float:
            return 1.0

    class Noted:
        def __getattr__(self, name: str) -> Callable[[], None]:
            return lambda: log.append(name)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(clock_module, "FLUSH", 1024)
    clock = EventClock(CPU, Replaying())
    clock._flush = Noted()  # type: ignore[assignment]

    def call() -> torch.Tensor:
        log.append("call")
        return torch.zeros(1)

    assert clock.alone(call) == pytest.approx(1e-3)
    assert log[:4] == ["call"] * 4, "captured and warm"
    once = ["zero_", "sum", "event", "call", "event"]
    assert log[4:] == once * (len(log[4:]) // 5)
    assert len(log) > 4 + 5 * 4


def test_wrong_results_are_faults() -> None:
    operation = OpRow(
        base="tiny", op="linear", detail="out W4", rows=1, context=0, ranks=(), seconds=1.0, bytes=1, flops=1,
        of_copy=1.0, of_product=1.0, torch_seconds=None, error=float("nan"),
    )  # fmt: skip
    step = StepRow(
        base="tiny", form="W4", draws=False, rows=2, context=20, ranks=(2,), seconds=1.0, bytes=1, flops=1,
        over_floor=1.0, of_base=None, replay_equals_eager=False,
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
