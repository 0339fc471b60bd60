"""One table of results, whatever was measured: a row is one measure of one training, once.

What an evaluator measures is a measure beside others: "quality" of answers for the test rows,
"cost" of the training, "codec" on the cut of the test rows, and what each "attack" reached. Each
value has the guess and the best value without the model beside it, where there is such a thing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vfl.config.run_folder import RunFolder
from vfl.core.storage import read_json, write_text
from vfl.core.text import csv_text
from vfl.experiments.attack_results import read_rows, read_run_rows
from vfl.experiments.cells import CODEC, HONEST, Cell, GridFolder, is_grid, settings_of
from vfl.experiments.comparison_results import read_results
from vfl.experiments.scores import BASELINES, Row

if TYPE_CHECKING:
    import pandas as pd

RESULTS = "results.csv"
#: Figures of a whole training, by the key of its summary.
_COSTS = ("seconds", "steps_per_second", "formula_ratio", "wire_ratio_up", "wire_ratio_down")


@dataclass(frozen=True, slots=True)
class Record:
    """One row of the table.

    Attributes:
        training: what was trained, whatever its seed.
        cell: its run folder.
        codec, defense, secure, adversary: what protects it, or bends it.
        repeat: its seed, or its fold.
        evaluator: what measured it.
        subject: the attack, the party or the rows it is about.
        k, draw: leaked labels of each class, and which draw of them; 0 of what needs none.
        measure, value: what was measured.
        guess: the best value without any evidence; None where there is none.
        no_model: the best value without the model; None where there is none.
        seconds: it took; of an attack.
    """

    training: str
    cell: str
    codec: str
    defense: str
    secure: str
    adversary: str
    repeat: str
    evaluator: Literal["quality", "cost", "codec", "attack"]
    subject: str
    k: int
    draw: int
    measure: str
    value: float
    guess: float | None = None
    no_model: float | None = None
    seconds: float | None = None


def records_of(path: Path) -> Iterator[Record]:
    """The rows of a run, a comparison, a grid or a value, as far as they are known.

    Raises:
        RunFolderError: there is none in this folder, or a file is damaged.
    """
    if not is_grid(path):
        run = RunFolder.open(path)
        experiment = run.experiment()
        about = _about(Cell(experiment, experiment.name, {}), path.name)
        yield from _measured(about, path)
        yield from (_attacked(about, row) for row in read_run_rows(path))
        return
    folder = GridFolder(path)
    by_victim: dict[tuple[str, str, int], dict[str, Any]] = {}
    for cell in folder.cells():
        about = _about(cell, cell.name)
        by_victim[cell.victim, cell.adversary, cell.experiment.seed] = about
        if cell.victim != BASELINES:
            yield from _measured(about, folder.cells_path / cell.name)
    if folder.kind == "codecs":
        yield from _reached(folder)
    if folder.kind == "attacks":
        for row in read_rows(folder):
            yield _attacked(by_victim[row.defense, row.adversary, row.seed], row)


def frame_of(path: Path) -> pd.DataFrame:
    """The same as a table of pandas."""
    import pandas as pd

    return pd.DataFrame([asdict(one) for one in records_of(path)])


def write_records(path: Path) -> None:
    """Write `results.csv` into a grid's folder."""
    names = [one.name for one in fields(Record)]
    write_text(path / RESULTS, csv_text(names, [asdict(one) for one in records_of(path)]))


def _about(cell: Cell, name: str) -> dict[str, Any]:
    one = cell.experiment
    repeat = cell.about.get("repeat") or cell.about.get("seed") or str(one.seed)
    again = (f"seed={one.seed}", repeat)
    training = " ".join(word for word in cell.title.split() if word not in again)
    return {
        "training": training,
        "cell": name,
        "codec": one.codec,
        "defense": one.defense,
        "secure": one.secure,
        "adversary": cell.adversary,
        "repeat": repeat.removeprefix("seed="),
    }


def _measured(about: dict[str, Any], path: Path) -> Iterator[Record]:
    """What a training's summary says, and what its codec makes of the cut of the test rows."""
    if not (path / "summary.json").exists():
        return
    summary = RunFolder(path).summary()
    guess = {f"test_{name}": value for name, value in (summary.get("guess") or {}).items()}

    def record(evaluator: Any, subject: str, measure: str, value: Any) -> Iterator[Record]:
        if isinstance(value, int | float) and math.isfinite(value):
            beside = guess.get(measure) if evaluator == "quality" else None
            name = measure.removeprefix("test_")
            yield Record(
                **about, evaluator=evaluator, subject=subject, k=0, draw=0, measure=name,
                value=float(value), guess=beside,
            )  # fmt: skip

    for name, value in summary.items():
        if name.startswith("test_"):
            yield from record("quality", "test rows", name, value)
    for way in ("bytes_up", "bytes_down"):
        for party, sent in summary.get(way, {}).items():
            yield from record("cost", party, way, sent)
    for name in _COSTS:
        yield from record("cost", "training", name, summary.get(name))
    codec = read_json(path / CODEC) if (path / CODEC).exists() else {}
    for name, value in codec.get("train", {}).items():
        yield from record("quality", "training rows", name, value)
    for party, figures in codec.get("parties", {}).items():
        for name, value in figures.items():
            yield from record("codec", party, name, value)


def _reached(folder: GridFolder) -> Iterator[Record]:
    """Bytes until the accuracies that a comparison asks for; no row where one never was."""
    asked = settings_of(folder.experiment()).accuracy
    for cell, result in zip(folder.cells(), read_results(folder), strict=True):
        reached = result.measured.reached if result.measured is not None else ()
        for least, sent in zip(asked, reached, strict=False):
            if sent is not None:
                yield Record(
                    **_about(cell, cell.name), evaluator="cost", subject="training", k=0, draw=0,
                    measure=f"bytes_to_{least:g}", value=sent,
                )  # fmt: skip


def _attacked(about: dict[str, Any], row: Row) -> Record:
    if row.adversary != HONEST:
        about = about | {"adversary": row.adversary}
    return Record(
        **about, evaluator="attack", subject=row.attack, k=row.k, draw=row.draw,
        measure=row.measure, value=row.value, guess=row.guess, no_model=row.no_model,
        seconds=row.seconds,
    )  # fmt: skip
