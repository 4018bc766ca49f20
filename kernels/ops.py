"""The operations a forward pass is made of: their contract, and the choice of who computes them.

Every implementation (`reference`, `cpu`, `triton`) is a module with these functions. Shapes are written with T for
tokens (rows) in the batch, S for sequences, H query heads, Hk key-value heads, D head_dim, K in_features, N
out_features, P for (row, adapter) pairs, G for segments.

**Order of sums.** For one output element the order of additions depends on K (in attention: on that token's own
context) alone, never on T, on the chunk a token came in, on padding or on neighbours. An implementation that keeps this
has `ROWS_INVARIANT = True`; `linear` through a vendor's matrix product does not.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from .dense_weight import DenseWeight
from .packed_weight import PackedWeight
from .pool import Pool

ADAPTER_FORMS = (torch.float32, torch.float16, torch.bfloat16)
"""What A and B may be held in."""
W8A8_MAX_K = 2**31 // (127 * 128)
"""in_features up to which `linear_w8a8`'s sums of int8 products fit in 32 bits."""
W8A8_SMALLEST = 1e-36
"""A row whose largest ordinary activation is not above this has zeros for codes: 127 / it might be no float32."""


def _check(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Kernels read these by address: what they are given must be just what they expect."""
    assert tensor.dtype == dtype, f"{tensor.dtype} where {dtype} is read"
    assert tensor.is_contiguous()


@dataclass(frozen=True)
class AttentionBatch:
    """Who attends to what in one step. Everything is on the pool's device."""

    block_tables: torch.Tensor
    """int32 [S, max blocks]: block ids of each sequence, in order; entries past its context are 0 and never read."""
    cu_seqlens_q: torch.Tensor
    """int32 [S + 1]: sequence s owns the rows cu_seqlens_q[s] : cu_seqlens_q[s + 1]."""
    context_lens: torch.Tensor
    """int32 [S]: tokens in the cache after this step's rows were written; the rows are the last of them."""
    slot_mapping: torch.Tensor
    """int64 [T]: where each row's K and V go, block id * block_size + offset."""
    max_query_len: int | None = None
    """No sequence has more rows in this step; known on the host, for the size of a launch. None: not known."""

    def __post_init__(self) -> None:
        for tensor in (self.block_tables, self.cu_seqlens_q, self.context_lens):
            _check(tensor, torch.int32)
        _check(self.slot_mapping, torch.int64)


@dataclass(frozen=True)
class AdapterTables:
    """Where resident adapters lie: one fixed arena for all, rewritten in place, indexed by slot.

    Ranks of module m in layer l of the adapter in slot s: `ranks[s, l, m]` (0: not adapted). Its first row is entry
    `first_row[s, l, m]` of `rows`; first come the `rank` rows of A (in_features values each), then the `rank` columns
    of B (out_features values each). An entry of `rows` is a byte offset into the pool, divided by 16.
    """

    ranks: torch.Tensor
    """int32 [slots, layers, 7]; the last axis in the order of `lora.base.MODULES`."""
    first_row: torch.Tensor
    """int32 [slots, layers, 7]"""
    scales: torch.Tensor
    """float32 [slots, layers, 7]: alpha/r, or as the adapter's config says."""
    rows: torch.Tensor
    """int32 [rows in the arena]"""
    dtype: torch.dtype
    """Of A and B in the pool, where `forms` does not say otherwise."""
    forms: torch.Tensor | None = None
    """int32 [slots]: index in `ADAPTER_FORMS` of the dtype that A and B of the slot's adapter have in the pool. None:
    all have `dtype`. Only for operations that have `READS_ANY_FORM`."""
    max_rank: int = 512
    """No rank is larger; known on the host, for memory that is taken before ranks are read."""

    def __post_init__(self) -> None:
        for tensor in (self.ranks, self.first_row, self.rows, *([] if self.forms is None else [self.forms])):
            _check(tensor, torch.int32)
        _check(self.scales, torch.float32)


@dataclass(frozen=True)
class LoraBatch:
    """Which rows of the step take which adapters.

    Pairs are grouped: segment g is `pair_rows[starts[g] : starts[g + 1]]`, all through the adapter in `slots[g]`.
    Within one segment a row occurs at most once. A row with several adapters occurs in several segments, whose order is
    the order in which its deltas are added; a row without an adapter occurs in none.
    """

    tables: AdapterTables
    pair_rows: torch.Tensor
    """int32 [P]: the row of each pair."""
    pair_weights: torch.Tensor
    """float32 [P]: the request's weight for the adapter."""
    starts: torch.Tensor
    """int32 [G + 1]"""
    slots: torch.Tensor
    """int32 [G]"""
    rounds: tuple[int, ...] | None = None
    """Segments at which rounds begin, and G at the end: in one round a row occurs at most once, so that its segments
    can be computed at the same time. None: each segment is a round."""

    def __post_init__(self) -> None:
        for tensor in (self.pair_rows, self.starts, self.slots):
            _check(tensor, torch.int32)
        _check(self.pair_weights, torch.float32)


@dataclass(frozen=True)
class Choices:
    """How the token after each row of logits is chosen. All [R], on the logits' device."""

    temperatures: torch.Tensor
    """float32; 0: the largest logit is taken, and nothing else here counts."""
    top_ks: torch.Tensor
    """int32; 0: all"""
    top_ps: torch.Tensor
    """float64; 1: all"""
    min_ps: torch.Tensor
    """float32"""
    points: torch.Tensor
    """float64 in [0, 1): where the row's cumulative distribution is inverted."""
    draws: bool
    """Any row has a temperature; known on the host."""

    def __post_init__(self) -> None:
        for tensor in (self.temperatures, self.min_ps):
            _check(tensor, torch.float32)
        for tensor in (self.top_ps, self.points):
            _check(tensor, torch.float64)
        _check(self.top_ks, torch.int32)


class ChoosesTokens(Protocol):
    """What operations for a device offer beside `Ops`; on a CPU the sampler does as well without."""

    def choose_tokens(self, logits: torch.Tensor, choices: Choices) -> torch.Tensor:
        """The next token of each row of logits float32 [R, vocab]; -1 where one is not finite: int32 [R].

        Greedy: the smallest id with the largest logit. Else weights exp((logit - largest) / temperature) are kept that
        are min_p at least; of those the top_k largest; of those the fewest largest that hold top_p of their sum, of
        equal ones always the smallest ids; and the first id is taken whose cumulative weight, in the order of ids and
        in float64, exceeds `points` times their sum.
        """


class Ops(Protocol):
    """What a model calls. Outputs are new tensors of x's dtype unless said otherwise; sums are in float32."""

    ROWS_INVARIANT: bool
    READS_ANY_FORM: bool
    """`add_lora` takes adapters of different dtypes, by `AdapterTables.forms`."""

    def room(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a matrix that `hold` will be given, as it suits the linears here; what is in it is undefined."""

    def hold(self, matrix: torch.Tensor) -> DenseWeight:
        """A matrix [N, K], float or int8, in the order that the linears here read it; it may be reordered in place."""

    def hold_packed(self, weight: PackedWeight) -> PackedWeight:
        """A packed weight in rows, in the order that `linear_w4` here reads it."""

    def linear(self, x: torch.Tensor, weight: DenseWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N]. weight may be of a narrower float dtype.

        May be a vendor's matrix product, whose order of sums depends on T.
        """

    def linear_invariant(
        self, x: torch.Tensor, weight: DenseWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`linear` in an order of sums fixed by K: what `--batch-invariant` runs."""

    def linear_int8(
        self, x: torch.Tensor, weight: DenseWeight, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """y[t, n] = scale[n] * sum_k x[t, k] * weight[n, k] + bias[n]

        x [T, K] float, weight [N, K] int8, scale [N] float32 (bitsandbytes' SCB / 127), -> [T, N].
        """

    def linear_w8a8(
        self,
        x: torch.Tensor,
        weight: DenseWeight,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        threshold: float,
    ) -> torch.Tensor:
        """y[t, n] = scale[n] * (s[t] * sum_k codes[t, k] * weight[n, k] + sum_j x[t, j] * weight[n, j]) + bias[n]

        LLM.int8() (Dettmers et al., arXiv 2208.07339) with outliers of its own for each row, so that no row depends on
        another. j runs over row t's outliers: the columns with |x| >= threshold (0: none) and those that are no finite
        number. Over the others s[t] = max |x| / 127 and codes = round(x * (127 / max |x|)), ties to even; at outliers
        the code is 0. The sums of codes are integers and exact; those of outliers are float32.

        x [T, K] float with K up to `W8A8_MAX_K`; weight, scale and bias as in `linear_int8`, -> [T, N].
        """

    def linear_w4(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """y[t, n] = sum_j x[t, order[j]] * (codes[n, j] - zeros[n, g]) * scales[n, g] + bias[n]

        g = j // group_size. x [T, K] float, weight [N, K] in 4 or 8 bit, as `hold_packed` left it, -> [T, N].
        """

    def embedding(
        self, token_ids: torch.Tensor, weight: DenseWeight, absmax: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Rows of weight [vocab, hidden] for int64 ids [T], as `dtype`; with absmax float32 [vocab], each row times
        its absmax times (1 / 127)."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight, over the last axis of x [T, hidden]; the mean in float32."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """r = x + residual; returns (rms_norm(r), r). May write r into `residual`."""

    def rope_and_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pool: Pool,
        layer: int,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Rotate q and k by halves (as Hugging Face's LLaMA) and put k and v into the pool; returns the rotated q.

        A quantised pool gets codes and scales (`PoolLayout.quantised`).

        q [T, H, D], k and v [T, Hk, D] (may be strided views of one fused output), positions int64 [T], cos and sin
        float32 [max positions, D / 2].
        """

    def paged_attention(
        self, q: torch.Tensor, pool: Pool, layer: int, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        """Causal attention of the step's rows over their sequences' blocks -> [T, H, D].

        Row i of sequence s (0-based among its q rows, q_len of them) stands at position context_len - q_len + i and
        sees positions 0 to that. Query head h uses key-value head h // (H / Hk).
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half of [T, 2 * intermediate] -> [T, intermediate]."""

    def add_lora(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        pool: Pool,
        layer: int,
        modules: Sequence[int],
        offsets: Sequence[int],
        lora: LoraBatch,
    ) -> None:
        """out[row, off : off + N_m] += weight * scale * (x[row] @ A.T) @ B.T, in place, for each pair and module m.

        x [T, K], out [T, sum of N_m]; `modules[i]` (index into MODULES) writes the columns that begin at
        `offsets[i]` and end at `offsets[i + 1]`: offsets has one entry more than modules. The rank sums are
        float32, multiplied there by weight * scale.
        """


def for_device(device: torch.device | str, backend: str = "auto") -> Ops:
    """The implementation for `device`: "reference" and "cpu" run on a CPU, "reference" and "triton" on CUDA."""
    kind = torch.device(device).type
    if backend == "auto":
        backend = "cpu" if kind == "cpu" else "triton"
    module = {"reference": ".reference", "cpu": ".cpu", "triton": ".triton"}[backend]
    return cast(Ops, importlib.import_module(module, __package__))


def token_chooser(operations: Ops) -> ChoosesTokens | None:
    """The same operations where they choose tokens too."""
    return cast(ChoosesTokens, operations) if hasattr(operations, "choose_tokens") else None
