"""Bytes and launches of decode steps by arithmetic: a table that needs no GPU, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels import triton
from . import costs
from .bases import FORMS, Base, Sizes
from .random_weights import random_model
from .steps import launches
from .table import markdown


def floors_table(base: Base, sizes: Sizes, forms: Sequence[str] = FORMS) -> str:
    """A line for each form, number of rows and number of adapters of one rank; every row takes one, so a step has no
    more adapters than rows."""
    numbers = ("rows", "adapters", "weights GB", "KV MB", "adapters MB", "all GB", "GFLOP", "launches")
    lines = []
    for form in forms:
        model = random_model(base, form, sizes, triton, torch.device("meta"))
        for rows in sizes.rows:
            for count in (0, *(count for count in sizes.adapters if count <= rows)):
                ranks = (sizes.rank,) * count
                floor = costs.step(base, form, rows, sizes.contexts[0], ranks, sizes)
                started = len(launches(model, base, rows, sizes.contexts[0], ranks, sizes))
                cells = [
                    form, str(rows), str(count), f"{floor.weights / 1e9:.2f}", f"{floor.kv / 1e6:,.0f}",
                    f"{floor.adapters / 1e6:,.0f}", f"{floor.bytes / 1e9:.2f}", f"{floor.flops / 1e9:,.0f}",
                    str(started),
                ]  # fmt: skip
                lines.append(cells)
    return markdown(("layers",), numbers, lines)
