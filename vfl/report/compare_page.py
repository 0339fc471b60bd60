"""The page of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vfl.config import CompareSettings
from vfl.grid import GridFolder, Group, grouped, read_results, settings_of
from vfl.grid.cells import CONFIG
from vfl.grid.table import Column, tables, unfinished
from vfl.report.compare_alpha import alpha_drawings
from vfl.report.compare_curves import curves
from vfl.report.compare_frontier import frontiers
from vfl.report.parts import Drawing, Table
from vfl.report.units import date_text, list_text


@dataclass(frozen=True, slots=True)
class ComparisonPage:
    """Everything the template prints."""

    name: str
    meta: str
    sentence: str
    notes: Sequence[str]
    best: Sequence[Drawing]
    quality: Table
    work: Table
    drawings: Sequence[Drawing]
    command: str
    config_text: str


def comparison_page(folder: GridFolder) -> ComparisonPage:
    """The page of a comparison, from what its cells hold.

    Raises:
        RunFolderError: a file of it is damaged.
    """
    experiment = folder.experiment()
    settings = settings_of(experiment)
    results = read_results(folder)
    groups = grouped(results, settings.reference)
    drawn = [*curves(groups, settings.measure), *alpha_drawings(groups, settings.measure)]
    whole = sum(one.measured is not None for one in results)
    meta = (date_text(folder.words("created")), f"{whole} trainings", f"vfl {folder.words('vfl')}")
    quality, work = (_table(columns, groups) for columns in tables(settings, groups))
    return ComparisonPage(
        name=experiment.name,
        meta=" · ".join(meta),
        sentence=_sentence(settings, groups),
        notes=[*folder.words("notes"), *unfinished(results)],
        best=list(frontiers(groups, settings.measure)),
        quality=quality,
        work=work,
        drawings=drawn,
        command=folder.words("command"),
        config_text=(folder.path / CONFIG).read_text(encoding="utf-8").strip(),
    )


def _table(columns: Sequence[Column], groups: Sequence[Group]) -> Table:
    return Table(
        head=[column.name for column in columns],
        rows=[[column.write(group) for column in columns] for group in groups],
        words=1 + any(group.variant for group in groups),
    )


def _sentence(settings: CompareSettings, groups: Sequence[Group]) -> str:
    methods = len({group.method for group in groups})
    repeats = len(settings.repeats)
    times = f"{repeats} {'folds' if settings.folds else 'seeds'}" if repeats > 1 else "one seed"
    levels = list_text(tuple(f"{level:g} %" for level in settings.levels), shown=8)
    matched = (
        f" The number behind each ? is the largest whose training frames take at most {levels} of "
        "dense float32 on the way to the label party."
        if levels
        else ""
    )
    return f"{methods} codecs, each trained on {times}.{matched}"
