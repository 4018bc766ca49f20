"""What was measured, one object a line of JSON, and the goals that it meets or not. No torch."""

from __future__ import annotations

import msgspec

from .bases import Base, Sizes
from .costs import StepFloor

LARGE_WEIGHT, LARGE_CONTEXT = 50e6, 256e6
"""Bytes, of a matrix in float16 and of what a call of attention reads, from which their goals hold."""
STEP_GOALS = (("fp16", 1, 16, 1.5), ("INT8", 16, 64, 2.0), ("W4", 16, 64, 2.0))
"""Form, least and most rows, and how many times its byte floor a step may take."""
RATIO_GOALS = ((("fp16", "INT8", "W4"), 1, 0.92), (("fp16",), 8, 0.88), (("W4",), 8, 0.85))
"""Forms, adapters, and the least share of the throughput without adapters."""


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What was aimed at, in words, what was reached, and whether that will do."""

    aim: str
    reached: float
    met: bool


class Peaks(msgspec.Struct, frozen=True, kw_only=True, tag="peaks"):
    """What this device reaches in the same run."""

    device: str
    copy_bytes_per_second: float
    product_flops_per_second: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was timed, and its floor: the bytes and operations that it takes at least."""

    base: str
    rows: int
    context: int
    ranks: tuple[int, ...]
    """Of the adapters, one for each."""
    seconds: float
    bytes: int
    flops: int
    goals: tuple[Goal, ...] = ()


class OpRow(Measured, frozen=True, kw_only=True, tag="operation"):
    """One operation of one layer. Shares are of `Peaks`."""

    op: str
    detail: str
    of_copy: float
    of_product: float
    torch_seconds: float | None
    error: float | None
    """Largest difference from the reference, relative to its largest value; None: part of another row's."""

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds

    @property
    def times_torch(self) -> float | None:
        """How many times as fast as torch."""
        return None if self.torch_seconds is None else self.torch_seconds / self.seconds


class StepRow(Measured, frozen=True, kw_only=True, tag="step"):
    """One decode step of a whole model."""

    form: str
    draws: bool
    """Its tokens are drawn; else they are the most likely ones."""
    over_floor: float
    """Times the time that its bytes take at the copy's bandwidth."""
    of_base: float | None
    """Throughput as a share of that without adapters and draws; None: this is it, or that was not measured."""
    replay_equals_eager: bool
    """Hidden states of the replayed and of the eager step, bit for bit."""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, tag="left out"):
    """What was not measured, and why."""

    what: str
    reason: str


Row = Peaks | OpRow | StepRow | LeftOut


def at_least(aim: float, reached: float, words: str) -> Goal:
    return Goal(aim=f">= {aim:g} {words}", reached=reached, met=reached >= aim)


def at_most(aim: float, reached: float, words: str) -> Goal:
    return Goal(aim=f"<= {aim:g} {words}", reached=reached, met=reached <= aim)


def op_goals(row: OpRow, base: Base, sizes: Sizes) -> tuple[Goal, ...]:
    """Those that hold for this row."""
    if row.op.startswith("add_lora") and len(row.ranks) == max(sizes.adapters):
        return (at_most(4, 1 / row.of_copy, "x byte floor"),)
    if row.op == "attention" and row.bytes >= LARGE_CONTEXT:
        return (at_least(0.8, row.of_copy, "of bandwidth"),)
    group, _, form = row.detail.partition(" ")
    if row.op == "linear" and form == "W4" and row.times_torch is not None:
        n, k = base.shape(group)
        if row.rows <= 16 and 2 * n * k >= LARGE_WEIGHT:
            return (at_least(2.5, row.times_torch, "x torch fp16"),)
        if row.rows == sizes.many_rows:
            return (at_least(0.85, row.times_torch, "x torch fp16"),)
    return ()


def step_goals(
    form: str, rows: int, adapters: int, over_floor: float, of_base: float | None
) -> tuple[Goal, ...]:
    """Those that hold for a step of one form; byte floors are aimed at with adapters and without."""
    goals = [
        at_most(times, over_floor, "x byte floor")
        for of, least, most, times in STEP_GOALS
        if form == of and least <= rows <= most
    ]
    if of_base is not None:
        goals += [
            at_least(share, of_base, "of base")
            for forms, number, share in RATIO_GOALS
            if form in forms and number == adapters
        ]
    return tuple(goals)


def step_row(
    base: Base, form: str, rows: int, context: int, ranks: tuple[int, ...], draws: bool, floor: StepFloor,
    seconds: float, alone: float | None, peaks: Peaks, equal: bool,
) -> StepRow:  # fmt: skip
    """`alone`: seconds of the same step without adapters and draws; None: this is it, or that was not measured."""
    over_floor = seconds * peaks.copy_bytes_per_second / floor.bytes
    of_base = None if alone is None else alone / seconds
    return StepRow(
        base=base.name, form=form, rows=rows, context=context, ranks=ranks, draws=draws, seconds=seconds,
        bytes=floor.bytes, flops=floor.flops, over_floor=over_floor, of_base=of_base, replay_equals_eager=equal,
        goals=step_goals(form, rows, len(ranks), over_floor, of_base),
    )  # fmt: skip
