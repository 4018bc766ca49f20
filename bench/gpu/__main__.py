"""`make bench-gpu`: JSON lines as rows are measured, then the table; or, without a GPU, `--floors`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate

import msgspec
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from ...core.engine import accelerator as accelerators
from ...core.engine.accelerator import Accelerator
from ...kernels import reference, triton
from . import table
from .bases import BASES, FORMS, Base, Sizes
from .cases import TOLERANCE, Case, Planned, cases, error
from .clock import Clock, EventClock, copy_bandwidth, product_rate
from .floors import floors_table
from .random_weights import random_model
from .rows import LeftOut, OpRow, Peaks, Row, StepRow, op_goals
from .steps import Mix, measured, mixes

NO_GPU = "bench-gpu: nothing was measured: this machine has no CUDA device that torch can use (--floors needs none)"
MINUTES = 7.5
STEP_SHARE = 2
"""Of the time that steps of one base and form may take, where operations of one kind take 1: kernels are compiled, and
a model is made."""


def main(arguments: list[str] | None = None) -> int:
    """1 where there is no GPU, where an output is not the reference's, or where a replay is not the eager step."""
    options = _parser().parse_args(arguments)
    bases, sizes = [BASES[name] for name in options.models], Sizes()
    if options.floors:
        for base in bases:
            print(f"{base.name}, {sizes.contexts[0]} tokens of context, rank {sizes.rank} on all modules:\n")
            print(floors_table(base, sizes) + "\n")
        return 0
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    accelerator = accelerators.for_device(device)
    began, seconds = time.monotonic(), 60 * options.minutes
    clock, name = EventClock(device, accelerator), torch.cuda.get_device_name(device)
    rows: list[Row] = []

    def time_left(share: float) -> bool:
        return time.monotonic() < began + share * seconds

    try:
        for row in measure(bases, sizes, device, clock, accelerator, name, time_left):
            print(msgspec.json.encode(row).decode(), flush=True)
            rows.append(row)
    finally:  # what there is is shown, also of a run that broke off
        print("\n" + table.report(rows))
    wrong = faults(rows)
    for fault in wrong:
        print(f"bench-gpu: {fault}", file=sys.stderr)
    return int(bool(wrong))


def faults(rows: Sequence[Row]) -> list[str]:
    """Where a result was not what it has to be, in words."""
    wrong = []
    for row in rows:
        if isinstance(row, OpRow) and row.error is not None and not row.error <= TOLERANCE:
            where = f"{row.base} {row.op} {row.detail}, {row.rows} rows"
            wrong.append(f"{where}: {row.error:.1e} from the reference")
        if isinstance(row, StepRow) and not row.replay_equals_eager:
            where = f"{row.base} {row.form}, {row.rows} rows, {len(row.ranks)} adapters"
            wrong.append(f"{where}: the replayed step is not the eager one")
    return wrong


@dataclass(frozen=True)
class Section:
    """What is measured one after another in a share of the run's time."""

    share: int
    mixes: Iterator[tuple[str, Callable[[], Row]]]


@torch.inference_mode()
def measure(
    bases: Sequence[Base], sizes: Sizes, device: torch.device, clock: Clock, accelerator: Accelerator, name: str,
    time_left: Callable[[float], bool], forms: Sequence[str] = FORMS,
) -> Iterator[Row]:  # fmt: skip
    """Peaks, steps, operations. What does not fit into memory, or into the time, is named instead.

    `time_left` says whether less than this share of the whole time has passed: none of a section's mixes begins once
    the shares of all sections up to it have. So a slow section takes nothing from those behind it, and what a fast one
    leaves is theirs.
    """
    peaks = Peaks(
        device=name,
        copy_bytes_per_second=copy_bandwidth(clock, sizes.copied, device),
        product_flops_per_second=product_rate(clock, sizes.side, device),
    )
    yield peaks
    sections = [
        Section(STEP_SHARE, _steps(base, form, sizes, peaks, device, accelerator, clock))
        for base in bases
        for form in forms
    ]
    sections += [
        Section(1, _operations(base, sizes, peaks, kind, clock))
        for base in bases
        for kind in cases(base, sizes, device)
    ]
    ends = list(accumulate(section.share for section in sections))
    for section, end in zip(sections, ends):
        for what, row in section.mixes:
            yield _kept(what, row, time_left(end / ends[-1]))


def _kept(what: str, row: Callable[[], Row], time_left: bool) -> Row:
    """The row, or why there is none: the device has no room for it, or no time is left."""
    if not time_left:
        return LeftOut(what=what, reason="no time left (--minutes)")
    try:
        return row()
    except (torch.OutOfMemoryError, OutOfResources, CompilationError) as error:
        return LeftOut(what=what, reason=str(error).partition("\n")[0])


def _steps(
    base: Base, form: str, sizes: Sizes, peaks: Peaks, device: torch.device, accelerator: Accelerator, clock: Clock
) -> Iterator[tuple[str, Callable[[], Row]]]:  # fmt: skip
    model = cache(lambda: random_model(base, form, sizes, triton, device))
    alone: dict[int, float] = {}

    def row(mix: Mix) -> StepRow:
        before = alone.get(mix.rows)
        found = measured(model(), base, form, mix, sizes, peaks, accelerator, clock, before)
        if mix == Mix(mix.rows):
            alone[mix.rows] = found.seconds
        return found

    for mix in mixes(sizes):
        on = f"{len(mix.ranks)} adapters of rank {table.ranks_of(mix.ranks)}"
        yield f"step of {base.name} {form}, {mix.rows} rows, {on}{', drawn' * mix.draws}", partial(row, mix)


def _operations(
    base: Base, sizes: Sizes, peaks: Peaks, kind: Iterator[Planned], clock: Clock
) -> Iterator[tuple[str, Callable[[], Row]]]:
    for case in kind:
        build = case.build
        yield f"{base.name} {case.name}", lambda: _operation(base, sizes, peaks, build(), clock)  # noqa: B023


def _operation(base: Base, sizes: Sizes, peaks: Peaks, case: Case, clock: Clock) -> OpRow:
    wrong = error(case, triton, reference)
    seconds = clock.alone(case.call)
    row = OpRow(
        base=base.name,
        op=case.op,
        detail=case.detail,
        rows=case.rows,
        context=case.context,
        ranks=case.ranks,
        seconds=seconds,
        bytes=case.cost.bytes,
        flops=case.cost.flops,
        of_copy=case.cost.bytes / seconds / peaks.copy_bytes_per_second,
        of_product=case.cost.flops / seconds / peaks.product_flops_per_second,
        torch_seconds=None if case.torch_call is None else clock.alone(case.torch_call),
        error=wrong,
    )
    return msgspec.structs.replace(row, goals=op_goals(row, base, sizes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench-gpu ARGS=...", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(BASES),
        default=list(BASES),
        metavar="MODEL",
        help=", ".join(BASES),
    )
    parser.add_argument(
        "--floors", action="store_true", help="bytes and launches of steps, by arithmetic alone"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help=f"nothing begins after so many, which the sections share; default: {MINUTES}",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
