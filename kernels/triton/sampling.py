"""The next token of each row of logits: the largest, or one draw from what min_p, top_k and top_p leave.

One program a row. `_weigh` finds the largest logit and, where the row draws, writes the weights exp((logit - largest) /
temperature). `_draw` keeps the weights above a floor, and of those equal to it the first few. The floor of top_k and
top_p is found by halving an interval of bit patterns, which for floats from 0 to 1 have the order of their values:
nothing is sorted, and at most 30 passes over the row find it exactly. Then one pass inverts the cumulative weights in
the order of ids. Sums are in float64, by block and in order, so that a row's token is of the row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..ops import Choices
from .launch import launch

BLOCK = 4096
WARPS = 8
HIGHEST = 0x3F800000
"""The bits of 1.0, the largest weight there is."""


@triton.jit
def _weigh(  # type: ignore[no-untyped-def]
    logits, temperatures, out, weights, vocab, stride, BLOCK: tl.constexpr
):
    """out: the smallest id with the largest logit, -1 where a logit is not finite; weights, where the row draws."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    place = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    best = tl.full((), 0, tl.int32)
    finite = tl.full((), 1, tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + place
        inside = token < vocab
        value = tl.load(source + token, mask=inside, other=float("-inf"))
        ordinary = (tl.abs(value) < float("inf")) | (token >= vocab)  # NaN is never below
        finite = tl.minimum(finite, tl.min(ordinary.to(tl.int32), axis=0))
        most = tl.max(value, axis=0)
        first = tl.min(tl.where(value == most, token, vocab), axis=0)
        best = tl.where(most > largest, first, best)
        largest = tl.maximum(largest, most)
    tl.store(out + row, tl.where(finite > 0, best, -1))
    temperature = tl.load(temperatures + row)
    if (finite == 0) | (temperature == 0.0):
        return
    for start in range(0, vocab, BLOCK):
        token = start + place
        inside = token < vocab
        value = tl.load(source + token, mask=inside, other=float("-inf"))
        tl.store(weights + row * vocab + token, tl.exp((value - largest) / temperature), mask=inside)


@triton.jit
def _block(source, start, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights from `start` on and their bits; beyond the vocabulary, bits below all others."""
    token = start + tl.arange(0, BLOCK)
    inside = token < vocab
    weight = tl.load(source + token, mask=inside, other=0.0)
    return token, weight, tl.where(inside, weight.to(tl.int32, bitcast=True), -1)


@triton.jit
def _reaching(source, vocab, floor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many weights have bits of `floor` at least."""
    counts = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        _, _, bits = _block(source, start, vocab, BLOCK)
        counts += (bits >= floor).to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit
def _total(source, vocab, floor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of the weights that have bits of `floor` at least."""
    sums = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, vocab, BLOCK):
        _, weight, bits = _block(source, start, vocab, BLOCK)
        sums += tl.where(bits >= floor, weight, 0.0).to(tl.float64)
    return tl.sum(sums, axis=0)


@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    weights,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    points,
    out,
    vocab,
    BLOCK: tl.constexpr,
    HIGHEST: tl.constexpr,
):
    """out: the token at the row's point of the cumulative weights that are kept, in the order of ids."""
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(temperatures + row) == 0.0) | (tl.load(out + row) < 0):
        return
    source = weights + row * vocab
    floor = tl.load(min_ps + row).to(tl.int32, bitcast=True)
    reached = _reaching(source, vocab, floor, BLOCK)
    equal = reached - _reaching(source, vocab, floor + 1, BLOCK)
    top_k = tl.load(top_ks + row)
    if (top_k > 0) & (reached > top_k):
        high = tl.full((), HIGHEST, tl.int32)
        while floor < high:  # the highest floor that top_k weights reach
            middle = floor + (high - floor + 1) // 2
            enough = _reaching(source, vocab, middle, BLOCK) >= top_k
            floor = tl.where(enough, middle, floor)
            high = tl.where(enough, high, middle - 1)
        equal = top_k - _reaching(source, vocab, floor + 1, BLOCK)
    above = _total(source, vocab, floor + 1, BLOCK)
    total = above + equal.to(tl.float64) * floor.to(tl.float32, bitcast=True).to(tl.float64)
    top_p = tl.load(top_ps + row)
    if top_p < 1.0:
        wanted = top_p * total
        lowest = floor
        high = tl.full((), HIGHEST, tl.int32)
        while floor < high:  # the highest floor above which lies enough; that of top_k does
            middle = floor + (high - floor + 1) // 2
            enough = _total(source, vocab, middle, BLOCK) >= wanted
            floor = tl.where(enough, middle, floor)
            high = tl.where(enough, high, middle - 1)
        above = _total(source, vocab, floor + 1, BLOCK)
        each = floor.to(tl.float32, bitcast=True).to(tl.float64)
        needed = tl.maximum(tl.ceil((wanted - above) / tl.maximum(each, 1e-300)), 1.0)
        there = _reaching(source, vocab, floor, BLOCK) - _reaching(source, vocab, floor + 1, BLOCK)
        there = tl.where(floor == lowest, equal, there)
        equal = tl.minimum(needed, there.to(tl.float64)).to(tl.int32)
        total = above + equal.to(tl.float64) * each
    point = tl.load(points + row) * total
    before = tl.full((), 0.0, tl.float64)
    seen = tl.full((), 0, tl.int32)
    chosen = tl.full((), -1, tl.int32)
    last = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    while (start < vocab) & (chosen < 0):
        token, weight, bits = _block(source, start, vocab, BLOCK)
        at_floor = (bits == floor).to(tl.int32)
        kept = (bits > floor) | ((at_floor > 0) & (seen + tl.cumsum(at_floor, axis=0) <= equal))
        wide = tl.where(kept, weight, 0.0).to(tl.float64)
        passed = kept & (before + tl.cumsum(wide, axis=0) > point)
        first = tl.min(tl.where(passed, token, vocab), axis=0)
        chosen = tl.where(first < vocab, first, -1)
        last = tl.maximum(last, tl.max(tl.where(wide > 0.0, token, 0), axis=0))
        before += tl.sum(wide, axis=0)
        seen += tl.sum(at_floor, axis=0)
        start += BLOCK
    tl.store(out + row, tl.where(chosen < 0, last, chosen))  # rounding may lift the point onto the total


def choose_tokens(logits: torch.Tensor, choices: Choices) -> torch.Tensor:
    """argmax, or the id at `points` of the cumulative weights that min_p, top_k and top_p keep: int32 [R]"""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return out
    weights = torch.empty((rows, vocab) if choices.draws else (1,), dtype=torch.float32, device=logits.device)
    launch(
        _weigh, (rows,),
        logits, choices.temperatures, out, weights, vocab, logits.stride(0), BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    if choices.draws:
        launch(
            _draw, (rows,),
            weights, choices.temperatures, choices.top_ks, choices.top_ps, choices.min_ps, choices.points, out, vocab,
            BLOCK=BLOCK, HIGHEST=HIGHEST, num_warps=WARPS,
        )  # fmt: skip
    return out
