"""The cells of a comparison: every codec, at every level, under every variant, once a repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from vfl.config import WANTED, CompareSettings, Experiment, Places, with_overrides
from vfl.errors import ConfigError, UserError
from vfl.exchange.exposure import shares_weights
from vfl.exchange.shared_exposure import nobodys_bottom
from vfl.grid.cells import Cell, settings_of
from vfl.grid.match import Cut, follows_data, frame_bytes, matched
from vfl.specs import check_specs


@dataclass(frozen=True)
class Comparison:
    """What `vfl compare` trains.

    Attributes:
        cells: in the order they are trained, so that one repeat is whole before the next begins.
        notes: what was left out, and why.
    """

    cells: tuple[Cell, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One codec of a comparison.

    Attributes:
        method: as the file says it.
        codec: with the number that was looked for.
        level: percent of dense float32 it was matched at; empty where nothing was.
    """

    method: str
    codec: str
    level: str


def comparison_of(experiment: Experiment, places: Places | None = None) -> Comparison:
    """The cells of an experiment with a `compare` table.

    Args:
        experiment: what is trained.
        places: where its settings stand, for messages.

    Raises:
        ConfigError: there is no such table, a variant is no setting, or nothing fits.
        SpecError: a codec cannot be matched, or does not fit a variant.
    """
    places = places or Places()
    settings = settings_of(experiment)
    plain = experiment.model_copy(update={"compare": None, "grid": None})
    notes: list[str] = []
    choices: dict[str, list[Choice]] = {}
    for variant, overrides in _variants(settings).items():
        with _about(places, "compare", *(["variants", variant] if variant else [])):
            one = with_overrides(plain, overrides)
            check_specs(one)
            if shares_weights(one):
                raise nobodys_bottom(one.feature_parties[0])
        with _about(places, "compare", "codecs"):
            choices[variant], left_out = choices_of(settings, Cut.of(one))
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
            where=f"{places.before(('compare',))}compare.levels",
            got=", ".join(f"{level:g} %" for level in settings.levels),
            want="a level in which one number or bit of a row fits",
        )
    return Comparison(tuple(cells), tuple(notes))


def choices_of(settings: CompareSettings, cut: Cut) -> tuple[list[Choice], list[str]]:
    """Every codec with the numbers that were looked for, and what does not fit any level.

    Raises:
        SpecError: see `vfl.grid.match.matched`.
    """
    found, notes = [], []
    for method in settings.codecs:
        if WANTED not in method:
            found.append(Choice(method, method, ""))
            continue
        for level in settings.levels:
            if codec := matched(method, level, cut):
                found.append(Choice(method, codec, f"{level:g}"))
            else:
                notes.append(f"{method} is left out at {level:g} %: not even 1 fits")
    return found, notes


def plan_lines(cells: Sequence[Cell]) -> Iterator[str]:
    """What would be trained, a line each, with the bytes a row of its training frames."""
    yield f"{'bytes a row':>11}  {'of dense':>8}  cell"
    for cell in cells:
        cut, codec = Cut.of(cell.experiment), cell.experiment.codec
        if follows_data(codec, cut.widths):
            yield f"{'as the data':>11}  {'asks':>8}  {cell.title}"
        else:
            sent = frame_bytes(codec, cut)
            yield f"{sent / cut.rows:>11.2f}  {sent / cut.dense_bytes:>8.2%}  {cell.title}"


def _variants(settings: CompareSettings) -> dict[str, tuple[str, ...]]:
    """Overrides by variant; a single one without a name where none was asked for."""
    return settings.variants or {"": ()}


@contextmanager
def _about(places: Places, *setting: str) -> Iterator[None]:
    """Say of a mistake in which setting of the table it is."""
    try:
        yield
    except UserError as mistake:
        here = f"{places.before(setting)}{'.'.join(setting)}"
        mistake.where = f"{here}, {mistake.where}" if mistake.where else here
        raise


def _cell(one: Experiment, choice: Choice, variant: str, repeat: tuple[str, ...]) -> Cell:
    about = {
        "variant": variant,
        "method": choice.method,
        "codec": choice.codec,
        "level": choice.level,
        "repeat": repeat[-1].removeprefix("data."),
    }
    level = f"at {choice.level} %" if choice.level else ""
    title = " ".join(filter(None, (variant, choice.codec, level, about["repeat"])))
    return Cell(one.model_copy(update={"codec": choice.codec}), title, about)
