"""Where ticks go, and which points of a long curve are worth drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]


def tick_step(low: float, high: float, intervals: int = 5, whole: bool = False) -> float:
    """The round step, 1, 2 or 5 times a power of ten, that cuts a range into about `intervals`.

    >>> tick_step(0.0, 1.0), tick_step(1, 20, whole=True), tick_step(1, 3, whole=True)
    (0.2, 5.0, 1.0)

    Args:
        low: where the range begins.
        high: where it ends, above `low`.
        intervals: as many or fewer.
        whole: never below 1.
    """
    rough = (high - low) / intervals
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return max(1.0, step) if whole else step


def ticks_inside(low: float, high: float, step: float) -> list[float]:
    """The multiples of `step` from low to high.

    >>> ticks_inside(1, 20, 5)
    [5, 10, 15, 20]
    """
    slack = 1e-9
    first, last = math.ceil(low / step - slack), math.floor(high / step + slack)
    return [step * position for position in range(first, last + 1)]


def enclosing(low: float, high: float, step: float) -> tuple[float, float]:
    """The nearest multiples of `step` around a range.

    >>> enclosing(0.3, 1.7, 0.5)
    (0.0, 2.0)
    """
    slack = 1e-9
    return step * math.floor(low / step + slack), step * math.ceil(high / step - slack)


def widened(low: float, high: float, least: float = 1e-6) -> tuple[float, float]:
    """A range that is not empty: a single value gets room on both sides.

    >>> widened(2.0, 2.0), widened(0.0, 0.0)
    ((1.0, 3.0), (-0.5, 0.5))
    """
    if high - low > least * max(abs(low), abs(high)):
        return low, high
    room = abs(high) / 2 or 0.5
    return low - room, high + room


def powers(low: float, high: float) -> list[float]:
    """Round values for an axis of logarithms: powers of ten, with 2 and 5 times where few.

    >>> powers(800, 30_000), powers(1, 1e6)
    ([1000, 2000, 5000, 10000, 20000], [1, 10, 100, 1000, 10000, 100000, 1000000])

    Args:
        low: where the range begins, above 0.
        high: where it ends.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    found = [factor * 10**power for power in range(first, last + 1) for factor in factors]
    return [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def tick_text(value: float, step: float) -> str:
    """A tick with the decimals its step needs.

    >>> tick_text(0.6000000000000001, 0.2), tick_text(20, 5), tick_text(3e7, 1e7)
    ('0.6', '20', '3e+07')
    """
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals > 4 or abs(value) >= 1e5:
        return f"{value:.3g}"
    text = f"{value:.{decimals}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def thinned(points: Sequence[Point], most: int = 200) -> list[Point]:
    """At most `most` points, peaks and valleys kept: the least and the greatest of each stretch.

    >>> thinned([(0, 5), (1, 9), (2, 1), (3, 4), (4, 4), (5, 3), (6, 8), (7, 2)], most=4)
    [(1, 9), (2, 1), (6, 8), (7, 2)]
    """
    if len(points) <= most:
        return list(points)
    stretches = most // 2
    kept: list[Point] = []
    for number in range(stretches):
        start, stop = (len(points) * n // stretches for n in (number, number + 1))
        stretch = points[start:stop]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept
