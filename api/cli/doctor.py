"""`heddle doctor`: what this machine can run, and why not where it cannot."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys

import msgspec
import rich_click as click
from click.exceptions import Exit

from .compile_kernels import DTYPES, TARGETS, compile_kernels, names

PROBE = """
import json, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"torch": torch.__version__, "built_for": torch.version.cuda, "devices": names,
                  "cpu": torch.backends.cpu.get_cpu_capability()}))
"""
"""Runs in a child, so that a broken GPU driver ends the child and becomes a finding."""
CACHE_BYTES = 600 << 20
"""What making the demo base needs for a moment: the download, the unpacked file and the result."""


class Finding(msgspec.Struct, frozen=True):
    """One thing this machine can do or cannot."""

    what: str
    ok: bool
    why: str


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option(
    "--compile",
    "targets",
    metavar="TARGETS",
    help="Instead, build every GPU kernel for these chips, GPU or not: sm_80,sm_86,sm_89,sm_90.",
)
@click.option(
    "--compile-dtypes",
    "dtypes",
    metavar="DTYPES",
    default="float16,bfloat16",
    show_default=True,
    help="Activations that the kernels are built for: float16, bfloat16, float32.",
)
def doctor(as_json: bool, targets: str | None, dtypes: str) -> None:
    """Tell what this machine can run, and why not. Status 1 if it cannot serve at all, or a kernel does not build."""
    if targets is not None:
        chips, kinds = names(targets, TARGETS), names(dtypes, DTYPES)
        raise Exit(0 if compile_kernels(chips, kinds, as_json) else 1)
    findings, can_serve = examine()
    if as_json:
        click.echo(json.dumps({"findings": msgspec.to_builtins(findings), "can_serve": can_serve}, indent=2))
    else:
        _print(findings)
    raise Exit(0 if can_serve else 1)


def examine() -> tuple[list[Finding], bool]:
    """All findings, and whether a model can be served here at all."""
    torch = _torch()
    findings = [
        Finding("Python 3.11 or newer", sys.version_info >= (3, 11), platform.python_version()),
        _memory(),
        _cache(),
        *torch,
    ]
    return findings, findings[0].ok and torch[0].ok


def _memory() -> Finding:
    import psutil

    from .render import size

    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    why = f"{cores} CPU cores, {size(memory.available)} of {size(memory.total)} memory available"
    return Finding("memory for the demo (2 GiB)", memory.available >= 2 << 30, why)


def _cache() -> Finding:
    from ...core.checkpoint.cache import cache_root
    from .render import size

    root = cache_root()
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.is_dir())
    free, writable = shutil.disk_usage(existing).free, os.access(existing, os.W_OK)
    why = f"{root}: {size(free)} free" if writable else f"{root}: {existing} is not writable"
    return Finding("cache folder", writable and free >= CACHE_BYTES, why)


def _torch() -> list[Finding]:
    """What torch can do here; the first finding decides whether anything can be served."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=True
        )
        probe = json.loads(child.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return [Finding("--device cpu", False, f"torch cannot be used: {lines[-1] if lines else error}")]
    devices = probe["devices"]
    if devices:
        why_cuda = ", ".join(devices)
    elif probe["built_for"] is None:
        why_cuda = f"torch {probe['torch']} is built without CUDA"
    else:
        why_cuda = f"torch {probe['torch']} is built for CUDA {probe['built_for']} and finds no device"
    return [
        Finding("--device cpu", True, f"torch {probe['torch']}, {probe['cpu']}"),
        Finding("--device cuda", bool(devices), why_cuda),
        Finding("--quantization none, int8", True, "any checkpoint in float32, float16 or bfloat16"),
        Finding("--quantization gptq, awq", True, "checkpoints of AutoGPTQ (4 and 8 bit) and AutoAWQ (gemm)"),
    ]


def _print(findings: list[Finding]) -> None:
    from rich import box
    from rich.table import Table

    from .render import show

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("what", "", "why"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.what, "yes" if finding.ok else "no", finding.why)
    show(table)
