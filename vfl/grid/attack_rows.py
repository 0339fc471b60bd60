"""The table of a grid of attacks: one row for each attack on each victim with each leak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from vfl.config import GridSettings
from vfl.grid.cells import HONEST, GridFolder, failure_of, grid_settings_of
from vfl.grid.scores_file import OF_CELL, Scored, read_scores
from vfl.grid.trials import BASELINES, baselines_of, setting_words
from vfl.storage import read_json
from vfl.text import csv_text


@dataclass(frozen=True)
class Row:
    """One attack on one victim, once.

    Attributes:
        defense: of the victim.
        attack, k, draw, measure, value, guess, threat, seconds: see `Scored`; an adversary's spec
            where the row is about what that itself reached.
        adversary: the victim was trained against; "none" is an honest training.
        seed: of the victim.
        scratch: what the leaked rows are worth without the victim; for clusters, the inputs.
        baselines: by name, on the same leaked rows; `scratch` is one of them.
        test_accuracy: of the victim; None if a party stopped the training.
    """

    defense: str
    attack: str
    adversary: str
    k: int
    seed: int
    draw: int
    measure: str
    value: float
    scratch: float | None
    guess: float
    test_accuracy: float | None
    baselines: Mapping[str, float]
    threat: str
    seconds: float

    @property
    def attacker(self) -> str:
        """The attack, and the adversary that went before it."""
        if self.adversary in (HONEST, self.attack):
            return self.attack
        return f"{self.attack} after {self.adversary}"


def read_rows(folder: GridFolder) -> list[Row]:
    """Every row of the cells that are whole, in the order of the settings.

    What a cell holds of earlier settings is left out, and so is a cell that failed since.

    Raises:
        RunFolderError: a file of a cell is damaged.
    """
    settings = grid_settings_of(folder.experiment())
    asked = {*settings.attack_specs, *settings.trainings}
    setting = setting_words(settings)
    free: dict[int, list[Scored]] = {}
    found: dict[str, list[Row]] = {spec: [] for spec in settings.victims}
    for cell in folder.cells():
        path, seed = folder.cells_path / cell.name, cell.experiment.seed
        scores = [] if failure_of(path) else read_scores(path / OF_CELL, setting)
        if cell.called == BASELINES:
            free[seed] = scores
        elif scores:
            mine = [one for one in scores if one.attack in asked and _is_wanted(one, settings)]
            victim = Of(cell.called, cell.adversary, seed, _accuracy(path))
            found[cell.called] += rows_of(mine, free[seed], settings.baselines, victim)
    return [row for rows in found.values() for row in rows]


@dataclass(frozen=True, slots=True)
class Of:
    """Whose rows they are.

    Attributes:
        defense, adversary, seed, accuracy: of the victim; see `Row`.
    """

    defense: str
    adversary: str
    seed: int
    accuracy: float | None


def rows_of(
    scores: Sequence[Scored], free: Sequence[Scored], baselines: Sequence[str], victim: Of
) -> list[Row]:
    """The rows of one victim, one for each measure.

    Args:
        scores: on its bottom.
        free: without it, on the same leaked rows.
        baselines: names of those that count.
        victim: whose they are.
    """
    known = {one.trial: one.value for one in free}
    found = []
    for one in scores:
        beside = {} if one.of_training else baselines_of(one.trial, baselines)
        values = {name: known[trial] for name, trial in beside.items() if trial in known}
        found.append(_row(victim, one, (one.measure, one.value, one.guess), values))
        found += [_row(victim, one, measured, {}) for measured in one.also]
    return found


def _row(
    victim: Of, one: Scored, measured: tuple[str, float, float], baselines: Mapping[str, float]
) -> Row:
    measure, value, guess = measured
    return Row(
        defense=victim.defense,
        attack=one.attack,
        adversary=victim.adversary,
        k=one.k,
        seed=victim.seed,
        draw=one.draw,
        measure=measure,
        value=value,
        scratch=baselines.get("scratch"),
        guess=guess,
        test_accuracy=victim.accuracy,
        baselines=baselines,
        threat=one.threat,
        seconds=one.seconds,
    )


def _is_wanted(one: Scored, settings: GridSettings) -> bool:
    return one.k in (0, *settings.leaks) and one.draw < settings.draws


def _accuracy(path: Path) -> float | None:
    """Of the victim in a run folder, on test rows."""
    summary = path / "summary.json"
    return float(read_json(summary)["test_accuracy"]) if summary.exists() else None


def to_csv(rows: Sequence[Row]) -> str:
    """One line a row, baselines in columns of their own; what depends on time comes last."""
    names = list(dict.fromkeys(name for row in rows for name in row.baselines))
    scalars = [field.name for field in fields(Row) if field.name not in ("baselines", "seconds")]
    extra = [f"baseline_{name}" for name in names if name != "scratch"]
    told = [
        asdict(row) | {f"baseline_{name}": row.baselines.get(name) for name in names}
        for row in rows
    ]
    return csv_text([*scalars, *extra, "seconds"], told)
