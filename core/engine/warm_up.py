"""Runs forwards before anyone waits for one, so that every kernel is compiled by then."""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels.ops import AdapterTables
from ...kernels.pool import Pool
from ..messages import AdapterUse
from ..sampling_params import SamplingParams
from ..scheduling.plan import Chunk, StepPlan
from ..scheduling.sequence import Sequence as TokenSequence
from .runner import Runner

LONG_CONTEXT = 512
"""Tokens: enough for attention to split a context."""
PROMPT = 3
"""Tokens of a prompt: what prompts are computed with depends on the number of their rows no more than decodes do."""


def warm_up(
    runner: Runner, pool: Pool, tables: AdapterTables, steps: Sequence[tuple[int, int]], max_model_len: int
) -> None:
    """For each of `steps`, (rows, adapters on each), so many decodes without adapters and so many with them, of short
    contexts and of long ones; once each way, a prompt all of whose rows are scored, beside a decode. Leaves pool and
    tables as new.

    The adapter is of rank 1 everywhere, and all its rows are the pool's first bytes, which are zero. All sequences
    lie in the pool's first block.
    """
    tables.ranks[0] = 1
    for count, (rows, adapters) in enumerate(steps):
        for uses, context in (
            ((), 1),
            ((AdapterUse("warm-up"),) * adapters, min(LONG_CONTEXT, max_model_len)),
        ):
            decodes = tuple(_chunk(key, uses, context - 1, 1, pool.layout.block_size) for key in range(rows))
            runner.execute(StepPlan(chunks=decodes))
            if count == 0 and max_model_len > 1:
                prompt = _chunk(rows, uses, 0, min(PROMPT, max_model_len), pool.layout.block_size)
                runner.execute(StepPlan(chunks=(prompt, decodes[0])))
            pool.memory[0].zero_()
    tables.ranks[0] = 0


def _chunk(key: int, adapters: tuple[AdapterUse, ...], start: int, length: int, block_size: int) -> Chunk:
    """`length` rows from position `start` on; the last samples, or, where there are several, all are scored."""
    scored = length if length > 1 else 0
    sequence = TokenSequence(
        key=key,
        group=key,
        prompt_token_ids=[0] * (start + length + 1),
        params=SamplingParams(seed=0, temperature=1.0, prompt_logprobs=0 if scored else None),
        adapters=adapters,
        tenant="",
        arrival=0,
        max_tokens=1,
    )
    return Chunk(
        sequence=sequence,
        start=start,
        token_ids=[0] * length,
        block_table=(0,) * -(-(start + length) // block_size),
        adapter_slots=(0,) * len(adapters),
        samples=not scored,
        prompt_logprob_rows=scored,
    )
