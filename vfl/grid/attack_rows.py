"""The table of a grid of attacks: one row for each attack on each victim with each leak."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from vfl.grid.cells import GridFolder, grid_settings_of
from vfl.grid.scores_file import OF_CELL, Scored, read_scores
from vfl.grid.trials import BASELINES, baselines_of, setting_words
from vfl.storage import read_json


@dataclass(frozen=True)
class Row:
    """One attack on one victim, once.

    Attributes:
        defense: of the victim.
        attack, k, draw, measure, value, guess, threat, seconds: see `Scored`.
        seed: of the victim.
        scratch: what the leaked rows are worth without the victim; for clusters, the inputs.
        baselines: by name, on the same leaked rows; `scratch` is one of them.
        test_accuracy: of the victim.
    """

    defense: str
    attack: str
    k: int
    seed: int
    draw: int
    measure: str
    value: float
    scratch: float | None
    guess: float
    test_accuracy: float
    baselines: Mapping[str, float]
    threat: str
    seconds: float


def read_rows(folder: GridFolder) -> list[Row]:
    """Every row of the cells that are whole, in the order of the settings.

    Raises:
        RunFolderError: a file of a cell is damaged.
    """
    settings = grid_settings_of(folder.experiment())
    asked, setting = set(settings.attack_specs), setting_words(settings)
    free: dict[int, list[Scored]] = {}
    found: dict[str, list[Row]] = {spec: [] for spec in settings.victims}
    for cell in folder.cells():
        path, seed = folder.cells_path / cell.name, cell.experiment.seed
        scores = read_scores(path / OF_CELL, setting)
        if cell.called == BASELINES:
            free[seed] = scores
        elif scores:
            mine = [one for one in scores if one.attack in asked]
            accuracy = read_json(path / "summary.json")["test_accuracy"]
            found[cell.called] += rows_of(
                mine, free[seed], settings.baselines, cell.called, seed, accuracy
            )
    return [row for rows in found.values() for row in rows]


def rows_of(
    scores: Sequence[Scored],
    free: Sequence[Scored],
    baselines: Sequence[str],
    defense: str,
    seed: int,
    accuracy: float,
) -> list[Row]:
    """The rows of one victim.

    Args:
        scores: on its bottom.
        free: without it, on the same leaked rows.
        baselines: names of those that count.
        defense: of the victim.
        seed: of the victim.
        accuracy: of the victim, on test rows.
    """
    known = {one.trial: one.value for one in free}
    found = []
    for one in scores:
        beside = baselines_of(one.trial, baselines).items()
        values = {name: known[trial] for name, trial in beside if trial in known}
        found.append(_row(defense, seed, one, values, accuracy))
    return found


def _row(
    defense: str, seed: int, one: Scored, baselines: Mapping[str, float], accuracy: float
) -> Row:
    return Row(
        defense=defense,
        attack=one.attack,
        k=one.k,
        seed=seed,
        draw=one.draw,
        measure=one.measure,
        value=one.value,
        scratch=baselines.get("scratch"),
        guess=one.guess,
        test_accuracy=accuracy,
        baselines=baselines,
        threat=one.threat,
        seconds=one.seconds,
    )


def to_csv(rows: Sequence[Row]) -> str:
    """One line a row, baselines in columns of their own; what depends on time comes last."""
    names = list(dict.fromkeys(name for row in rows for name in row.baselines))
    scalars = [field.name for field in fields(Row) if field.name not in ("baselines", "seconds")]
    extra = [f"baseline_{name}" for name in names if name != "scratch"]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*scalars, *extra, "seconds"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        told = {f"baseline_{name}": row.baselines.get(name) for name in names if name != "scratch"}
        about = asdict(row)
        del about["baselines"]
        writer.writerow(about | told)
    return text.getvalue()
