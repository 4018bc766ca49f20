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

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from ...kernels.ops import AdapterTables, AttentionBatch, LoraBatch
from ...lora import segments
from ..model.forward_batch import ForwardBatch
from ..scheduling.plan import Chunk

ALIGN = 16
"""Bytes: where each array begins in the one buffer of a transfer."""


def build(
    chunks: Sequence[Chunk], tables: AdapterTables, block_size: int, device: torch.device
) -> ForwardBatch:
    """The forward of `chunks`, whose rows lie one chunk after another in that order."""
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
    if lora is not None:
        arrays |= {
            "pair_rows": lora.pair_rows,
            "pair_weights": lora.pair_weights,
            "starts": lora.starts,
            "slots": lora.slots,
        }
    on_device = transfer(arrays, device)
    return ForwardBatch(
        token_ids=on_device["token_ids"],
        positions=on_device["positions"],
        attention=AttentionBatch(
            block_tables=on_device["block_tables"],
            cu_seqlens_q=on_device["cu_seqlens_q"],
            context_lens=on_device["context_lens"],
            slot_mapping=on_device["slot_mapping"],
            max_query_len=int(lengths.max()),
        ),
        lora=None
        if lora is None
        else LoraBatch(
            tables=tables,
            pair_rows=on_device["pair_rows"],
            pair_weights=on_device["pair_weights"],
            starts=on_device["starts"],
            slots=on_device["slots"],
            rounds=lora.rounds,
        ),
    )


def transfer(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """The same arrays as tensors on `device`, moved as one buffer."""
    offsets, size = {}, 0
    for name, array in arrays.items():
        offsets[name] = size
        size += -(-array.nbytes // ALIGN) * ALIGN
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = buffer.numpy()
    for name, array in arrays.items():
        target[offsets[name] : offsets[name] + array.nbytes] = (
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )
    buffer = buffer.to(device, non_blocking=True)
    tensors = {}
    for name, array in arrays.items():
        piece = buffer[offsets[name] : offsets[name] + array.nbytes]
        tensors[name] = piece.view(torch.from_numpy(array[:0]).dtype).view(array.shape)
    return tensors
