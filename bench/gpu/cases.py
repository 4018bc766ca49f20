"""Every operation as one layer's call at a base's shapes: what is timed, what torch would do, what it has to give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any, cast

import torch
import torch.nn.functional as F

from ...kernels import triton
from ...kernels.ops import AttentionBatch, ChoosesTokens, LoraBatch, Ops
from ...kernels.pool import Pool
from ...kernels.triton.launch import recorded
from ...kernels.triton.lora import add_lora, takes_one_launch
from . import costs
from .bases import FORMS, GROUPS, Base, Sizes
from .clock import Call
from .costs import Cost
from .random_weights import HALF, KV_DTYPES, adapter_tables, choices, draw, fill, layout

EPS = 1e-5
LORA_PARTS = ("add", "other way", "shrink", "expand")
TOLERANCE = 5e-3
"""Largest error in 16 bits, relative to the largest value. Less than a step of an int8 cache (1/127): what is written
there has to be the reference's codes, all of them, which holds because no product and sum are contracted
(`launch.FP_FUSION`) and divisions are exact."""


@dataclass(frozen=True)
class Case:
    """One operation at one size. Inputs are on the device; building a case takes the memory, dropping it frees it."""

    op: str
    rows: int
    cost: Cost
    call: Call
    """What is timed; may write over its own inputs again and again."""
    torch_call: Call | None
    """The same result, or one of the same size, from torch's own operations."""
    result: Callable[[Ops], torch.Tensor] | None
    """What these operations make of the inputs as they are at first. None: part of another case."""
    detail: str = ""
    """Which linears, which form."""
    context: int = 0
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Planned:
    """A case that is not built yet."""

    name: str
    build: Callable[[], Case]


def error(case: Case, operations: Ops, reference: Ops) -> float | None:
    """The largest difference from the reference's values, relative to the largest of them."""
    if case.result is None:
        return None
    found, expected = case.result(operations).float(), case.result(reference).float()
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def _timed_as_compared(result: Callable[[Ops], torch.Tensor], **values: Any) -> Case:
    return Case(call=partial(result, triton), result=result, **values)


def cases(base: Base, sizes: Sizes, device: torch.device) -> list[Iterator[Planned]]:
    """All of them by kind, the kinds with goals first."""
    kinds = (_lora_cases, _attention_cases, _linear_cases, _other_cases)
    return [kind(base, sizes, device) for kind in kinds]


def _lora_cases(base: Base, sizes: Sizes, device: torch.device) -> Iterator[Planned]:
    for rows in sizes.rows:
        for ranks, group in product(sizes.mixes(rows), GROUPS):
            for part in LORA_PARTS:
                name = f"add_lora {group}, {part}, {rows} rows of {len(ranks)} adapters"
                yield Planned(name, partial(_lora, base, group, rows, tuple(ranks), part, sizes, device))


def _attention_cases(base: Base, sizes: Sizes, device: torch.device) -> Iterator[Planned]:
    for context, rows, kv_form in product(sizes.contexts, sizes.rows, KV_DTYPES):
        name = f"attention, {rows} rows at {context}, KV {kv_form}"
        yield Planned(name, partial(_attention, base, rows, context, kv_form, sizes, device))


def _linear_cases(base: Base, sizes: Sizes, device: torch.device) -> Iterator[Planned]:
    for form, group, rows in product(FORMS, GROUPS, (*sizes.rows, sizes.many_rows)):
        detail, (n, k) = f"{group} {form}", base.shape(group)
        yield Planned(
            f"linear {detail}, {rows} rows", partial(_linear, detail, form, n, k, rows, sizes, device)
        )
    n, k = base.config.vocab_size, base.config.hidden_size
    for rows in sizes.rows:
        yield Planned(f"head, {rows} rows", partial(_linear, "head fp16", "fp16", n, k, rows, sizes, device))


def _other_cases(base: Base, sizes: Sizes, device: torch.device) -> Iterator[Planned]:
    for rows in sizes.rows:
        for build in (_rms_norm, _add_rms_norm, _silu_mul, _embedding):
            yield Planned(f"{build.__name__[1:]}, {rows} rows", partial(build, base, rows, device))
        for draws in (False, True):
            name = f"choose_tokens, {rows} rows, {'drawn' if draws else 'greedy'}"
            yield Planned(name, partial(_choose_tokens, base, rows, draws, device))
        for kv_form in KV_DTYPES:
            name = f"rope_and_write, {rows} rows, KV {kv_form}"
            yield Planned(name, partial(_rope_and_write, base, rows, kv_form, sizes, device))


def _values(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=HALF, device=device).normal_()


def _linear(detail: str, form: str, n: int, k: int, rows: int, sizes: Sizes, device: torch.device) -> Case:
    x, drawn = _values(rows, k, device=device), draw(form, n, k, sizes.group_size, device)
    linear = drawn(triton)
    dense = linear.weight.values if form == "fp16" else _values(n, k, device=device)  # type: ignore[attr-defined]
    return Case(
        op="linear",
        detail=detail,
        rows=rows,
        cost=costs.linear(rows, n, k, form, sizes.group_size),
        call=lambda: linear.apply(x),
        torch_call=lambda: F.linear(x, dense),
        result=lambda ops: drawn(ops).apply(x),
    )


def _lora(
    base: Base, group: str, rows: int, ranks: tuple[int, ...], part: str, sizes: Sizes, device: torch.device
) -> Case:
    """Segments as in a captured step: as many as rows, empty ones behind. `part`: all of it; all of it in two launches
    where one would be taken, or the other way round; or one of the two launches."""
    n, k = base.shape(group)
    widths, modules = base.widths(group), base.modules(group)
    offsets = [sum(widths[:i]) for i in range(len(widths) + 1)]
    tables, size = adapter_tables(base, ranks, 1, [group], device)
    place = layout(base, sizes, 1)
    pool = Pool(place, -(-size // place.block_bytes), device)
    fill(pool)
    x, out = _values(rows, k, device=device), _values(rows, n, device=device)
    members = [range(slot, rows, len(ranks)) for slot in range(len(ranks))]
    starts = [sum(map(len, members[:slot])) for slot in range(len(ranks) + 1)]
    empty = rows - len(ranks)

    def index(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    batch = LoraBatch(
        tables=tables,
        pair_rows=index([row for rows_of_one in members for row in rows_of_one]),
        pair_weights=torch.ones(rows, device=device),
        starts=index(starts + [rows] * empty),
        slots=index([*range(len(ranks)), *[0] * empty]),
        rounds=(0, rows),
    )

    one_launch = {"add": None, "other way": not takes_one_launch(rows, k, offsets)}.get(part, False)

    def result(ops: Ops) -> torch.Tensor:
        target = out.clone()
        if ops is triton:
            add_lora(target, x, pool, 0, modules, offsets, batch, one_launch=one_launch)
        else:
            ops.add_lora(target, x, pool, 0, modules, offsets, batch)
        return target

    with recorded(run=False) as launches:
        add_lora(out, x, pool, 0, modules, offsets, batch, one_launch=one_launch)
    if part in ("shrink", "expand"):
        launches[0].start()  # what expand reads
        launches = [launch for launch in launches if launch.name == part]

    def call() -> torch.Tensor:
        for launch in launches:
            launch.start()
        return out

    cost = {
        "shrink": lambda: costs.shrink(rows, ranks, widths, k),
        "expand": lambda: costs.expand(rows, ranks, widths),
    }.get(part, lambda: costs.add_lora(rows, ranks, widths, k))
    whole = part not in ("shrink", "expand")
    return Case(
        op="add_lora" if part == "add" else f"add_lora: {part}",
        detail=group,
        rows=rows,
        cost=cost(),
        call=call,
        torch_call=_torch_lora(x, out, ranks, widths, k) if whole and rows % len(ranks) == 0 else None,
        result=result if whole else None,
        ranks=ranks,
    )


def _torch_lora(
    x: torch.Tensor, out: torch.Tensor, ranks: Sequence[int], widths: Sequence[int], k: int
) -> Call:
    """Batched products over adapters that were stacked before, filled up to the largest rank."""
    count, most = len(ranks), max(ranks)
    offsets = [sum(widths[:i]) for i in range(len(widths) + 1)]
    weights = [
        (_values(count, k, most, device=x.device), _values(count, most, width, device=x.device) / k)
        for width in widths
    ]
    inputs = x.view(-1, count, k).transpose(0, 1)
    targets = out.view(-1, count, sum(widths)).transpose(0, 1)

    def call() -> torch.Tensor:
        for (begin, end), (a, b) in zip(pairwise(offsets), weights):
            targets[:, :, begin:end] += torch.bmm(torch.bmm(inputs, a), b)
        return out

    return call


def _attention(base: Base, rows: int, context: int, kv_form: str, sizes: Sizes, device: torch.device) -> Case:
    """Tables as wide as a captured step's."""
    config = base.config
    heads, dim, scale = config.num_heads, config.head_dim, config.head_dim**-0.5
    width, blocks = sizes.max_model_len // sizes.block_size, -(-context // sizes.block_size)
    pool = Pool(layout(base, sizes, 1, kv_form), rows * blocks, device)
    fill(pool)
    block_tables = torch.zeros((rows, max(width, blocks)), dtype=torch.int32, device=device)
    block_tables[:, :blocks] = torch.randperm(rows * blocks, device=device).view(rows, blocks)
    batch = AttentionBatch(
        block_tables=block_tables,
        cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(rows, dtype=torch.int64, device=device),
        max_query_len=1,
    )
    q = _values(rows, heads, dim, device=device)
    keys, values = (_values(rows, config.num_kv_heads, context, dim, device=device) for _ in range(2))
    queries = q.unsqueeze(2)
    return _timed_as_compared(
        lambda ops: ops.paged_attention(q, pool, 0, batch, scale),
        op="attention",
        detail=f"KV {kv_form}",
        rows=rows,
        cost=costs.attention(base, rows, context, sizes.block_size, kv_form),
        torch_call=lambda: F.scaled_dot_product_attention(
            queries, keys, values, scale=scale, enable_gqa=True
        ),
        context=context,
    )


def _rope_and_write(base: Base, rows: int, kv_form: str, sizes: Sizes, device: torch.device) -> Case:
    config = base.config
    split, dim = [config.num_heads, config.num_kv_heads, config.num_kv_heads], config.head_dim
    q, k, v = _values(rows, sum(split) * dim, device=device).unflatten(1, (-1, dim)).split(split, dim=1)
    positions = torch.arange(rows, device=device)
    angles = torch.rand(sizes.max_model_len, dim // 2, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    pool = Pool(layout(base, sizes, 1, kv_form), rows, device)
    slots = torch.arange(rows, device=device) * sizes.block_size + 3
    half = dim // 2

    def result(ops: Ops) -> torch.Tensor:
        """The rotated queries, and the rows' keys and values as the cache stands for them."""
        pool.memory.zero_()
        rotated = ops.rope_and_write_kv(q, k, v, positions, cos, sin, pool, 0, slots)
        cached = [part[:, :, 3].float() for part in pool.kv(0)]
        if pool.layout.quantised:
            cached = [part * scales[:, :, 3, None] for part, scales in zip(cached, pool.kv_scales(0))]
        return torch.cat([rotated.float(), *cached], dim=1)

    def by_torch() -> torch.Tensor:
        c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        turned = [
            torch.cat([x[..., :half] * c - x[..., half:] * s, x[..., half:] * c + x[..., :half] * s], -1)
            for x in (q, k)
        ]
        key_cache, value_cache = pool.kv(0)
        block, offset = slots // sizes.block_size, slots % sizes.block_size
        key_cache[block, :, offset] = turned[1].to(key_cache.dtype)
        value_cache[block, :, offset] = v.to(value_cache.dtype)
        return turned[0]

    return Case(
        op="rope_and_write",
        detail=f"KV {kv_form}",
        rows=rows,
        cost=costs.rope_and_write(base, rows, kv_form),
        call=lambda: triton.rope_and_write_kv(q, k, v, positions, cos, sin, pool, 0, slots),
        torch_call=by_torch if kv_form == "fp16" else None,
        result=result,
    )


def _rms_norm(base: Base, rows: int, device: torch.device) -> Case:
    width = base.config.hidden_size
    x, weight = _values(rows, width, device=device), _values(width, device=device)
    return _timed_as_compared(
        lambda ops: ops.rms_norm(x, weight, EPS),
        op="rms_norm",
        rows=rows,
        cost=costs.rms_norm(rows, width),
        torch_call=lambda: F.rms_norm(x, (width,), weight, EPS),
    )


def _add_rms_norm(base: Base, rows: int, device: torch.device) -> Case:
    width = base.config.hidden_size
    x, residual = (_values(rows, width, device=device) for _ in range(2))
    weight, written = _values(width, device=device), residual.clone()
    return Case(
        op="add_rms_norm",
        rows=rows,
        cost=costs.add_rms_norm(rows, width),
        call=lambda: triton.add_rms_norm(x, written, weight, EPS)[0],
        torch_call=lambda: F.rms_norm(x + residual, (width,), weight, EPS),
        result=lambda ops: torch.cat(ops.add_rms_norm(x, residual.clone(), weight, EPS)),
    )


def _silu_mul(base: Base, rows: int, device: torch.device) -> Case:
    width = base.config.intermediate_size
    gate_up = _values(rows, 2 * width, device=device)
    return _timed_as_compared(
        lambda ops: ops.silu_mul(gate_up),
        op="silu_mul",
        rows=rows,
        cost=costs.silu_mul(rows, width),
        torch_call=lambda: F.silu(gate_up[:, :width]) * gate_up[:, width:],
    )


def _embedding(base: Base, rows: int, device: torch.device) -> Case:
    vocab, width = base.config.vocab_size, base.config.hidden_size
    held = triton.hold(_values(vocab, width, device=device))
    token_ids = torch.randint(vocab, (rows,), device=device)
    return _timed_as_compared(
        lambda ops: ops.embedding(token_ids, held, None, HALF),
        op="embedding",
        rows=rows,
        cost=costs.embedding(rows, width),
        torch_call=lambda: F.embedding(token_ids, held.values),
    )


def _choose_tokens(base: Base, rows: int, draws: bool, device: torch.device) -> Case:
    """Torch sorts the whole row to draw. A draw at the very border of two tokens may differ from the reference's."""
    logits = torch.randn(rows, base.config.vocab_size, device=device) * 3
    settings = choices(rows, device, draws=draws)

    def by_sorting() -> torch.Tensor:
        shares, tokens = (logits / 0.8).softmax(dim=1).sort(dim=1, descending=True)
        kept = shares.masked_fill(shares.cumsum(dim=1) - shares > 0.95, 0)
        kept[:, 50:] = 0
        point = settings.points.float().unsqueeze(1) * kept.sum(dim=1, keepdim=True)
        return tokens.gather(1, torch.searchsorted(kept.cumsum(dim=1), point))

    return _timed_as_compared(
        lambda ops: cast(ChoosesTokens, ops).choose_tokens(logits, settings),
        op="choose_tokens",
        detail="drawn" if draws else "greedy",
        rows=rows,
        cost=costs.choose_tokens(rows, base.config.vocab_size),
        torch_call=by_sorting if draws else lambda: logits.argmax(dim=1),
    )
