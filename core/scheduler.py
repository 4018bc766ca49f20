"""Which tokens run in the next step. SIGNATURES FIRST; bodies follow."""

from __future__ import annotations

from collections.abc import Iterable

from ..lora.residency import Residency
from .block_pool import BlockPool
from .messages import EngineError, Generate, SequenceOutput
from .plan import StepPlan, StepResult


class Scheduler:
    def __init__(
        self,
        *,
        pool: BlockPool,
        residency: Residency,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_queued: int,
        eos_token_ids: frozenset[int],
        enable_prefix_caching: bool = True,
    ) -> None: ...

    def submit(self, command: Generate) -> EngineError | None:
        """None: accepted."""
        return None
    def abort(self, keys: Iterable[int]) -> None: ...
    def schedule(self) -> StepPlan | None:
        """None: nothing to run now (waiting for loads, or idle). Exactly one of update or fail must follow a plan."""
        return None
    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Outputs of the step, and of sequences that ended outside one since the last call."""
        return []
    def fail(self, plan: StepPlan, message: str) -> list[SequenceOutput]: ...
    def drain(self) -> list[SequenceOutput]:
        """Ends decided outside a step (an adapter that cannot be loaded): call where `schedule` gave None."""
        return []
    @property
    def has_work(self) -> bool:
        """Sequences are queued or running, or adapter loads wait for room."""
        return False
    def stats(self) -> dict[str, int]:
        """Fields of messages.Stats but steps and step_seconds."""
        return {}
    def check_integrity(self) -> None: ...
