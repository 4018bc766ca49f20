"""How a kernel is started, so that what would start can also be listed: for tests and for the compile report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import triton

FP_FUSION = False
"""No product and sum become one fused multiply-add, which would leave out a rounding. Kernels that share an arithmetic
(a prompt's chunk and a single row; adapters in one launch and in two) could be contracted in different places, and
codes of an int8 cache could differ by one from the reference's. `tl.dot` is not touched by it."""

REGISTERS = 255
"""Of a thread, as many as there are, for `maxnreg`: else the assembler may keep values on the stack to start more
programs at a time."""


@dataclass(frozen=True)
class Launch:
    """One kernel as it was started: its arguments in order, its compile-time values and options by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        name: str = self.kernel.__name__
        return name.lstrip("_")

    def start(self) -> None:
        """Run it, again where it ran before."""
        self.kernel[self.grid](*self.arguments, **self.options)


@dataclass(frozen=True)
class _Recording:
    launches: list[Launch]
    run: bool


_recording: ContextVar[_Recording | None] = ContextVar("recording", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run `kernel` over `grid`. Nothing here reads a tensor's values, so a launch can be captured in a graph."""
    options["enable_fp_fusion"] = FP_FUSION
    recording = _recording.get()
    if recording is not None:
        recording.launches.append(Launch(kernel, grid, arguments, options))
        if not recording.run:
            return
    kernel[grid](*arguments, **options)


@contextmanager
def recorded(*, run: bool = True) -> Iterator[list[Launch]]:
    """The launches made inside, in order. With `run=False` they are only listed: tensors may be on "meta"."""
    launches: list[Launch] = []
    token = _recording.set(_Recording(launches, run))
    try:
        yield launches
    finally:
        _recording.reset(token)


def cdiv(a: int, b: int) -> int:
    """Parts of size b that hold a."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    power: int = triton.next_power_of_2(n)
    return power
