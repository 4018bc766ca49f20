"""`make bench`: choose rows and cells, measure, print; table, picture and everything as JSON into a folder."""

from __future__ import annotations

import argparse
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from ...api.load_generator.plot import PlotError, check_matplotlib
from ...core.checkpoint import CheckpointError
from . import ratios, table
from .measure import RowFigures, Terms, matmul_peak, measure
from .picture import draw
from .rows import BY_NAME, ON_REQUEST, QUICK, ROOT, ROWS, Row, cores
from .workload import ADAPTERS, QUICK_PLAN, SHORT, STREAMS, Cell, Size, cells, whole_plan

RESULTS = ROOT / "bench" / "results" / "throughput"


class Run(msgspec.Struct, kw_only=True):
    """All of it, as it is written to JSON."""

    started: str
    processor: str
    threads: int
    matmul_peak_gflops: float
    seconds: float = 0.0
    rows: list[RowFigures] = []
    over_peers: list[ratios.Ratio] = []
    aims: list[ratios.Ratio] = []


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    rows, plan = chosen_rows(options), chosen_cells(options)
    if not plan:
        parser.error("there is no cell: as many streams as adapters are needed at least")
    options.output.mkdir(parents=True, exist_ok=True)
    for old in (*options.output.glob("*.log"), *options.output.glob("table.*")):
        old.unlink()
    threads = options.threads or cores()
    terms = Terms(
        threads=threads, seconds=options.seconds, patience=options.patience, logs=options.output, say=_say
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is ended, what there is is written
    began = time.monotonic()
    try:
        run = Run(
            started=time.strftime("%Y-%m-%d %H:%M:%S"),
            processor=_processor(),
            threads=threads,
            matmul_peak_gflops=matmul_peak(threads),
        )
        _say(
            f"{run.processor}, {_several(threads, 'thread')}, {run.matmul_peak_gflops:.0f} GFLOP/s in a float32 product"
        )
        try:
            measure(rows, plan, terms, run.rows)
        finally:  # what there is is kept, also of a run that was interrupted
            run.seconds = time.monotonic() - began
            run.over_peers = ratios.over_peers(run.rows, plan)
            run.aims = ratios.aims_reached(run.rows)
            _write(run, plan, options.output)
    except (CheckpointError, subprocess.CalledProcessError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def chosen_rows(options: argparse.Namespace) -> list[Row]:
    """In the table's order. Those on request only where they are asked for."""
    if options.rows:
        names = set(options.rows)
    elif options.quick:
        names = set(QUICK)
    else:
        names = BY_NAME.keys() - set(ON_REQUEST)
    if options.with_vllm:
        names |= {"vllm"}
    return [row for row in ROWS if row.name in names]


def chosen_cells(options: argparse.Namespace) -> list[Cell]:
    given = options.sizes or options.streams or options.adapters
    if not given:
        return list(QUICK_PLAN) if options.quick else whole_plan()
    return cells(options.sizes or [SHORT], options.streams or STREAMS, options.adapters or ADAPTERS)


def text(run: Run, plan: list[Cell]) -> str:
    """What is printed, and written beside the JSON."""
    titles = {row.name: row.title for row in run.rows}
    parts = [
        f"{run.started}, {run.processor}, {_several(run.threads, 'thread')}, {run.matmul_peak_gflops:.0f} GFLOP/s in a "
        f"float32 product; {run.seconds / 60:.1f} minutes",
        table.main_table(run.rows, plan, run.matmul_peak_gflops) if measured(run) else "",
        "\n".join(f"{row.title}: left out, {row.left_out}" for row in run.rows if row.left_out),
        table.ratio_table(run.over_peers, titles) if run.over_peers else "",
        table.aim_table(run.aims, titles) if run.aims else "",
        "\n".join(table.memory_lines(run.rows)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def measured(run: Run) -> bool:
    """There is any figure."""
    return any(row.cells for row in run.rows)


def _write(run: Run, plan: list[Cell], folder: Path) -> None:
    said = text(run, plan)
    print(said)
    (folder / "table.md").write_text(said)
    (folder / "figures.json").write_bytes(msgspec.json.format(msgspec.json.encode(run)))
    try:
        check_matplotlib()
        if measured(run):
            draw(run.rows, plan, f"{run.processor}, {_several(run.threads, 'thread')}", folder / "table.png")
    except PlotError as error:
        _say(f"no picture: {error}")
    _say(f"the table, its picture and all figures as JSON: {folder}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=list(BY_NAME), metavar="ROW", help=", ".join(BY_NAME))
    parser.add_argument(
        "--with-vllm", action="store_true", help="its CPU build too (`make peers-vllm` before)"
    )
    parser.add_argument("--quick", action="store_true", help="two rows, three cells: about 4 minutes")
    parser.add_argument("--streams", nargs="+", type=_positive, help=f"default: {STREAMS}")
    parser.add_argument("--adapters", nargs="+", type=_count, help=f"0: the base alone; default: {ADAPTERS}")
    parser.add_argument(
        "--sizes", nargs="+", type=_size, metavar="PROMPT+NEW", help="tokens of a request, such as 64+64"
    )
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="rounds of a cell go on for so long; default: 8"
    )
    parser.add_argument("--threads", type=_positive, help="of every engine; default: all cores this may use")
    parser.add_argument(
        "--patience", type=float, default=1800.0, help="seconds a peer may take for one round; default: 1800"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"default: {RESULTS}")
    return parser


def _count(words: str) -> int:
    if not words.isdecimal():
        raise argparse.ArgumentTypeError(f"{words!r} is no number from 0")
    return int(words)


def _positive(words: str) -> int:
    if not _count(words):
        raise argparse.ArgumentTypeError("want 1 or more")
    return int(words)


def _size(words: str) -> Size:
    prompt, plus, new = words.partition("+")
    if not (plus and prompt.isdecimal() and new.isdecimal() and int(prompt) > 0 and int(new) > 1):
        raise argparse.ArgumentTypeError(f"{words!r}: want prompt and new tokens (2 at least), such as 64+64")
    return Size(int(prompt), int(new))


def _processor() -> str:
    """As the system names it; the machine's kind where it does not."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
