"""What an operation has to move and compute at least: bytes and floating-point operations, by arithmetic. No torch.

Every input is counted once and every output once, in the form it has in memory. T rows, activations of 2 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .bases import GROUPS, Base, Sizes

HALF, SINGLE, INDEX = 2, 4, 4
"""Bytes of a float16, of a float32, of a table's entry."""


@dataclass(frozen=True)
class Cost:
    """At least so many bytes, exactly so many operations (a multiplication and an addition are two)."""

    bytes: int
    flops: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


def weight_bytes(n: int, k: int, form: str, group_size: int) -> int:
    """A weight [n, k]: float16; int8 with a float32 a row; 4 bit codes with a float16 scale and a byte a group."""
    if form == "fp16":
        return n * k * HALF
    if form == "INT8":
        return n * k + n * SINGLE
    assert form == "W4"
    return n * k // 2 + n * -(-k // group_size) * (HALF + 1)


def linear(rows: int, n: int, k: int, form: str, group_size: int) -> Cost:
    return Cost(weight_bytes(n, k, form, group_size) + rows * (k + n) * HALF, 2 * rows * n * k)


def adapter_bytes(ranks: Sequence[int], widths: Sequence[int], k: int) -> int:
    """A and B of adapters of these ranks on modules of one input: k in-features and `widths` out-features."""
    return sum(ranks) * sum(k + n for n in widths) * HALF


def shrink(rows: int, ranks: Sequence[int], widths: Sequence[int], k: int) -> Cost:
    """x and every A are read, the float32 rank sums written; rows are shared out evenly."""
    of_rows = _rank_of_rows(rows, ranks) * len(widths)
    read = rows * k * HALF + sum(ranks) * len(widths) * k * HALF
    return Cost(read + of_rows * SINGLE, 2 * of_rows * k)


def expand(rows: int, ranks: Sequence[int], widths: Sequence[int]) -> Cost:
    """Rank sums and every B are read, the outputs read and written."""
    of_rows, n = _rank_of_rows(rows, ranks), sum(widths)
    read = of_rows * len(widths) * SINGLE + sum(ranks) * n * HALF
    return Cost(read + 2 * rows * n * HALF, 2 * of_rows * n)


def add_lora(rows: int, ranks: Sequence[int], widths: Sequence[int], k: int) -> Cost:
    """x, every A and B are read, the outputs read and written; rank sums need never be in memory."""
    of_rows, n = _rank_of_rows(rows, ranks), sum(widths)
    moved = adapter_bytes(ranks, widths, k) + rows * k * HALF + 2 * rows * n * HALF
    return Cost(moved, 2 * of_rows * (k * len(widths) + n))


def _rank_of_rows(rows: int, ranks: Sequence[int]) -> int:
    """The rows' ranks together, where row i takes adapter i modulo their number."""
    return sum(ranks[row % len(ranks)] for row in range(rows))


def kv_bytes(base: Base, kv_form: str) -> int:
    """Key and value of one token in one layer; in int8 a float32 scale for each of their vectors."""
    config = base.config
    vector = config.head_dim * HALF if kv_form == "fp16" else config.head_dim + SINGLE
    return 2 * config.num_kv_heads * vector


def attention(base: Base, rows: int, context: int, block_size: int, kv_form: str) -> Cost:
    """Decodes in one layer: contexts and the entries of their blocks are read, queries read, outputs written."""
    config = base.config
    vectors = rows * config.num_heads * config.head_dim
    tables = rows * -(-context // block_size) * INDEX
    return Cost(rows * context * kv_bytes(base, kv_form) + tables + 2 * vectors * HALF, 4 * vectors * context)


def rope_and_write(base: Base, rows: int, kv_form: str) -> Cost:
    """q, k, v, and cos and sin of the rows are read; q and the cache are written. 3 operations a rotated value."""
    config = base.config
    q, k = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    moved = (2 * q + 2 * k) * HALF + config.head_dim * SINGLE + kv_bytes(base, kv_form)
    return Cost(rows * moved, rows * 3 * (q + k))


def rms_norm(rows: int, width: int) -> Cost:
    """4 operations a value: its square, the sum, and two factors."""
    return Cost((2 * rows * width + width) * HALF, 4 * rows * width)


def add_rms_norm(rows: int, width: int) -> Cost:
    """Both inputs are read, the sum and its norm written; one operation more."""
    return Cost((4 * rows * width + width) * HALF, 5 * rows * width)


def silu_mul(rows: int, width: int) -> Cost:
    """Both halves are read, the product is written; an exponential counts as one operation."""
    return Cost(3 * rows * width * HALF, 5 * rows * width)


def embedding(rows: int, width: int) -> Cost:
    return Cost(2 * rows * width * HALF, 0)


def choose_tokens(rows: int, vocab: int) -> Cost:
    """Float32 logits are read once, as for the largest."""
    return Cost(rows * vocab * SINGLE, rows * vocab)


@dataclass(frozen=True)
class StepFloor:
    """What one decode step reads and writes at least, in bytes."""

    weights: int
    """Of all layers, norms, the head, and the rows of the embedding."""
    kv: int
    """Contexts read, the new tokens' keys and values written."""
    adapters: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.weights + self.kv + self.adapters


def step(
    base: Base, form: str, rows: int, context: int, ranks: Sequence[int], sizes: Sizes, kv_form: str = "fp16"
) -> StepFloor:
    """A decode of `rows` sequences of `context` tokens, the new one among them, on adapters of these ranks."""
    config, group_size = base.config, sizes.group_size
    hidden, layers = config.hidden_size, config.num_layers
    shapes = [base.shape(group) for group in GROUPS]
    weights = layers * sum(weight_bytes(n, k, form, group_size) for n, k in shapes)
    weights += (2 * layers + 1) * hidden * HALF + (config.vocab_size + rows) * hidden * HALF
    kv = layers * rows * (context + 1) * kv_bytes(base, kv_form)
    adapters = layers * sum(
        adapter_bytes(ranks, base.widths(group), base.shape(group)[1]) for group in GROUPS
    )
    flops = layers * sum(2 * rows * n * k for n, k in shapes) + 2 * rows * config.vocab_size * hidden
    flops += layers * attention(base, rows, context, sizes.block_size, kv_form).flops
    if ranks:
        deltas = (add_lora(rows, ranks, base.widths(g), base.shape(g)[1]).flops for g in GROUPS)
        flops += layers * sum(deltas)
    return StepFloor(weights, kv, adapters, flops)
