"""The step that is being planned: its rows so far, and how many are left. Control code: no torch."""

from __future__ import annotations

from ...lora.residency import Residency
from .acceptance import Acceptance
from .plan import Chunk
from .sequence import Sequence


class StepDraft:
    """Chunks by sequence; who gives way while the step is being planned drops out of it again."""

    def __init__(self, budget: int, acceptance: Acceptance, residency: Residency) -> None:
        """`budget`: the most tokens a step computes."""
        self._acceptance = acceptance
        self._residency = residency
        self._chunks: dict[int, Chunk] = {}
        self.left = budget

    def add(self, sequence: Sequence, tokens: int) -> None:
        """The next `tokens` that a running sequence owes; its blocks and its adapters' slots as they are now."""
        assert sequence.key not in self._chunks
        start, stop = sequence.num_computed, sequence.num_computed + tokens
        last_predictor = len(sequence.prompt_token_ids) - 1
        self._chunks[sequence.key] = Chunk(
            sequence=sequence,
            start=start,
            token_ids=sequence.token_ids(start, stop),
            block_table=tuple(sequence.block_table[: self._acceptance.blocks(stop)]),
            adapter_slots=self._residency.slots(sequence.digests),
            samples=stop == len(sequence) and sequence.max_tokens > 0,
            prompt_logprob_rows=min(stop, last_predictor) - start if sequence.owes_prompt_logprobs else 0,
        )
        self.left -= tokens

    def drop(self, key: int) -> None:
        """Nothing is computed for this sequence."""
        chunk = self._chunks.pop(key, None)
        if chunk is not None:
            self.left += len(chunk.token_ids)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(self._chunks.values())
