"""What every engine under test offers, and what it is told. Standard library alone: each peer's environment has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Setup:
    """How an engine is started."""

    base: Path
    """The base model's folder, or whatever the peer reads instead."""
    adapters: Mapping[str, Path]
    """PEFT folders by name; those that requests will use, and no other. Empty: the base alone is served."""
    max_rank: int
    threads: int
    max_streams: int
    max_tokens: int
    """Of one sequence, its prompt included."""
    options: Mapping[str, Any]
    """The peer's own."""


@dataclass(frozen=True)
class Request:
    """One sequence to complete."""

    prompt: Sequence[int]
    adapter: str | None


OnStep = Callable[[Sequence[int]], None]
"""Called when a step is over with the places, among the requests, of those that got a token in it; a place stands there
as often as it got one."""


class Peer(Protocol):
    """An engine that stands ready. Its module's `start(setup)` makes it."""

    def answer(self, requests: Sequence[Request], new: int, on_step: OnStep) -> None:
        """Complete all of them at once with `new` tokens each, greedily, end tokens ignored."""

    def facts(self) -> Mapping[str, Any]:
        """What a reader of its figures should know: versions, settings. For JSON.

        `pool_bytes_written`, where it is there: of the memory held for KV and adapters, what was ever written.
        """

    def close(self) -> None:
        """Give everything back."""
