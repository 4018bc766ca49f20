"""Stand-ins for a GPU: they note what they are asked, do it as late as a GPU might, and replay what was captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from heddle.core.engine.accelerator import Arrival, Captured, Host
from heddle.kernels.triton.launch import recorded

Move = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Again:
    """Replays by calling the captured function again; what it returns goes where the first call's result is."""

    owner: Recorder
    number: int
    function: Callable[[], torch.Tensor]
    output: torch.Tensor

    def replay(self) -> None:
        self.owner.send_now()
        self.owner.log.append(f"replay {self.number}")
        self.output.copy_(self.function())


@dataclass
class Pages:
    owner: Recorder
    moves: list[Move]
    asked: bool = False

    def done(self) -> bool:
        """Not at the first time of asking."""
        if not self.asked:
            self.asked = True
            return False
        self.owner.arrive(self)
        return True


@dataclass
class Recorder(Host):
    """Copies arrive late: those sent at the next replay, those aside when they are waited for or seen to be done."""

    captures = True
    captures_when_met = False
    log: list[str] = field(default_factory=list)
    captured: list[Captured] = field(default_factory=list)
    _sent: list[Move] = field(default_factory=list)
    _aside: list[Pages] = field(default_factory=list)

    def counterpart(self, source: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(source)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert not self._sent, "what was sent before may not have been read yet"
        self.log.append("send")
        self._sent.append((source, target))
        target.fill_(0x7B)

    def wait_sent(self) -> None:
        self.send_now()

    def send_now(self) -> None:
        for source, target in self._sent:
            target.copy_(source)
        self._sent.clear()

    def copy_aside(self, moves: Iterable[Move]) -> Arrival:
        pages = Pages(self, list(moves))
        self.log.append(f"aside {len(pages.moves)}")
        self._aside.append(pages)
        for _, target in pages.moves:
            target.fill_(0xFF)  # nobody may read it yet
        return pages

    def arrive(self, pages: Pages) -> None:
        for source, target in pages.moves:
            target.copy_(source)
        pages.moves.clear()
        self._aside = [other for other in self._aside if other is not pages]

    def join(self) -> None:
        self.log.append("join")
        for pages in list(self._aside):
            self.arrive(pages)

    def capture(self, function: Callable[[], torch.Tensor]) -> Captured:
        self.send_now()
        self.log.append(f"capture {len(self.captured)}")
        captured = self._capture(function)
        self.captured.append(captured)
        return captured

    def _capture(self, function: Callable[[], torch.Tensor]) -> Captured:
        return Again(self, len(self.captured), function, function())

    @property
    def replays(self) -> list[int]:
        return [int(entry.split()[1]) for entry in self.log if entry.startswith("replay")]


@dataclass
class SameLaunches(Recorder):
    """Replays as a CUDA graph does: the same kernels with the same grids, sizes and addresses, and nothing else."""

    def _capture(self, function: Callable[[], torch.Tensor]) -> Captured:
        number = len(self.captured)
        with recorded() as launches:
            output = function()

        def again() -> torch.Tensor:
            output.fill_(torch.nan)
            for one in launches:
                one.kernel[one.grid](*one.arguments, **one.options)
            return output

        return Again(self, number, again, output)
