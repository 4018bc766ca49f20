"""One step as plain data: what the scheduler decided and what came of it. Control code: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..messages import EngineError, TokenLogprobs
from .sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """The rows one sequence has in this step: its tokens at positions start to start + len(token_ids)."""

    sequence: Sequence
    start: int
    token_ids: list[int]
    block_table: tuple[int, ...]
    """Blocks for positions 0 to start + len(token_ids), frozen for this step."""
    adapter_slots: tuple[int, ...]
    """Table slots of `sequence.adapters`, in that order."""
    samples: bool
    """The last row is the newest token: a next one is chosen from its logits."""
    prompt_logprob_rows: int = 0
    """So many of the first rows need logits for prompt log-probabilities (row i predicts position start + i +
    1)."""

    @property
    def adapter_weights(self) -> tuple[float, ...]:
        """The request's weights of `adapter_slots`, in that order."""
        return tuple(use.weight for use in self.sequence.adapters)


@dataclass(frozen=True)
class Swap:
    """A block's bytes move between device pool and host swap space, before the step's forward."""

    block: int
    host_slot: int


@dataclass(frozen=True)
class StepPlan:
    """One model forward, and the memory moves before it: out, in, copies, in this order. `chunks` may be
    empty where only memory moves."""

    chunks: tuple[Chunk, ...]
    swap_out: tuple[Swap, ...] = ()
    swap_in: tuple[Swap, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    """(from, to) block ids copied before the forward (copy on write)."""

    @property
    def num_rows(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True)
class Sampled:
    """What the model chose after one chunk."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    completes: bool = False
    """It is the last token of text that the sequence's grammar allows."""


@dataclass(frozen=True)
class StepResult:
    """Keyed by sequence key: exactly the chunks with `samples`; `prompt_logprobs` where rows were asked for.

    `errors` names sequences whose row could not be computed (for instance, no finite logits): they end with
    it, the others go on.
    """

    sampled: dict[int, Sampled]
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, EngineError] = field(default_factory=dict)
    swap_seconds: float = 0.0
    """What the copies to and from swap space took."""
    forward_seconds: float = 0.0
    """What the forward and all that follows from it took."""
