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


def warm_up(
    runner: Runner, pool: Pool, tables: AdapterTables, rows: Sequence[int], max_model_len: int
) -> None:
    """For each number of `rows` a step without an adapter and one with: a prompt, all of whose rows are scored, and a
    decode, whose context is short in one and long in the other. Leaves pool and tables as new.

    The adapter is of rank 1 everywhere, and all its rows are the pool's first bytes, which are zero. All sequences
    lie in the pool's first block.
    """
    tables.ranks[0] = 1
    for count in rows:
        for adapters, context in (((), 1), ((AdapterUse("warm-up"),), min(LONG_CONTEXT, max_model_len))):
            decode = _chunk(2, adapters, context - 1, 1, pool.layout.block_size)
            prompt = _chunk(1, adapters, 0, min(count, max_model_len) - 1, pool.layout.block_size)
            runner.execute(StepPlan(chunks=(prompt, decode) if prompt.token_ids else (decode,)))
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
