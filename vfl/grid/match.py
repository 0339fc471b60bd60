"""Which whole number in a spec makes frames as large as they may be, by building frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vfl import compression
from vfl.compression import Moment
from vfl.config import WANTED, Experiment
from vfl.errors import BadOptionError, WidthError
from vfl.frame import HEADER_BYTES
from vfl.seeds import Secret, generator

_LARGEST = 2**22


@dataclass(frozen=True)
class Cut:
    """The cut whose frames are matched.

    Attributes:
        widths: of each feature party's bottom.
        rows: of a training batch.
    """

    widths: tuple[int, ...]
    rows: int

    @classmethod
    def of(cls, experiment: Experiment) -> Cut:
        """The cut of an experiment."""
        widths = tuple(experiment.parties[name].width for name in experiment.feature_parties)
        return cls(widths, experiment.train.batch_rows)

    @property
    def dense_bytes(self) -> int:
        """The batch as plain float32, all parties, without headers."""
        return 4 * self.rows * sum(self.widths)


def frame_bytes(spec: str, cut: Cut, drawn: int = 0) -> int:
    """Bytes of the frames of one training batch, all parties, headers included.

    Args:
        spec: the codec.
        cut: its shape.
        drawn: which random cut.

    Raises:
        SpecError: the codec cannot be built, or does not fit the width.
    """
    moment = Moment(training=True, secret=Secret.of_simulation(0, "match"))
    codecs = [compression.make(spec) for _ in cut.widths]
    for codec, width in zip(codecs, cut.widths, strict=True):
        codec.check(width)
    return sum(
        HEADER_BYTES
        + len(codec.encode(_drawn(codec.wire_width(width), cut.rows, drawn), moment).payload)
        for codec, width in zip(codecs, cut.widths, strict=True)
    )


def follows_data(spec: str, widths: tuple[int, ...]) -> bool:
    """Whether the length of a codec's frames depends on the data, or on what it learned.

    >>> follows_data("topk:k=3,values=8", (128,)), follows_data("l1:target=6", (128,))
    (False, True)
    """
    few = Cut(widths, 8)
    return compression.make(spec).learns or frame_bytes(spec, few) != frame_bytes(spec, few, 1)


def matched(spec: str, level: float, cut: Cut) -> str | None:
    """The spec with the largest number whose frames take at most `level` percent of dense float32.

    Frames grow with the number; a codec for which that is not known beforehand is refused.

    >>> matched("topk:k=?", 2.86, Cut((128,), 256)), matched("size:k=?", 0.5, Cut((128,), 256))
    ('topk:k=3', None)

    Returns:
        None if not even the smallest number fits.

    Raises:
        BadOptionError: the length of its frames does not follow from the number.
        SpecError: the codec cannot be built with any number.
    """
    require_matchable(spec, cut)
    allowed = level / 100 * cut.dense_bytes

    def fits(number: int) -> bool:
        try:
            return frame_bytes(_with(spec, number), cut) <= allowed
        except (BadOptionError, WidthError):
            return False

    number = _last(fits)
    return None if number is None else _with(spec, number)


def require_matchable(spec: str, cut: Cut) -> None:
    """Refuse a codec whose frames depend on data, on what was learned, or not on the number.

    Raises:
        BadOptionError: with the reason.
        SpecError: the codec cannot be built.
    """
    least = _with(spec, 1)
    plain = Cut(cut.widths, min(cut.rows, 8))
    if follows_data(least, cut.widths):
        raise BadOptionError(
            "no number can be looked for here: how long its frames are depends on the data",
            got=spec,
            fix="write the number; the comparison shows the bytes that were really sent",
        )
    try:
        grows = frame_bytes(_with(spec, 2), plain) > frame_bytes(least, plain)
    except WidthError:
        grows = True  # of a cut that is one unit wide
    except BadOptionError:
        grows = False
    if not grows:
        raise BadOptionError(
            "no number can be looked for here: frames do not grow with it",
            got=spec,
            want="an option that fixes how much is sent, such as topk:k=?",
        )


def _with(spec: str, number: int) -> str:
    return spec.replace(WANTED, str(number))


def _last(fits: Callable[[int], bool]) -> int | None:
    """The largest number from 1 on that fits, where all below one that fits do."""
    if not fits(1):
        return None
    low = 1
    while low < _LARGEST and fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _drawn(width: int, rows: int, drawn: int) -> Tensor:
    """A rectified cut; the higher `drawn`, the fewer values are above zero."""
    return (torch.randn(rows, width, generator=generator(drawn, "match")) - drawn).relu()
