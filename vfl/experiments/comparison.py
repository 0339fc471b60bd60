"""The cells of a comparison: one training per codec, level, variant and repeat.

A codec's spec may contain "?" in place of a number. This module finds the number for each level
(frame size) by encoding random cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vfl import compression
from vfl.compression import Codec, StepContext
from vfl.config import WANTED, CompareSettings, Experiment, Locations, with_overrides
from vfl.config.validate import STUDIES, check_one_label_party
from vfl.core.errors import BadOptionError, ConfigError, UserError, WidthError
from vfl.core.frame import HEADER_BYTES
from vfl.core.seeds import Secret, generator
from vfl.experiments.cells import Cell, settings_of
from vfl.session import Terms, secure_mode
from vfl.session.secure_mode import shared_bottom_error
from vfl.training.specs import check_specs

_LARGEST = 2**22


@dataclass(frozen=True)
class Comparison:
    """Trainings of a `vfl compare` study.

    Attributes:
        cells: cells in the order of training; all cells of one repeat (seed or fold) come before
            the next repeat.
        notes: notes about codecs that were left out, with reasons.
    """

    cells: tuple[Cell, ...]
    notes: tuple[str, ...]


#: One codec of a comparison: the spec in the file (method), the spec with its fitted number
#: (codec), and the frame size in percent of dense float32 (level). The level is empty if no number
#: was fitted.
Choice = Mapping[str, str]


def comparison_of(experiment: Experiment, locations: Locations | None = None) -> Comparison:
    """Return the cells of an experiment with a [compare] table.

    Args:
        experiment: experiment with a [compare] table.
        locations: file and line of each setting, for error messages.

    Raises:
        ConfigError: the experiment has no [compare] table, a variant contains an unknown setting,
            or no codec fits.
        SpecError: no number can be found for a codec's "?", or a codec does not fit a variant's
            width.
    """
    locations = locations or Locations()
    settings = settings_of(experiment)
    plain = experiment.model_copy(update=dict.fromkeys(STUDIES))
    notes: list[str] = []
    choices: dict[str, list[Choice]] = {}
    for variant, overrides in _variants(settings).items():
        with _about(locations, "compare", *(["variants", variant] if variant else [])):
            one = with_overrides(plain, overrides)
            check_specs(one)
            check_one_label_party(one, "a comparison")
            if secure_mode.shares_weights(one):
                raise shared_bottom_error(one.feature_parties[0])
        with _about(locations, "compare", "codecs"):
            choices[variant], left_out = _choices(settings, CutShape.of(one))
            for choice in choices[variant]:
                check_specs(with_codec(one, choice["codec"]))
        notes += [f"{variant}: {note}" if variant else note for note in left_out]
    cells = [
        _cell(with_overrides(plain, [*overrides, *repeat]), choice, variant, repeat)
        for repeat in settings.repeats
        for variant, overrides in _variants(settings).items()
        for choice in choices[variant]
    ]
    if not cells:
        raise ConfigError(
            "no codec fits any level, so nothing would be trained",
            where=f"{locations.before(('compare',))}compare.levels",
            got=", ".join(f"{level:g} %" for level in settings.levels),
            want="a level that is large enough for one number or bit per row",
        )
    return Comparison(tuple(cells), tuple(notes))


def _choices(settings: CompareSettings, cut: CutShape) -> tuple[list[Choice], list[str]]:
    """Return every codec with its fitted numbers, and notes about codecs whose frames fit no level.

    Raises:
        SpecError: see `fitted_spec`.
    """
    found: list[Choice] = []
    notes = []
    for method in settings.codecs:
        if WANTED not in method:
            found.append({"method": method, "codec": method, "level": ""})
            continue
        for level in settings.levels:
            if codec := fitted_spec(method, level, cut):
                found.append({"method": method, "codec": codec, "level": f"{level:g}"})
            else:
                notes.append(f"{method} is left out at {level:g} %: frames are larger even with 1")
    return found, notes


def plan_lines(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield one line per planned training, with the bytes per row of its training frames."""
    yield f"{'bytes a row':>11}  {'of dense':>8}  cell"
    for cell in cells:
        cut, codec = CutShape.of(cell.experiment), cell.experiment.codec
        if length_follows_data(codec, cut):
            yield f"{'as the data':>11}  {'asks':>8}  {cell.title}"
        else:
            sent = frame_bytes(codec, cut)
            yield f"{sent / cut.rows:>11.2f}  {sent / cut.dense_bytes:>8.2%}  {cell.title}"


def _variants(settings: CompareSettings) -> dict[str, tuple[str, ...]]:
    """Return the overrides of each variant; without variants, one variant has an empty name."""
    return settings.variants or {"": ()}


@contextmanager
def _about(locations: Locations, *setting: str) -> Iterator[None]:
    """Add the name of a setting to an error that the block raises."""
    try:
        yield
    except UserError as mistake:
        here = f"{locations.before(setting)}{'.'.join(setting)}"
        mistake.where = f"{here}, {mistake.where}" if mistake.where else here
        raise


def _cell(one: Experiment, choice: Choice, variant: str, repeat: tuple[str, ...]) -> Cell:
    about = {"variant": variant, **choice, "repeat": repeat[-1].removeprefix("data.")}
    level = f"at {choice['level']} %" if choice["level"] else ""
    title = " ".join(filter(None, (variant, choice["codec"], level, about["repeat"])))
    return Cell(with_codec(one, choice["codec"]), title, about)


def with_codec(experiment: Experiment, spec: str) -> Experiment:
    """Return an experiment with another codec."""
    return experiment.model_copy(update={"codec": spec})


@dataclass(frozen=True)
class CutShape:
    """Shape of the cuts whose frame sizes a comparison fits.

    Attributes:
        widths: width of each feature party's bottom model.
        rows: number of rows in a training batch.
        make: function that builds an encoder of cuts from the spec of a codec.
    """

    widths: tuple[int, ...]
    rows: int
    make: Callable[[str], Codec] = compression.make

    @classmethod
    def of(cls, experiment: Experiment) -> CutShape:
        """Return the shape of an experiment's cuts, with its codec or secure mode as encoder."""
        mode, parties = secure_mode.make(experiment.secure), experiment.feature_parties

        def make(spec: str) -> Codec:
            terms = Terms.of(with_codec(experiment, spec), "train", experiment.name)
            return mode.feature_codec(parties[0], terms).unmasked

        widths = tuple(experiment.parties[name].width for name in parties)
        return cls(widths, experiment.train.batch_size, make)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all parties' cuts of one batch as plain float32, without headers."""
        return 4 * self.rows * sum(self.widths)


def frame_bytes(spec: str, cut: CutShape, drawn: int = 0) -> int:
    """Return the bytes of all parties' frames for one training batch, headers included.

    Args:
        spec: the codec.
        cut: shape of the parties' cuts.
        drawn: number that selects the random cut to encode.

    Raises:
        SpecError: the codec cannot be built, or does not support the width.
    """
    context = _matching(0, cut.rows)
    codecs = [cut.make(spec) for _ in cut.widths]
    for codec, width in zip(codecs, cut.widths, strict=True):
        codec.check(width)
    return sum(
        HEADER_BYTES
        + len(codec.encode(_drawn(codec.wire_width(width), cut.rows, drawn), context).payload)
        for codec, width in zip(codecs, cut.widths, strict=True)
    )


def _matching(step: int, rows: int) -> StepContext:
    """Return the step context with which random cuts are encoded."""
    secret = Secret.of_simulation(0, "match")
    return StepContext(step, training=True, secret=secret, rows=np.arange(rows))


def length_follows_data(spec: str, cut: CutShape) -> bool:
    """Return whether the length of a codec's frames depends on data or on learned state.

    >>> cut = CutShape((128,), rows=256)
    >>> [length_follows_data(spec, cut) for spec in ("topk:k=3,values=8", "l1:target=6")]
    [False, True]
    """
    width = cut.widths[0]
    lengths, codec = set(), cut.make(spec)
    for step in range(3):  # these frame lengths depend on learned state
        drawn = _drawn(codec.wire_width(width), 8, step)
        lengths.add(len(codec.encode(drawn, _matching(step, 8)).payload))
        codec.commit(step)
    return len(lengths) > 1


def fitted_spec(spec: str, level: float, cut: CutShape) -> str | None:
    """Return the spec with the largest number whose frames need at most `level` % of dense float32.

    Frames must grow with the number; the function rejects a codec for which this growth is not
    certain.

    >>> shape = CutShape((128,), 256)
    >>> fitted_spec("topk:k=?", 2.86, shape), fitted_spec("size:k=?", 0.5, shape)
    ('topk:k=3', None)

    Returns:
        The result is None if even the smallest number gives larger frames.

    Raises:
        BadOptionError: the length of the codec's frames does not depend on this number alone.
        SpecError: the codec cannot be built with any number.
    """
    _require_matchable(spec, cut)
    allowed = level / 100 * cut.dense_bytes

    def fits(number: int) -> bool:
        try:
            return frame_bytes(_with(spec, number), cut) <= allowed
        except (BadOptionError, WidthError):
            return False

    number = _last(fits)
    return None if number is None else _with(spec, number)


def _require_matchable(spec: str, cut: CutShape) -> None:
    """Reject a codec whose frame length depends on data or state, or does not depend on the number.

    Raises:
        BadOptionError: no number can be found for the codec's "?"; the error states the reason.
        SpecError: the codec cannot be built.
    """
    least = _with(spec, 1)
    plain = replace(cut, rows=min(cut.rows, 8))
    if length_follows_data(least, cut):
        raise BadOptionError(
            "no number can be found for ?, because the length of frames depends on the data",
            got=spec,
            fix="write the number yourself; the comparison shows the bytes that were sent",
        )
    try:
        grows = frame_bytes(_with(spec, 2), plain) > frame_bytes(least, plain)
    except WidthError:
        grows = True  # the codec is tried on a cut of width 1
    except BadOptionError:
        grows = False
    if not grows:
        raise BadOptionError(
            "no number can be found for ?, because a larger number gives no longer frames",
            got=spec,
            want="an option that determines the number of sent bytes, such as topk:k=?",
        )


def _with(spec: str, number: int) -> str:
    return spec.replace(WANTED, str(number))


def _last(fits: Callable[[int], bool]) -> int | None:
    """Return the largest integer from 1 on that `fits`, if all smaller integers fit as well."""
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
    """Return a random cut after a ReLU; a higher number `drawn` gives fewer positive values."""
    return (torch.randn(rows, width, generator=generator(drawn, "match")) - drawn).relu()
