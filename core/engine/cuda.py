"""CUDA graphs, a second stream and pinned memory: all that only a GPU can execute, and nothing else.

Not run yet: no GPU was at hand. What it is asked, and in which order, is tested with a recording stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakSet

import torch

from .accelerator import Arrival, Captured


@dataclass(eq=False)
class _Graph:
    graph: torch.cuda.CUDAGraph
    output: torch.Tensor

    def replay(self) -> None:
        self.graph.replay()


@dataclass
class _Event:
    event: torch.cuda.Event

    def done(self) -> bool:
        return self.event.query()


class Cuda:
    """`accelerator.Accelerator` on one GPU: steps run in its current stream, copies aside in a stream of their own."""

    captures = True
    captures_when_met = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._aside = torch.cuda.Stream(device)
        self._sent = torch.cuda.Event()
        self._graphs = WeakSet[_Graph]()
        """Those that somebody still holds. All compute in one memory, as only one runs at a time; it ends with the last
        of them, and may not be asked for again."""

    def pinned(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        return source.to(self._device, non_blocking=True)

    def counterpart(self, source: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(source, device=self._device)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        self._sent.record(torch.cuda.current_stream(self._device))

    def wait_sent(self) -> None:
        self._sent.synchronize()

    def copy_aside(self, moves: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Arrival:
        self._aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._aside):
            for source, target in moves:
                target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._aside)
        return _Event(event)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._aside)

    def capture(self, function: Callable[[], torch.Tensor]) -> Captured:
        function()  # whatever happens at a first call (a kernel's module is loaded) cannot be captured
        self.synchronize()
        graph, other = torch.cuda.CUDAGraph(), next(iter(self._graphs), None)
        with torch.cuda.graph(graph, pool=None if other is None else other.graph.pool()):
            output = function()
        captured = _Graph(graph, output)
        self._graphs.add(captured)
        return captured

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)
