"""Moves preempted sequences to swap space and back, where that is cheaper than to compute them again. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from .block_pool import BlockPool
from .plan import StepPlan, StepResult, Swap
from .restore_cost import RestoreCost
from .sequence import Sequence
from .swap_space import SwapSpace


class Swapper:
    """Decides and keeps the accounts; the bytes move with the step's plan, before its forward.

    All blocks with computed tokens are copied out, the published ones too: these stay in the pool as cache,
    and whatever of them is still there when the sequence comes back is not copied in.
    """

    def __init__(self, pool: BlockPool, space: SwapSpace, cost: RestoreCost, block_size: int) -> None:
        self._pool = pool
        self._space = space
        self._block_size = block_size
        self.cost = cost
        self._out: list[Swap] = []
        self._in: list[Swap] = []
        self._returning: list[
            int
        ] = []  # slots read by the plan being made: none of its copies out may take them
        self._leaving: list[Sequence] = []  # whose way out is in the plan being made, or in flight
        self.counters = dict.fromkeys(("swap_outs", "swap_ins", "swap_out_bytes", "swap_in_bytes"), 0)

    def out(self, sequence: Sequence) -> bool:
        """It is about to lose its blocks: take their content to swap space. False, and nothing changed, where
        computing it again is cheaper, or swap space is full."""
        blocks = sequence.block_table[: -(-sequence.num_computed // self._block_size)]
        if not blocks or not self.cost.swapping_pays(len(blocks), self._lost_tokens(sequence)):
            return False
        slots = self._space.take(len(blocks))
        if slots is None:
            return False
        sequence.host_slots = slots
        self._out += map(Swap, blocks, slots)
        self._leaving.append(sequence)
        self.counters["swap_outs"] += 1
        self.counters["swap_out_bytes"] += len(slots) * self.cost.block_bytes
        return True

    def back(self, sequence: Sequence, found: int) -> None:
        """It has a table again, whose first `found` blocks hold their content: the others get theirs back."""
        moves = list(map(Swap, sequence.block_table, sequence.host_slots))[found:]
        self._in += moves
        self.counters["swap_ins"] += 1
        self.counters["swap_in_bytes"] += len(moves) * self.cost.block_bytes
        self._returning += sequence.host_slots
        sequence.host_slots = []

    def drop(self, sequence: Sequence) -> None:
        """What it has in swap space is not needed any more."""
        self._space.give(sequence.host_slots)
        sequence.host_slots = []

    def take_moves(self) -> tuple[tuple[Swap, ...], tuple[Swap, ...]]:
        """Copies out and copies in, in this order, for the plan that is being made."""
        moves = tuple(self._out), tuple(self._in)
        self._out, self._in = [], []
        self._space.give(self._returning)
        self._returning = []
        return moves

    def landed(self) -> list[Sequence]:
        """The plan in flight has been answered. Those that were swapped out with it and still are."""
        left = [sequence for sequence in self._leaving if sequence.host_slots]
        self._leaving = []
        return left

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """What a step took tells the estimates. One that samples nothing may not have been waited for."""
        self.cost.observe_copies(len(plan.swap_out) + len(plan.swap_in), result.swap_seconds)
        if result.sampled:
            self.cost.observe_step(plan.num_rows, plan.num_rows - len(plan.chunks), result.forward_seconds)

    def stats(self) -> dict[str, int]:
        return {**self.counters, "swap_used_bytes": self._space.used * self.cost.block_bytes}

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        self._space.check_integrity([sequence.host_slots for sequence in waiting])

    def _lost_tokens(self, sequence: Sequence) -> int:
        """Tokens that would have to be computed again: all but those in blocks that others hold too."""
        if sequence.owes_prompt_logprobs:
            return sequence.num_computed
        kept = 0
        while kept < sequence.num_published and self._pool.shared(sequence.block_table[kept]):
            kept += 1
        return sequence.num_computed - kept * self._block_size
