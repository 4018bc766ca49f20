"""`make bench-gpu`: JSON lines as rows are measured, then the table; or, without a GPU, `--floors`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from ...core.engine import accelerator as accelerators
from ...core.engine.accelerator import Accelerator
from ...kernels import reference, triton
from . import table
from .bases import BASES, FORMS, Base, Sizes
from .cases import TOLERANCE, Case, cases, error
from .clock import Clock, EventClock, copy_bandwidth, product_rate
from .floors import floors_table
from .random_weights import random_model
from .rows import LeftOut, OpRow, Peaks, Row, StepRow, op_goals
from .steps import measured

NO_GPU = "bench-gpu: nothing was measured: this machine has no CUDA device that torch can use (--floors needs none)"
MINUTES = 7.5


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
    ends = time.monotonic() + 60 * options.minutes
    clock, name = EventClock(device, accelerator), torch.cuda.get_device_name(device)
    rows: list[Row] = []
    try:
        for row in measure(bases, sizes, device, clock, accelerator, name, lambda: time.monotonic() < ends):
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


@torch.inference_mode()
def measure(
    bases: Sequence[Base], sizes: Sizes, device: torch.device, clock: Clock, accelerator: Accelerator, name: str,
    time_left: Callable[[], bool], forms: Sequence[str] = FORMS,
) -> Iterator[Row]:  # fmt: skip
    """Peaks, steps, operations. What does not fit into memory, or into the time, is named instead."""
    peaks = Peaks(
        device=name,
        copy_bytes_per_second=copy_bandwidth(clock, sizes.copied, device),
        product_flops_per_second=product_rate(clock, sizes.side, device),
    )
    yield peaks
    for base in bases:
        for form in forms:
            yield from _kept(
                f"steps of {base.name} {form}",
                time_left,
                lambda: _steps(base, form, sizes, peaks, device, accelerator, clock),  # noqa: B023
            )
    for base in bases:
        for case in cases(base, sizes, device):
            yield from _kept(
                f"{base.name} {case.name}",
                time_left,
                lambda: _operation(base, sizes, peaks, case.build(), clock),  # noqa: B023
            )


def _kept(what: str, time_left: Callable[[], bool], rows: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """`rows` as they come, until the device has no room for one; none where no time is left."""
    if not time_left():
        yield LeftOut(what=what, reason="no time left (--minutes)")
        return
    try:
        yield from rows()
    except (torch.OutOfMemoryError, OutOfResources, CompilationError) as error:
        yield LeftOut(what=what, reason=str(error).partition("\n")[0])


def _steps(
    base: Base, form: str, sizes: Sizes, peaks: Peaks, device: torch.device, accelerator: Accelerator, clock: Clock
) -> Iterator[Row]:  # fmt: skip
    model = random_model(base, form, sizes, triton, device)
    for rows in sizes.rows:
        yield from measured(model, base, form, rows, sizes, peaks, accelerator, clock)


def _operation(base: Base, sizes: Sizes, peaks: Peaks, case: Case, clock: Clock) -> Iterator[Row]:
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
    yield msgspec.structs.replace(row, goals=op_goals(row, base, sizes))


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
        "--minutes", type=float, default=MINUTES, help=f"nothing begins after so many; default: {MINUTES}"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
