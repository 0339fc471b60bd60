"""Values as masked numbers of a ring and back, in one pass each where numba is installed."""

from __future__ import annotations

import numpy as np

from vfl.compression.compiled import COMPILED, compiled

#: Values a pass takes at once where there are several, so that they stay in a core's own cache.
_BLOCK = 16384


def encode_onto(values: np.ndarray, scale: float, most: int, words: np.ndarray) -> bool:
    """Add values times `scale`, rounded to whole numbers, to words that wrap around.

    Args:
        values: float32 of axes (values,).
        scale: a power of two.
        most: the largest magnitude a rounded number may have.
        words: a mask, signed integers of the same axes; changed in place.

    Returns:
        Whether all fit; where one does not, or is NaN, the words are of no use.

    >>> words = np.int8([0, 100, 100])
    >>> encode_onto(np.float32([0.25, -1.5, 7]), 4.0, 28, words), words.tolist()
    (True, [1, 94, -128])
    """
    end = np.float32(most)
    if float(end) > most:  # of whole numbers that large float32 has only some
        end = np.nextafter(end, np.float32(0))
    loop = _encode_pass if COMPILED else _encode_passes
    return bool(loop(values, np.float32(scale), end, words))


def decode_sum(first: np.ndarray, second: np.ndarray, scale: float) -> np.ndarray:
    """The sum of words, which wraps around, times `scale`; float32 of the same axes.

    Args:
        first: signed integers of axes (words,).
        second: likewise, of the same type.
        scale: a power of two.

    >>> decode_sum(np.int8([100, -3]), np.int8([100, 2]), 0.25).tolist()
    [-14.0, -0.25]
    """
    values = np.empty(len(first), np.float32)
    if COMPILED:
        first.flags.writeable = second.flags.writeable = False  # one kind of array, compiled once
        _decode_pass(first, second, 64 - 8 * first.itemsize, np.float32(scale), values)
    else:
        np.copyto(values, first + second, casting="same_kind")
        values *= np.float32(scale)
    return values


@compiled
def _decode_pass(
    first: np.ndarray, second: np.ndarray, above: int, scale: np.float32, values: np.ndarray
) -> None:
    for place in range(len(first)):
        total = ((np.int64(first[place]) + np.int64(second[place])) << above) >> above
        values[place] = np.float32(total) * scale


@compiled
def _encode_pass(values: np.ndarray, scale: np.float32, end: np.float32, words: np.ndarray) -> bool:
    fit = True
    for place in range(len(values)):
        number = np.rint(values[place] * scale)
        if not abs(number) <= end:
            fit = False
        words[place] += np.int32(number)
    return fit


def _encode_passes(
    values: np.ndarray, scale: np.float32, end: np.float32, words: np.ndarray
) -> bool:
    fit = True
    with np.errstate(over="ignore", invalid="ignore"):  # infinity is beyond the ring as well
        for start in range(0, len(values), _BLOCK):
            numbers = values[start : start + _BLOCK] * scale
            np.rint(numbers, out=numbers)
            words[start : start + _BLOCK] += numbers.astype(words.dtype)
            # No magnitude is beyond the root of the sum of squares, which takes a pass less.
            fit = fit and bool(
                float(numbers @ numbers) < 0.99 * float(end) ** 2
                or (-end <= numbers.min() and numbers.max() <= end)
            )
    return fit
