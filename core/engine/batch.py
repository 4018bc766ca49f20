"""From a step's plan to the tensors of one model forward: index arithmetic in numpy, then one transfer.

Rows of a step, for two sequences with 3 and 1 rows (block_size 4, the first has 2 tokens in the cache
already):

    row              0        1        2        3
    sequence         0        0        0        1
    position         2        3        4        7       start + index within the chunk
    slot             b0*4+2   b0*4+3   b1*4+0   c1*4+3  block_table[position // 4] * 4 + position % 4
    cu_seqlens_q     0                          3    4
    context_lens     5 (sequence 0), 8 (sequence 1)     start + rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import torch

from ...kernels.ops import AdapterTables, AttentionBatch, LoraBatch
from ...lora import segments
from ..model.forward_batch import ForwardBatch
from ..scheduling.plan import Chunk
from .accelerator import Accelerator

ALIGN = 16
"""Bytes: where each array begins in the one buffer of a transfer."""


def build(
    chunks: Sequence[Chunk],
    tables: AdapterTables,
    block_size: int,
    accelerator: Accelerator,
) -> ForwardBatch:
    """The forward of `chunks`, whose rows lie one chunk after another in that order."""
    arrays, rounds = host_arrays(chunks, block_size)
    longest = max(len(chunk.token_ids) for chunk in chunks)
    return forward_batch(transfer(arrays, accelerator), longest, None if rounds is None else tables, rounds)


def host_arrays(
    chunks: Sequence[Chunk], block_size: int
) -> tuple[dict[str, np.ndarray], tuple[int, ...] | None]:
    """The arrays of a forward by name, those of adapters only where a row has one; and where their rounds begin."""
    lengths = np.array([len(chunk.token_ids) for chunk in chunks], np.int32)
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    cu_seqlens = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    rows = int(cu_seqlens[-1])

    block_tables = np.zeros((len(chunks), max(len(chunk.block_table) for chunk in chunks)), np.int32)
    for index, chunk in enumerate(chunks):
        block_tables[index, : len(chunk.block_table)] = chunk.block_table

    sequence = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(rows) - cu_seqlens[sequence] + starts[sequence]
    slots = (
        block_tables[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    )

    arrays = {
        "token_ids": np.fromiter(chain.from_iterable(chunk.token_ids for chunk in chunks), np.int64, rows),
        "positions": positions,
        "slot_mapping": slots,
        "block_tables": block_tables,
        "cu_seqlens_q": cu_seqlens,
        "context_lens": (starts + lengths).astype(np.int32),
    }
    lora = segments.build(chunks)
    if lora is None:
        return arrays, None
    arrays |= {
        "pair_rows": lora.pair_rows,
        "pair_weights": lora.pair_weights,
        "starts": lora.starts,
        "slots": lora.slots,
    }
    return arrays, lora.rounds


def forward_batch(
    tensors: Mapping[str, torch.Tensor],
    longest: int,
    tables: AdapterTables | None,
    rounds: tuple[int, ...] | None,
) -> ForwardBatch:
    """`host_arrays` once they are on the device; no sequence has more than `longest` rows. `tables`: None where no
    row has an adapter."""
    return ForwardBatch(
        token_ids=tensors["token_ids"],
        positions=tensors["positions"],
        attention=AttentionBatch(
            block_tables=tensors["block_tables"],
            cu_seqlens_q=tensors["cu_seqlens_q"],
            context_lens=tensors["context_lens"],
            slot_mapping=tensors["slot_mapping"],
            max_query_len=longest,
        ),
        lora=None
        if tables is None
        else LoraBatch(
            tables=tables,
            pair_rows=tensors["pair_rows"],
            pair_weights=tensors["pair_weights"],
            starts=tensors["starts"],
            slots=tensors["slots"],
            rounds=rounds,
        ),
    )


def transfer(arrays: Mapping[str, np.ndarray], accelerator: Accelerator) -> dict[str, torch.Tensor]:
    """The same arrays as tensors on the device, moved as one buffer."""
    size = buffer_bytes(arrays)
    buffer = accelerator.pinned(size)
    places = views(buffer, arrays)
    for name, place in places.items():
        place.numpy()[...] = arrays[name]
    uploaded = accelerator.upload(buffer)
    return places if uploaded is buffer else views(uploaded, arrays)


def buffer_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """What `arrays` take one after another."""
    return sum(-(-array.nbytes // ALIGN) * ALIGN for array in arrays.values())


def views(buffer: torch.Tensor, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Places in a uint8 buffer for arrays like these, one after another."""
    tensors, offset = {}, 0
    for name, array in arrays.items():
        piece = buffer[offset : offset + array.nbytes]
        tensors[name] = piece.view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        offset += -(-array.nbytes // ALIGN) * ALIGN
    return tensors
