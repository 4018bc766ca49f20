"""The kernel calls of a function, kept so that they can be made again with no Python between them.

Python needs about ten microseconds from one kernel to the next: allocating an output, taking addresses, passing
arguments. A decode step of thirty layers makes 270 such calls, with adapters 390, and all but the memory they read is
the same in each step of as many rows. So a step's calls are recorded once and made again for each next one: a CPU's
counterpart of a CUDA graph. Decode steps of the demo base in INT8 take 10.8, 18.1 and 53.4 ms at 1, 4 and 16 rows, and
16.4, 27.9 and 61.4 ms without (two AVX2 cores, the least of six turns of 40 steps each, turn about).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .compiled import entry
from .team import TEAM

CHUNK = 1 << 18
"""Float32 values that a workspace takes at a time."""
ALIGN = 16
"""Values: where each output begins, a cache line."""

_recording: Recording | None = None


class Workspace:
    """Memory that recordings share for what kernels write: replays come one after another.

    So what one of them has written is good until the next one runs. Within a recording memory is given again once
    nothing refers to it: whoever reads it has run by then, in every replay too. So a step of thirty layers takes what
    one of them needs, and finds it in the caches.
    """

    def __init__(self) -> None:
        self._chunks: list[np.ndarray] = []
        self.restart()

    def restart(self) -> None:
        """What is taken from now on lies where the recordings before have theirs."""
        self._chunk = self._used = 0
        self._free: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """By size: chunk and beginning of what was given back since."""

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """float32 of `shape`, apart from all that was taken since `restart` and is still referred to."""
        count = prod(shape)
        size = -(-count // ALIGN) * ALIGN
        free = self._free[size]
        chunk, begin = free.pop() if free else self._new(size)
        values = self._chunks[chunk][begin : begin + size]
        weakref.finalize(
            values, free.append, (chunk, begin)
        ).atexit = False  # the tensor and its views hold `values`
        return torch.from_numpy(values)[:count].view(shape)

    def _new(self, size: int) -> tuple[int, int]:
        while self._chunk < len(self._chunks) and self._used + size > len(self._chunks[self._chunk]):
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            self._chunks.append(np.empty(max(CHUNK, size), np.float32))
        begin, self._used = self._used, self._used + size
        return self._chunk, begin


class Recording:
    """What one call of a function did."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.output = torch.empty(0)
        """What the function returned; each replay writes it anew."""

    def replay(self) -> None:
        """Do it again on what lies at the same addresses by now."""
        words = TEAM.words
        for kernel, arguments in self.calls:
            kernel(words, *arguments)


def record(function: Callable[[], torch.Tensor], workspace: Workspace) -> Recording | None:
    """Call `function` and keep what it did; None where it did more than call kernels, so that a replay would not do.

    Whatever memory it reads, but for what its own kernels write, must stay where it is as long as there are replays.
    """
    global _recording
    workspace.restart()
    recording = _recording = Recording(workspace)
    watch = _Watch()
    try:
        with watch:
            recording.output = function()
    finally:
        _recording = None
    if watch.foreign:
        return None
    recording.calls = [
        (entry(kernel, TEAM.words, *arguments), arguments) for kernel, arguments in recording.calls
    ]
    return recording


def launch(kernel: Callable[..., None], *arguments: Any) -> None:
    """kernel(TEAM.words, *arguments), kept where a recording is on."""
    if _recording is not None:
        _recording.calls.append((kernel, arguments))
    kernel(TEAM.words, *arguments)


def empty(*shape: int) -> torch.Tensor:
    """A new float32 tensor for a kernel to write."""
    if _recording is not None:
        return _recording.workspace.take(shape)
    return torch.empty(shape, dtype=torch.float32)


class _Watch(TorchDispatchMode):
    """Notices whatever torch itself computes: a replay would leave it out."""

    foreign = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is ever compiled by torch; else its compiler is imported: two seconds and 140 MB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else (result,)
        inputs = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        views = all(
            isinstance(part, torch.Tensor) and part.untyped_storage().data_ptr() in inputs for part in results
        )
        self.foreign |= func._schema.is_mutable or not views
        return result
