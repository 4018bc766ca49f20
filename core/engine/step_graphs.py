"""Decode steps that replay what was captured, by number of rows, with adapters and without.

On CUDA that is done at the start, and rows are padded to one of few numbers. On a CPU it takes no longer than the step
itself: there a step is captured when one of as many rows is first met. Fixed at capture are addresses, launch grids and
the numbers of rows, segments and blocks in a table; everything else is read from `StepBuffers`, from the pool and from
the adapters' tables when a replay runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ...kernels.ops import AdapterTables
from ...kernels.pool import Pool
from ..config import EngineConfig
from ..errors import EngineStartError
from ..model.config import ModelConfig
from ..model.forward_batch import ForwardBatch
from ..model.llama import LlamaModel
from ..scheduling.plan import Chunk
from .accelerator import Accelerator, Captured
from .batch import host_arrays
from .step_buffers import StepBuffers

CONTEXT_LIMIT = 8192
"""Tokens of context up to which steps are captured. A launch covers the longest context there may be, and attention
keeps partial results for all of it: beyond, the memory and the idle programs cost more than launching does."""

GRAPH_BYTES = 16 << 20
"""Set aside for one captured graph: an assumption about the driver, not measured."""

RECORDED_BYTES = 64 << 20
"""Bound on what a recorded step may take on a CPU. Steps of more rows run eagerly: their kernels take so long that
calling them does not count."""

Forward = Callable[[ForwardBatch], torch.Tensor]
Progress = Callable[[str, int, int], None]


def padded_sizes(most: int) -> list[int]:
    """1, 2, 4, … and `most`: so at most half of a step's rows are padding."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes


class StepGraphs:
    """What was captured, and the choice of who replays it."""

    def __init__(
        self,
        forward: Forward,
        tables: AdapterTables,
        buffers: StepBuffers,
        accelerator: Accelerator,
        *,
        sizes: Sequence[int],
        block_size: int,
    ) -> None:
        """`forward` gives hidden states [T, hidden]; it must neither wait for the device nor read from it. `sizes`: the
        numbers of rows that are captured, in order."""
        self._forward = forward
        self._tables = tables
        self._buffers = buffers
        self._accelerator = accelerator
        self._block_size = block_size
        self._sizes = sizes
        self._fails = False
        """What the model does cannot be captured."""
        self._graphs: dict[tuple[int, bool], Captured] = {}
        """By padded number of rows, and whether there are adapters."""

    @torch.inference_mode()
    def capture(self, progress: Progress | None = None) -> None:
        """Capture all of them, on steps of padding alone. The largest first: the others fit into its memory."""
        wanted = [(size, lora) for size in reversed(self._sizes) for lora in (False, True)]
        for done, (size, lora) in enumerate(wanted):
            if progress is not None:
                progress("Capturing decode steps", done, len(wanted))
            self._buffers.fill({}, size)
            self._capture(size, lora)
        if progress is not None:
            progress("Capturing decode steps", len(wanted), len(wanted))

    def _capture(self, size: int, lora: bool) -> Captured | None:
        """Capture a step, on the one that lies in the buffers."""
        batch = self._buffers.batch(size, self._tables if lora else None)
        graph = self._accelerator.capture(partial(self._forward, batch))
        if graph is None:
            self._fails = True
        else:
            self._graphs[size, lora] = graph
        return graph

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """Hidden states [rows, hidden], good until the next call; None where the step was not captured: prompts,
        several adapters on a row, too many rows or too long a context."""
        if (
            self._fails
            or len(chunks) > self._sizes[-1]
            or any(len(chunk.token_ids) > 1 or len(chunk.adapter_slots) > 1 for chunk in chunks)
            or max(len(chunk.block_table) for chunk in chunks) > self._buffers.table_width
        ):
            return None
        arrays, rounds = host_arrays(chunks, self._block_size)
        size = self._sizes[bisect_left(self._sizes, len(chunks))]
        lora = rounds is not None
        self._buffers.fill(arrays, size)
        graph = self._graphs.get((size, lora)) or self._capture(size, lora)
        if graph is None:
            return None
        graph.replay()
        return graph.output[: len(chunks)]


def captures_steps(config: EngineConfig, accelerator: Accelerator) -> bool:
    """Whether decode steps are captured. No GPU has replayed one yet: there it has to be asked for."""
    if config.backend == "reference" or not accelerator.captures:
        return False
    return accelerator.captures_when_met if config.enforce_eager is None else not config.enforce_eager


def graph_notes(config: EngineConfig, captures: bool) -> list[str]:
    """What a user should know who asked for it."""
    if config.enforce_eager is not False or captures:
        return []
    return ["--no-enforce-eager changes nothing here: the reference operations are never captured"]


def capture_steps(
    model: LlamaModel,
    pool: Pool,
    tables: AdapterTables,
    accelerator: Accelerator,
    most: int,
    max_model_len: int,
    progress: Progress | None,
) -> StepGraphs:
    """The decode steps of up to `most` sequences, captured or ready to be. Raises `EngineStartError` where memory does
    not suffice."""
    block_size = pool.layout.block_size
    if accelerator.captures_when_met:
        most = max(1, min(most, RECORDED_BYTES // _outputs_bytes(model.config)))
    buffers = StepBuffers(
        accelerator,
        most=most,
        table_width=-(-min(max_model_len, CONTEXT_LIMIT) // block_size),
        block_size=block_size,
        spare=pool.num_blocks,
    )
    graphs = StepGraphs(
        lambda batch: model.forward(batch, pool),
        tables,
        buffers,
        accelerator,
        sizes=range(1, most + 1) if accelerator.captures_when_met else padded_sizes(most),
        block_size=block_size,
    )
    if accelerator.captures_when_met:
        return graphs
    try:
        graphs.capture(progress)
    except torch.OutOfMemoryError as error:
        raise EngineStartError(
            "there is no memory left for captured steps; lower --gpu-memory-utilization or --max-num-seqs, "
            "or leave out --no-enforce-eager"
        ) from error
    return graphs


def _outputs_bytes(model: ModelConfig) -> int:
    """What the kernels of one layer write for one row, in float32: linears, norms and sums, rotated queries,
    attention's and the gated activation's outputs. Each layer writes where the one before did."""
    widths = sum(out_features for out_features, _ in model.linear_shapes.values())
    heads = 2 * model.num_heads * model.head_dim
    return 4 * (widths + 4 * model.hidden_size + heads + model.intermediate_size)


def graph_bytes(most: int, model: ModelConfig, dtype: torch.dtype, max_model_len: int) -> int:
    """A bound on what the captured steps hold: activations, attention's parts of a context (256 tokens in each, one
    float32 vector a query head and two numbers), and the graphs themselves."""
    widths = sum(out_features for out_features, _ in model.linear_shapes.values()) + 4 * model.hidden_size
    parts = -(-min(max_model_len, CONTEXT_LIMIT) // 256)
    attention = parts * model.num_heads * (model.head_dim + 2) * 4
    return most * (widths * (dtype.itemsize + 4) + attention) + 2 * len(padded_sizes(most)) * GRAPH_BYTES
