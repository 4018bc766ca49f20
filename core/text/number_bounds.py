"""What a schema says of one number, exact: written so that llguidance, which decides in float64, decides as decimals
do. Control code: no torch.

llguidance looks for a multiple within two bounds in float64, where 3 times 0.1 is not 0.3; it takes for a step what
tenfold multiplications make of it, and lets an excluded whole number pass where the other bound is less than one away.
What cannot be written so that this changes nothing is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeGuard

from .schema_words import DIGITS

LARGEST_STEP = (1 << 32) - 1
"""llguidance's, as a whole number once the decimal point is gone."""


class NumberFault(ValueError):
    """What the schema says of numbers is no schema, or cannot be decided; the message says which."""


class Unsupported(NumberFault):
    """It can be obeyed, but not here."""


@dataclass(frozen=True)
class Bound:
    value: Fraction
    excluded: bool

    @property
    def is_whole(self) -> bool:
        return self.value.denominator == 1


@dataclass(frozen=True)
class Numbers:
    """What is said of a number; without arguments nothing."""

    low: Bound | None = None
    high: Bound | None = None
    step: Fraction | None = None
    whole: bool = False

    @classmethod
    def said(cls, word: str, value: Fraction) -> Numbers:
        """What a keyword of `BOUNDS` says. Raises `NumberFault`."""
        if word == "multipleOf":
            if value <= 0:
                raise NumberFault("the schema's keyword 'multipleOf' must be above 0")
            return cls(step=value)
        bound = Bound(value, word.startswith("exclusive"))
        return cls(low=bound) if word.endswith("inimum") else cls(high=bound)

    @property
    def words(self) -> set[str]:
        """The keywords that say it."""
        low, high = self.low, self.high
        return {
            *(["multipleOf"] if self.step is not None else []),
            *(["exclusiveMinimum" if low.excluded else "minimum"] if low is not None else []),
            *(["exclusiveMaximum" if high.excluded else "maximum"] if high is not None else []),
        }

    def __and__(self, other: Numbers) -> Numbers:
        lows = [bound for bound in (self.low, other.low) if bound is not None]
        highs = [bound for bound in (self.high, other.high) if bound is not None]
        return Numbers(
            max(lows, key=lambda bound: (bound.value, bound.excluded), default=None),
            min(highs, key=lambda bound: (bound.value, not bound.excluded), default=None),
            _joined(self.step, other.step),
            self.whole or other.whole,
        )

    def allow(self, value: Fraction) -> bool:
        """Whether it may be `value`, whole or not."""
        low, high = self.low, self.high
        return (
            (low is None or value > low.value or (value == low.value and not low.excluded))
            and (high is None or value < high.value or (value == high.value and not high.excluded))
            and (self.step is None or (value / self.step).denominator == 1)
        )

    def keywords(self) -> dict[str, int | float]:
        """What llguidance is to be told. Raises `Unsupported`."""
        low, high, step = self.low, self.high, self.step
        if step is not None and self.whole:
            step = _joined(step, Fraction(1))
        if low is not None and high is not None and self._has_room(low, high):
            if not self.whole:
                low, high = _without_whole_ends(low, high)
            if step is not None:
                first, last = _multiples(low, high, step)
                only = _as_written(Bound(first * step, False))
                if first == last and only.value == first * step:
                    low, high, step = only, only, None
                else:
                    low, high = _surely_decided(low, high, step)
        if step is not None:
            _check_readable(step)
        result = {} if step is None else {"multipleOf": _number(step)}
        if low is not None:
            result["exclusiveMinimum" if low.excluded else "minimum"] = _number(low.value)
        if high is not None:
            result["exclusiveMaximum" if high.excluded else "maximum"] = _number(high.value)
        return result

    @staticmethod
    def _has_room(low: Bound, high: Bound) -> bool:
        """Between the bounds alone; where there is none llguidance says so rightly."""
        return low.value < high.value or (low.value == high.value and not (low.excluded or high.excluded))


NOTHING_SAID = Numbers()


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def exact(value: float) -> Fraction:
    """The decimal that a number is written as."""
    return Fraction(value) if isinstance(value, int) else Fraction(float.__repr__(value))


def _number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)


def _joined(one: Fraction | None, other: Fraction | None) -> Fraction | None:
    """What is a multiple of both is a multiple of this."""
    if one is None or other is None:
        return other if one is None else one
    return Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))


def _check_readable(step: Fraction) -> None:
    """Raises `Unsupported` where llguidance would take the step for another one."""
    value, tens = float(step), 0  # OverflowError where nothing holds it
    while value % 1:
        value, tens = value * 10, tens + 1
    if value > LARGEST_STEP or Fraction(int(value), 10**tens) != step:
        raise Unsupported(
            f"the schema's 'multipleOf' {float(step):g} is not supported: the grammar library cannot express it"
        )


def _surely_decided(low: Bound, high: Bound, step: Fraction) -> tuple[Bound, Bound]:
    """The bounds, or others around the same multiples, between which llguidance finds one where there is one, and
    none where there is none. Raises `Unsupported`."""
    first, last = multiples = _multiples(low, high, step)
    unit, half = Fraction(1, 10 ** _decimals(step)), step / 2
    if first <= last:
        # The farther one from 0 has no more decimals than the multiples: with more they would need more, too.
        below, above = Bound(first * step - unit, True), Bound(last * step + unit, True)
        around = [
            (
                below if first < 0 else Bound(first * step - half, False),
                above if last >= 0 else Bound(last * step + half, False),
            ),
            (Bound(first * step - half, False), Bound(last * step + half, False)),
        ]
    else:
        around = [(Bound(last * step + half / 2, False), Bound(first * step - half / 2, False))]
    for bounds in [(low, high), *around]:
        lower, upper = map(_as_written, bounds)
        if _multiples(lower, upper, step) == multiples and _is_found(lower, upper, step) == (first <= last):
            return lower, upper
    raise Unsupported(
        f"the schema's 'multipleOf' {float(step):g} is not supported between bounds so many steps from 0"
    )


def _multiples(low: Bound, high: Bound, step: Fraction) -> tuple[int, int]:
    """The first and the last one between the bounds, in steps; there is none where the first is the greater one."""
    first, last = math.ceil(low.value / step), math.floor(high.value / step)
    first += low.excluded and first * step == low.value
    last -= high.excluded and last * step == high.value
    return first, last


def _is_found(low: Bound, high: Bound, step: Fraction) -> bool:
    """Whether llguidance, in float64, finds a multiple between the bounds."""
    size, least, most = float(step), float(low.value), float(high.value)
    first, last = math.ceil(least / size) * size, math.floor(most / size) * size
    first += size if low.excluded and first == least else 0
    last -= size if high.excluded and last == most else 0
    return first <= last


def _as_written(bound: Bound) -> Bound:
    """With the value that its float64 is written as."""
    return Bound(exact(_number(bound.value)), bound.excluded)


def _decimals(value: Fraction) -> int:
    """Behind the point."""
    return next(digits for digits in range(400) if (value * 10**digits).denominator == 1)


def _without_whole_ends(low: Bound, high: Bound) -> tuple[Bound, Bound]:
    """The bounds, but as little as can be written inside them where they exclude a whole number and both lie within
    one unit: llguidance lets it pass there if it is the one next to 0. Raises `Unsupported`."""
    gap = high.value - low.value
    if gap >= 1:
        return low, high
    if low.excluded and low.is_whole and low.value >= 0:
        return Bound(low.value + _hair(low.value, gap), False), high
    if high.excluded and high.is_whole and high.value <= 0:
        return low, Bound(high.value - _hair(high.value, gap), False)
    return low, high


def _hair(whole: Fraction, gap: Fraction) -> Fraction:
    """A millionth of a gap beside a whole number, or what of it float64 tells from 0."""
    finest = len(str(abs(whole))) - DIGITS if whole else -math.inf
    hair = Fraction(10) ** int(max(math.floor(math.log10(gap)) - 6, finest))
    if hair >= gap or not float(hair):
        raise Unsupported("the schema's bounds are not supported for numbers of so many digits")
    return hair
