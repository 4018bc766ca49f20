"""What a device does beside computing in order: captured steps, copies while steps go on, host memory for both.

`Host` is a CPU, which does everything at once; `cuda.Cuda` is what only a GPU can run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from ...kernels.cpu.recording import Workspace


class Captured(Protocol):
    """The work of one call on the device, to be done again on what lies at the same addresses by then."""

    output: torch.Tensor
    """Where each replay leaves what the captured function returned."""

    def replay(self) -> None: ...


class Arrival(Protocol):
    """Copies under way."""

    def done(self) -> bool:
        """They have arrived: whatever the device is asked from now on finds them."""


class Accelerator(Protocol):
    """All calls but `pinned` come from the engine's own thread. *In order*: after what the device was asked before."""

    captures: bool
    """It can `capture`."""
    captures_when_met: bool
    """Capturing takes no longer than doing the work once, and no memory to speak of: so a step is captured when one of
    its size is first met, not at the start, and none is padded."""

    def pinned(self, *shape: int) -> torch.Tensor:
        """uint8 host memory whose copies the host need not wait for; holds anything. From any thread."""

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        """`source` (pinned) in new memory of the device, in order. May be `source` itself."""

    def counterpart(self, source: torch.Tensor) -> torch.Tensor:
        """Memory of the device for what `source` (pinned) will hold, to be sent there again and again: zeros, or
        `source` itself where the device reads it as it is."""

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `source` (pinned) to `target` in order. `source` stays untouched until `wait_sent`."""

    def wait_sent(self) -> None:
        """Until everything sent has been read: its sources may be written again."""

    def copy_aside(self, moves: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Arrival:
        """Copy each source (pinned) to its target: after what was asked before, beside what will be."""

    def join(self) -> None:
        """What the device is asked from now on comes after every copy aside."""

    def capture(self, function: Callable[[], torch.Tensor]) -> Captured | None:
        """Call `function`, which must neither wait for the device nor read from it; keep what it did. None where that
        cannot be done again."""

    def synchronize(self) -> None:
        """Until the device has done all that it was asked."""


class _Arrived:
    def done(self) -> bool:
        return True


class Host:
    """A CPU: what is asked has been done when the call returns. It captures calls of its own kernels."""

    captures = True
    captures_when_met = True
    _workspace: Workspace | None = None

    def pinned(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8)

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        return source

    def counterpart(self, source: torch.Tensor) -> torch.Tensor:
        return source

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)

    def wait_sent(self) -> None:
        return

    def copy_aside(self, moves: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Arrival:
        for source, target in moves:
            target.copy_(source)
        return _Arrived()

    def join(self) -> None:
        return

    def capture(self, function: Callable[[], torch.Tensor]) -> Captured | None:
        from ...kernels.cpu import recording  # compiles for CPUs: nothing a GPU's process should wait for

        if self._workspace is None:
            self._workspace = recording.Workspace()
        return recording.record(function, self._workspace)

    def synchronize(self) -> None:
        return


def for_device(device: torch.device) -> Accelerator:
    """What there is beside `device`."""
    if device.type == "cuda":
        from .cuda import Cuda

        return Cuda(device)
    return Host()
