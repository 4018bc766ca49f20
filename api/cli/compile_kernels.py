"""`heddle doctor --compile`: every GPU kernel built for chips that need not be here, and what came out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import rich_click as click

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90")
DTYPES = ("float16", "bfloat16", "float32")
RESOURCES = ("registers", "spills", "shared_bytes")
WIDTHS = ("copy_bits", "load_bits")
"""Of copies that run ahead (`cp.async`) and of plain loads from global memory."""
CHILD = "heddle.kernels.triton.compile_report"
"""A process of its own: this one stays without torch and Triton."""


class CompileFailure(click.ClickException):
    """The compiler's process ended without a report."""


def names(value: str, known: tuple[str, ...]) -> list[str]:
    """A comma-separated list of known names, each once. Raises `click.BadParameter`."""
    found = list(dict.fromkeys(name.strip() for name in value.split(",")))
    for name in found:
        if name not in known:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(known)}")
    return found


def reports(targets: list[str], dtypes: list[str]) -> Iterator[dict[str, Any]]:
    """First {"total": builds}, then one report a build, as they are done. Raises `CompileFailure`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", CHILD, ",".join(targets), ",".join(dtypes)]
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment
        ) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            yield json.loads(line)
        if child.wait():
            complaints.seek(0)
            lines = complaints.read().strip().splitlines()
            raise CompileFailure(
                f"the kernels cannot be compiled here: {lines[-1] if lines else child.returncode}"
            )


def compile_kernels(targets: list[str], dtypes: list[str], as_json: bool) -> bool:
    """Build and print; True where every build is in order."""
    from rich.console import Console
    from rich.progress import Progress

    found: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), transient=True, disable=as_json) as progress:
        lines = reports(targets, dtypes)
        task = progress.add_task("compiling", total=next(lines)["total"])
        for report in lines:
            found.append(report)
            progress.update(task, advance=1, description=f"{report['kernel']} {report['target']}")
    if as_json:
        click.echo(json.dumps({"kernels": found}, indent=2))
    else:
        _print(found)
    return all(report["status"] == "ok" for report in found)


def _print(found: list[dict[str, Any]]) -> None:
    """One line for each kernel and target: the worst of its builds, and all ways in which they compute and load."""
    from rich import box
    from rich.table import Table

    from .render import show

    table = Table(box=box.SIMPLE_HEAD)
    for column in (
        "kernel",
        "target",
        "builds",
        "failed",
        "registers",
        "spills",
        "shared bytes",
        "tensor cores",
        "in flight",
        "copy bits",
        "load bits",
    ):
        table.add_column(column, overflow="fold")
    for kernel, target in dict.fromkeys((report["kernel"], report["target"]) for report in found):
        builds = [r for r in found if (r["kernel"], r["target"]) == (kernel, target)]
        made = [build for build in builds if "registers" in build]
        cells = [str(max((build[key] for build in made), default="-")) for key in RESOURCES]
        instructions = ", ".join(sorted({build["tensor_cores"] or "none" for build in made})) or "-"
        flying = {str(build["copies_in_flight"]) for build in made}
        in_flight = "-".join(sorted({min(flying, key=int), max(flying, key=int)}, key=int)) if made else "-"
        widths = [
            ", ".join(str(bits) for bits in sorted({bits for build in made for bits in build[key]})) or "-"
            for key in WIDTHS
        ]
        failed = sum(build["status"] != "ok" for build in builds)
        table.add_row(kernel, target, str(len(builds)), str(failed), *cells, instructions, in_flight, *widths)
    show(table)
    for report in found:
        if report["status"] != "ok":
            click.echo(
                f"{report['kernel']} {report['target']} {report['config']}: {report['error']}", err=True
            )
