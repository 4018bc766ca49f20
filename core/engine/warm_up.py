"""Runs the forward once before anyone waits for it, so that kernels are compiled by then."""

from __future__ import annotations

from ...kernels.ops import AdapterTables
from ...kernels.pool import Pool
from ..messages import AdapterUse
from ..sampling_params import SamplingParams
from ..scheduling.plan import Chunk, StepPlan
from ..scheduling.sequence import Sequence
from .runner import Runner


def warm_up(runner: Runner, pool: Pool, tables: AdapterTables) -> None:
    """One step without an adapter and one with, each a prompt and a decode. Leaves pool and tables as new.

    The adapter is of rank 1 everywhere, and all its rows are the pool's first bytes, which are zero.
    """
    tables.ranks[0] = 1
    for adapters in ((), (AdapterUse("warm-up"),)):
        prompt, decode = _chunk(1, min(3, pool.layout.block_size), adapters), _chunk(2, 1, adapters)
        runner.execute(StepPlan(chunks=(prompt, decode)))
        pool.memory[0].zero_()
    tables.ranks[0] = 0


def _chunk(key: int, length: int, adapters: tuple[AdapterUse, ...]) -> Chunk:
    sequence = Sequence(
        key=key,
        group=key,
        prompt_token_ids=[0] * length,
        params=SamplingParams(seed=0),
        adapters=adapters,
        tenant="",
        arrival=0,
        max_tokens=1,
    )
    return Chunk(
        sequence=sequence,
        start=0,
        token_ids=sequence.prompt_token_ids,
        block_table=(0,),
        adapter_slots=(0,) * len(adapters),
        samples=True,
    )
