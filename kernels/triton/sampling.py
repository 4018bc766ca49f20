"""The next token of each row of logits: the largest, or one draw from what min_p, top_k and top_p leave.

One program a row. `_weigh` finds the largest logit and, where the row draws, writes the weights exp((logit - largest) /
temperature). `_draw` keeps the weights above a floor, and of those equal to it the first few. Nothing is sorted: for
floats from 0 to 1 the order of bit patterns is that of values, so a floor is found by narrowing an interval of them,
four floors a pass: at most 15 passes for top_k, fewer where some floor leaves just as many, and at most 15 for top_p;
with what lies between, `PASSES` in all. The last one inverts the cumulative weights in the order of ids. Sums are of
integers, hence the same in any order: a row's token is of the row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..ops import Choices
from .launch import launch

BLOCK = 4096
WARPS, DRAW_WARPS = 8, 16
HIGHEST = 0x3F800000
"""The bits of 1.0, the largest weight there is."""
PASSES = 34
"""Of `_draw` over a row, at most: one for min_p, 15 and one for top_k, 15 and one for top_p, and the last. A pass
leaves a quarter of an interval, and 4 ** 15 is the first power beyond `HIGHEST`."""
UNIT = 2.0**42
"""Weights are summed in units of 1 / UNIT, rounded down: 64 bits hold the sum of 2 ** 20 of them, and the total of a
vocabulary of 128,256, which is 1 at least, falls short by 3e-8 at most."""


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
def _block(source, start, vocab, BLOCK: tl.constexpr, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ids from `start` on, their weights in units, and the weights' bits; beyond the vocabulary, bits below others."""
    token = start + tl.arange(0, BLOCK)
    inside = token < vocab
    weight = tl.load(source + token, mask=inside, other=0.0)
    return token, (weight * UNIT).to(tl.int64), tl.where(inside, weight.to(tl.int32, bitcast=True), -1)


@triton.jit
def _at(source, vocab, floor, BLOCK: tl.constexpr, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many weights reach `floor`, how many of them exceed it, and what these are together."""
    reached = tl.zeros((BLOCK,), dtype=tl.int32)
    over = tl.zeros((BLOCK,), dtype=tl.int32)
    above = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, vocab, BLOCK):
        _, units, bits = _block(source, start, vocab, BLOCK, UNIT)
        reached += (bits >= floor).to(tl.int32)
        over += (bits > floor).to(tl.int32)
        above += tl.where(bits > floor, units, 0)
    return tl.sum(reached, axis=0), tl.sum(over, axis=0), tl.sum(above, axis=0)


@triton.jit
def _narrowed(  # type: ignore[no-untyped-def]
    source, vocab, floor, high, reached, wanted,
    IN_UNITS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The quarter of floor..high in which the highest floor lies that `wanted` of the weights reach: floor, high, and
    how many reach the new floor, as `reached` do the old one. Weights are counted, or summed IN_UNITS. Four sums
    apart, because a tile of them would go through shared memory."""
    step = (high - floor + 3) // 4
    one, two, three = floor + step, floor + 2 * step, floor + 3 * step
    one, two, three = tl.minimum(one, high), tl.minimum(two, high), tl.minimum(three, high)
    kind: tl.constexpr = tl.int64 if IN_UNITS else tl.int32
    from_one = tl.zeros((BLOCK,), dtype=kind)
    from_two = tl.zeros((BLOCK,), dtype=kind)
    from_three = tl.zeros((BLOCK,), dtype=kind)
    from_four = tl.zeros((BLOCK,), dtype=kind)
    for start in range(0, vocab, BLOCK):
        _, units, bits = _block(source, start, vocab, BLOCK, UNIT)
        amount = units if IN_UNITS else 1
        from_one += tl.where(bits >= one, amount, 0)
        from_two += tl.where(bits >= two, amount, 0)
        from_three += tl.where(bits >= three, amount, 0)
        from_four += tl.where(bits >= high, amount, 0)
    n_1, n_2, n_3, n_4 = tl.sum(from_one), tl.sum(from_two), tl.sum(from_three), tl.sum(from_four)
    passed = (n_1 >= wanted).to(tl.int32) + (n_2 >= wanted).to(tl.int32)
    passed += (n_3 >= wanted).to(tl.int32) + (n_4 >= wanted).to(tl.int32)
    reached = tl.where(n_1 >= wanted, n_1, reached)
    reached = tl.where(n_2 >= wanted, n_2, reached)
    reached = tl.where(n_3 >= wanted, n_3, reached)
    reached = tl.where(n_4 >= wanted, n_4, reached)
    return tl.minimum(floor + step * passed, high), tl.minimum(floor + step * (passed + 1) - 1, high), reached


@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    weights, temperatures, top_ks, top_ps, min_ps, points, out, vocab,
    BLOCK: tl.constexpr, HIGHEST: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """out: the token at the row's point of the cumulative weights that are kept, in the order of ids."""
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(temperatures + row) == 0.0) | (tl.load(out + row) < 0):
        return
    source = weights + row * vocab
    floor = tl.load(min_ps + row).to(tl.int32, bitcast=True)
    floor = tl.maximum(floor, 0)  # -0.0 has the lowest bits of all
    reached, over, above = _at(source, vocab, floor, BLOCK, UNIT)
    equal = reached - over
    top_k = tl.load(top_ks + row)
    if (top_k > 0) & (reached > top_k):
        high = tl.full((), HIGHEST, tl.int32)
        # A floor that just top_k weights reach, or the highest of more.
        while (floor < high) & (reached != top_k):
            floor, high, reached = _narrowed(source, vocab, floor, high, reached, top_k, False, BLOCK, UNIT)
        reached, over, above = _at(source, vocab, floor, BLOCK, UNIT)
        equal = top_k - over
    total = above + equal * (floor.to(tl.float32, bitcast=True) * UNIT).to(tl.int64)
    top_p = tl.load(top_ps + row)
    if top_p < 1.0:
        wanted = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
        lowest = floor
        high = tl.full((), HIGHEST, tl.int32)
        held = total
        while floor < high:  # the highest floor above which lies enough; that of top_k does
            floor, high, held = _narrowed(source, vocab, floor, high, held, wanted, True, BLOCK, UNIT)
        reached, over, above = _at(source, vocab, floor, BLOCK, UNIT)
        each = (floor.to(tl.float32, bitcast=True) * UNIT).to(tl.int64)
        needed = tl.maximum((wanted - above + each - 1) // tl.maximum(each, 1), 1)
        there = tl.where(floor == lowest, equal, reached - over)
        equal = tl.minimum(needed, there.to(tl.int64)).to(tl.int32)
        total = above + equal * each
    point = (tl.load(points + row) * total.to(tl.float64)).to(tl.int64)  # rounded down
    before = tl.full((), 0, tl.int64)
    seen = tl.full((), 0, tl.int32)
    chosen = tl.full((), -1, tl.int32)
    last = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    while (start < vocab) & (chosen < 0):
        token, units, bits = _block(source, start, vocab, BLOCK, UNIT)
        at_floor = (bits == floor).to(tl.int32)
        kept = (bits > floor) | ((at_floor > 0) & (seen + tl.cumsum(at_floor, axis=0) <= equal))
        wide = tl.where(kept, units, 0)
        passed = kept & (before + tl.cumsum(wide, axis=0) > point)
        first = tl.min(tl.where(passed, token, vocab), axis=0)
        chosen = tl.where(first < vocab, first, -1)
        last = tl.maximum(last, tl.max(tl.where(wide > 0, token, 0), axis=0))
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
            BLOCK=BLOCK, HIGHEST=HIGHEST, UNIT=UNIT, num_warps=DRAW_WARPS,
        )  # fmt: skip
    return out
