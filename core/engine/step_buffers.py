"""The input of captured decode steps: arrays on the device at addresses that never change, and how they are filled."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...kernels.ops import AdapterTables
from ..model.forward_batch import ForwardBatch
from .accelerator import Accelerator
from .batch import buffer_bytes, forward_batch, views

ENDS = ("cu_seqlens_q", "starts")
"""Arrays with one entry more than there are rows."""


class StepBuffers:
    """Room for `most` rows, each of a sequence of its own with at most `table_width` blocks and one adapter.

    What a step does not fill is padding. A padding row is a sequence of one token, id 0, in the block `spare`, which
    belongs to nobody: it writes there and reads only what it wrote. Padding segments of adapters are empty.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        most: int,
        table_width: int,
        block_size: int,
        spare: int,
    ) -> None:
        shapes: dict[str, np.ndarray] = {
            "token_ids": np.empty(most, np.int64),
            "positions": np.empty(most, np.int64),
            "slot_mapping": np.empty(most, np.int64),
            "context_lens": np.empty(most, np.int32),
            "cu_seqlens_q": np.empty(most + 1, np.int32),
            "pair_rows": np.empty(most, np.int32),
            "pair_weights": np.empty(most, np.float32),
            "starts": np.empty(most + 1, np.int32),
            "slots": np.empty(most, np.int32),
            "block_tables": np.empty((most, table_width), np.int32),  # last: a step sends only its rows of it
        }
        size = buffer_bytes(shapes)
        self.table_width = table_width
        self._accelerator = accelerator
        self._staged = accelerator.pinned(size)
        self._sent = accelerator.counterpart(self._staged)
        self._host = {name: view.numpy() for name, view in views(self._staged, shapes).items()}
        self._host["cu_seqlens_q"][:] = np.arange(most + 1)  # every row is a sequence, padding too
        self._device = views(self._sent, shapes)
        self._head = size - buffer_bytes({"block_tables": shapes["block_tables"]})
        self._spare = spare
        self._padding = {"slot_mapping": spare * block_size, "context_lens": 1}
        """Of the others: 0."""

    def batch(self, size: int, tables: AdapterTables | None) -> ForwardBatch:
        """The forward of the first `size` rows, whatever lies there when it runs; `tables`: with adapters."""
        tensors = {name: view[: size + (name in ENDS)] for name, view in self._device.items()}
        return forward_batch(tensors, 1, tables, (0, size))

    def fill(self, arrays: Mapping[str, np.ndarray], size: int) -> None:
        """Send a step of up to `size` rows (`batch.host_arrays`; none: all is padding), padded to `size`."""
        self._accelerator.wait_sent()
        host = self._host
        for name in host.keys() - {"cu_seqlens_q", "block_tables", "starts"}:
            given = arrays.get(name, ())
            host[name][: len(given)] = given
            host[name][len(given) : size] = self._padding.get(name, 0)
        starts = arrays.get("starts", np.zeros(1, np.int32))
        host["starts"][: len(starts)] = starts
        host["starts"][len(starts) : size + 1] = starts[-1]
        tables = host["block_tables"][:size]
        tables[...] = 0
        rows = 0
        if "block_tables" in arrays:
            rows, width = arrays["block_tables"].shape
            tables[:rows, :width] = arrays["block_tables"]
        tables[rows:, 0] = self._spare
        end = self._head + tables.nbytes
        self._accelerator.send(self._staged[:end], self._sent[:end])
