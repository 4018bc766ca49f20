"""Whole decode steps of a random model, captured and replayed as the engine does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ...core.engine.accelerator import Accelerator, Host
from ...core.engine.batch import host_arrays
from ...core.engine.step_buffers import StepBuffers
from ...core.messages import AdapterUse
from ...core.model.forward_batch import ForwardBatch
from ...core.model.llama import LlamaModel
from ...core.sampling_params import SamplingParams
from ...core.scheduling.plan import Chunk
from ...core.scheduling.sequence import Sequence
from ...kernels import triton
from ...kernels.ops import AdapterTables
from ...kernels.pool import Pool
from ...kernels.triton.launch import Launch, recorded
from . import costs
from .bases import GROUPS, Base, Sizes
from .clock import Clock
from .random_weights import adapter_tables, choices, fill, layout
from .rows import Peaks, StepRow, step_row


class Steps:
    """A model, a pool for `rows` sequences of `context` tokens behind the adapters, and steps of them."""

    def __init__(
        self, model: LlamaModel, base: Base, sizes: Sizes, rows: int, context: int, ranks: tuple[int, ...],
        *, draws: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.sizes, self.rows, self.context = model, sizes, rows, context
        place = layout(base, sizes, base.config.num_layers)
        self.tables: AdapterTables | None = None
        size = 0
        if ranks:
            self.tables, size = adapter_tables(
                base, ranks, base.config.num_layers, list(GROUPS), model.device
            )
        first, blocks = -(-size // place.block_bytes), -(-context // sizes.block_size)
        self.pool = Pool(place, first + rows * blocks, model.device, spare=1)
        fill(self.pool)
        order = (first + torch.randperm(rows * blocks)).view(rows, blocks).tolist()
        self._choices = choices(rows, model.device, draws=draws)
        self.chunks = [self._chunk(row, order[row], ranks) for row in range(rows)]

    def _chunk(self, row: int, blocks: list[int], ranks: tuple[int, ...]) -> Chunk:
        slots = (row % len(ranks),) if ranks else ()
        sequence = Sequence(
            key=row, group=row, prompt_token_ids=[1] * self.context, params=SamplingParams(seed=0, temperature=0.0),
            adapters=tuple(AdapterUse(f"adapter {slot}") for slot in slots), tenant="", arrival=row, max_tokens=1,
        )  # fmt: skip
        return Chunk(
            sequence=sequence, start=self.context - 1, token_ids=[2 + row], block_table=tuple(blocks),
            adapter_slots=slots, samples=True,
        )  # fmt: skip

    def batch(self, accelerator: Accelerator) -> ForwardBatch:
        """The step, in buffers of the widths that a captured one has."""
        buffers = StepBuffers(
            accelerator,
            most=self.rows,
            table_width=self.sizes.max_model_len // self.sizes.block_size,
            block_size=self.sizes.block_size,
            spare=self.pool.num_blocks,
        )
        arrays, _ = host_arrays(self.chunks, self.sizes.block_size)
        buffers.fill(arrays, self.rows)
        return buffers.batch(self.rows, self.tables)

    @torch.inference_mode()
    def whole(self, batch: ForwardBatch) -> torch.Tensor:
        """The next tokens, computed eagerly."""
        return self._tokens(self.model.forward(batch, self.pool))

    def _tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        return triton.choose_tokens(self.model.logits(hidden), self._choices)

    @torch.inference_mode()
    def seconds(self, accelerator: Accelerator, clock: Clock) -> tuple[float, bool]:
        """What a step takes, and whether its replay gives the eager step's bits."""
        batch = self.batch(accelerator)
        eager = self.model.forward(batch, self.pool).clone()
        captured = accelerator.capture(partial(self.model.forward, batch, self.pool))
        assert captured is not None, "Triton's launches can be captured"
        captured.replay()
        equal = torch.equal(captured.output, eager)

        def one() -> None:
            captured.replay()
            self._tokens(captured.output)

        return clock.in_a_row(one), equal


@dataclass(frozen=True)
class Mix:
    """What the rows of a step are on, and how their tokens are chosen."""

    rows: int
    ranks: tuple[int, ...] = ()
    draws: bool = False


def mixes(sizes: Sizes) -> Iterator[Mix]:
    """For each number of rows: without adapters, the same drawn, then each mix of adapters."""
    for rows in sizes.rows:
        yield from (Mix(rows), Mix(rows, draws=True))
        yield from (Mix(rows, tuple(ranks)) for ranks in sizes.mixes(rows))


def measured(
    model: LlamaModel, base: Base, form: str, mix: Mix, sizes: Sizes, peaks: Peaks, accelerator: Accelerator,
    clock: Clock, alone: float | None,
) -> StepRow:  # fmt: skip
    """One step; `alone` as in `step_row`."""
    context = sizes.contexts[0]
    floor = costs.step(base, form, mix.rows, context, mix.ranks, sizes)
    steps = Steps(model, base, sizes, mix.rows, context, mix.ranks, draws=mix.draws)
    seconds, equal = steps.seconds(accelerator, clock)
    return step_row(base, form, mix.rows, context, mix.ranks, mix.draws, floor, seconds, alone, peaks, equal)


def launches(
    model: LlamaModel, base: Base, rows: int, context: int, ranks: tuple[int, ...], sizes: Sizes
) -> list[Launch]:
    """What such a step starts. `model` is on the "meta" device: no GPU is needed, and nothing runs."""
    steps = Steps(model, base, sizes, rows, context, ranks)
    with recorded(run=False) as found:
        steps.whole(steps.batch(Host()))
    return found
