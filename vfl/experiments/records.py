"""One table of results, whatever was measured: a record is one measure of one training, once.

What an evaluator measures is a measure beside others: "quality" of answers, "cost" of the training,
"codec" on the cut of the test rows, and what each "attack" reached. Each value has the guess and
the best value without the model beside it, where there is such a thing. Tables, pages, plots and
notebooks are made from this table and from nothing else, but for curves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vfl.config import GridSettings
from vfl.config.run_folder import RunFolder
from vfl.core.errors import UserError
from vfl.core.storage import read_json, read_lines, write_text
from vfl.core.text import csv_text
from vfl.experiments.cells import (
    CODEC,
    HONEST,
    Cell,
    GridFolder,
    failure_of,
    grid_settings_of,
    is_grid,
    settings_of,
)
from vfl.experiments.scores import (
    BASELINES,
    OF_CELL,
    OF_OUTSIDE,
    OF_RUN,
    TRAINED,
    Attacker,
    AttackJob,
    ScoreRecord,
    baselines_of,
    read_attackers,
    read_codes,
    read_scores,
    setting_text,
)
from vfl.experiments.staleness import CODE, UNKNOWN, stale_cells

if TYPE_CHECKING:
    import pandas as pd

RESULTS = "results.csv"
#: Measures of which less is better.
LOWER_IS_BETTER = frozenset({"loss", "log_loss", "rmse", "mae"})
#: A class with a larger share makes accuracy a poor measure: who names it always is right so often.
IMBALANCED = 0.65
#: Subjects that are no party and no attack.
TEST, TRAIN, TRAINING, ALL = "test rows", "training rows", "training", "all parties"
#: Figures of a whole training, by the key of its summary.
_COSTS = (
    "seconds", "steps_per_second", "formula_ratio", "wire_ratio", "wire_ratio_up", "wire_ratio_down"
)  # fmt: skip
#: Of a cell's codec, those that parties add up to.
_SUMS = ("encode_ms", "decode_ms", "nonzeros", "dead_units")


@dataclass(frozen=True)
class Record:
    """One row of the table.

    Attributes:
        training: what was trained, whatever its seed and whoever tampered with it.
        cell: its run folder.
        codec, defense, secure: what protects it.
        adversary: spec of the one it was trained against; "none" is an honest training.
        repeat: its seed, or its fold.
        evaluator: what measured it.
        subject: the attack, the party or the rows it is about; an adversary's spec where the record
            is about what that itself reached.
        k, draw: leaked labels of each class, and which draw of them; 0 of what needs none.
        measure, value: what was measured.
        guess: the best value without any evidence; None where there is none.
        seconds: it took; of an attack.
        baselines: values without the model, on the same leaked rows, by name; "scratch" is what
            the leaked rows are worth alone, of clusters the inputs.
        threat: who the attacker was and what it held, in one sentence.
        access: how near to the model it stood; see `vfl.attacks.view.Access`.
        author, date: of an attack from outside, see `vfl.experiments.outside`; else empty.
        report: how the attack came to its guess, see `vfl.attacks.Attack.last_report`; beside the
            headline of its measures only.
        stale: why it is no figure of today's rows and code, see `staleness`; empty of one that is.
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
    measure: str
    value: float
    k: int = 0
    draw: int = 0
    guess: float | None = None
    seconds: float | None = None
    baselines: Mapping[str, float] = field(default_factory=dict)
    threat: str = ""
    access: str = ""
    author: str = ""
    date: str = ""
    report: Mapping[str, Any] | None = None
    stale: str = ""

    @property
    def no_model(self) -> float | None:
        """The best value without the model; None where there is none."""
        best = min if self.measure in LOWER_IS_BETTER else max
        return best(self.baselines.values(), default=None)

    @property
    def attacker(self) -> str:
        """The attack, who wrote it if it is from outside, and the adversary before it."""
        own = f"{self.subject} ({self.author}, {self.date})" if self.author else self.subject
        return own if self.adversary in (HONEST, self.subject) else f"{own} after {self.adversary}"

    def row(self) -> dict[str, Any]:
        """As a line of `results.csv`; of baselines the best."""
        return {name: getattr(self, name) for name in COLUMNS}

    def as_json(self) -> dict[str, Any]:
        """All that is known, and the best of the baselines."""
        return asdict(self) | {"no_model": self.no_model}


#: Of `results.csv`, and of the table of pandas.
COLUMNS = [one.name for one in fields(Record) if one.name not in ("baselines", "threat", "report")]
COLUMNS.insert(COLUMNS.index("seconds"), "no_model")


def fitting_quality(guess: Mapping[str, float]) -> str:
    """The measure that fits a task, by the `guess` of a summary.

    >>> fitting_quality({"classes": 2, "accuracy": 0.88}), fitting_quality({"classes": 10})
    ('auc', 'accuracy')
    """
    if "rmse" in guess:
        return "rmse"
    uneven = guess.get("classes") == 2 or guess.get("accuracy", 0) > IMBALANCED
    return "auc" if uneven else "accuracy"


def compared_measure(folder: GridFolder) -> str:
    """What a comparison is about: the measure that is asked for, or that fits its first run."""
    if (asked := settings_of(folder.experiment()).measure) is not None:
        return asked
    for cell in folder.cells():
        path = folder.cells_path / cell.name
        if (path / "summary.json").exists():
            return fitting_quality(RunFolder(path).summary().get("guess") or {})
    return "accuracy"


def records_of(path: Path) -> Iterator[Record]:
    """The rows of a run, a comparison, a grid or a value, as far as they are known.

    Raises:
        RunFolderError: there is none in this folder, or a file is damaged.
    """
    if not is_grid(path):
        run = RunFolder.open(path)
        about = _about(Cell(run.experiment(), run.experiment().name, {}), path.name)
        yield from _measured(about, path)
        yield from attacks_on_run(path)
        return
    folder = GridFolder(path)
    stale = stale_cells(folder)
    for one in _of_grid(folder):
        yield replace(one, stale=stale.get(one.cell, ""))
    if folder.kind == "attacks":
        free = {cell.repeat: stale.get(cell.name, "") for cell in folder.cells()
                if cell.victim == BASELINES}  # fmt: skip
        for one in attacks_of(folder):
            yield replace(one, stale=stale.get(one.cell) or free[one.repeat] or one.stale)


def _of_grid(folder: GridFolder) -> Iterator[Record]:
    """What is known of each training but of attacks."""
    asked = settings_of(folder.experiment()).accuracy if folder.kind == "codecs" else ()
    for cell in folder.cells():
        if cell.victim != BASELINES:
            own = folder.cells_path / cell.name
            yield from _measured(_about(cell, cell.name), own)
            yield from _bytes_to(_about(cell, cell.name), own, folder, asked)


def frame_of(path: Path) -> pd.DataFrame:
    """The same as a table of pandas."""
    import pandas as pd

    return pd.DataFrame([one.row() for one in records_of(path)], columns=COLUMNS)


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write `results.csv` into a grid's folder."""
    write_text(path / RESULTS, csv_text(COLUMNS, [one.row() for one in records]))


def _about(cell: Cell, name: str) -> dict[str, Any]:
    one = cell.experiment
    again = (f"seed={one.seed}", cell.repeat)
    training = " ".join(word for word in cell.title.split() if word not in again)
    return {
        "training": cell.victim or training,
        "cell": name,
        "codec": one.codec,
        "defense": one.defense,
        "secure": one.secure,
        "adversary": cell.adversary,
        "repeat": cell.repeat,
    }


def _measured(about: dict[str, Any], path: Path) -> Iterator[Record]:
    """What a training's summary says, and what its codec makes of the cut of the test rows."""
    if not (path / "summary.json").exists():
        return
    summary = RunFolder(path).summary()
    guess = summary.get("guess") or {}

    def record(evaluator: Any, subject: str, measure: str, value: Any) -> Iterator[Record]:
        if isinstance(value, int | float) and math.isfinite(value):
            beside = guess.get(measure) if subject == TEST else None
            yield Record(
                **about, evaluator=evaluator, subject=subject, measure=measure, value=float(value),
                guess=beside,
            )  # fmt: skip

    for name, value in summary.items():
        if name.startswith("test_"):
            yield from record("quality", TEST, name.removeprefix("test_"), value)
    for way in ("bytes_up", "bytes_down"):
        for party, sent in summary.get(way, {}).items():
            yield from record("cost", party, way, sent)
    sent = [*summary.get("bytes_up", {}).values(), *summary.get("bytes_down", {}).values()]
    yield from record("cost", TRAINING, "bytes", sum(sent))
    for name in _COSTS:
        yield from record("cost", TRAINING, name, summary.get(name))
    epochs = epochs_of(path)
    if epochs:  # the loss of the epoch whose weights were kept, with its draws
        kept = epochs[summary.get("best_epoch", len(epochs)) - 1]
        yield from record("quality", TRAINING, "loss", kept.get("train_loss"))
    codec = read_json(path / CODEC) if (path / CODEC).exists() else {}
    for name, value in codec.get("train", {}).items():
        yield from record("quality", TRAIN, name, value)
    for name in ("train_rows", "test_rows"):
        yield from record("cost", TRAINING, name, codec.get(name))
    parties = codec.get("parties", {})
    for party, figures in parties.items():
        for name, value in figures.items():
            yield from record("codec", party, name, value)
    if parties:
        for name, value in _together(list(parties.values())).items():
            yield from record("codec", ALL, name, value)


def _together(parties: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """What codecs of all parties add up to; sizes are shares of dense float32."""
    total = {
        name: sum(one[name] for one in parties) for name in (*_SUMS, "wire_bytes", "dense_bytes")
    }
    bounds = [one["entropy_bound_bytes"] for one in parties]
    stated = None not in bounds  # where all codecs state one
    usage = usage_of(parties)
    return {
        **{name: total[name] for name in _SUMS},
        "frame_ratio": total["wire_bytes"] / total["dense_bytes"],
        "bound_ratio": sum(bounds) / total["dense_bytes"] if stated else None,
        "units": len(usage),
        "never_sent": usage.count(0),
    }


def usage_of(parties: Sequence[Mapping[str, Any]]) -> list[int]:
    """Test rows in which each unit arrives, the parties one after another."""
    return [count for party in parties for count in party["usage"]]


def epochs_of(path: Path) -> list[dict[str, Any]]:
    """What happened in each epoch of a run, with the bytes of both directions so far."""
    file = path / "metrics.jsonl"
    lines = list(read_lines(file)) if file.exists() else []
    return [one | {"sent": one.get("bytes_up", 0) + one.get("bytes_down", 0)} for one in lines]


def _bytes_to(
    about: dict[str, Any], path: Path, folder: GridFolder, asked: Sequence[float]
) -> Iterator[Record]:
    """Bytes until validation rows were as good as a comparison asks; no record where never."""
    if not (path / "summary.json").exists():
        return
    measure = compared_measure(folder) if asked else ""
    sign = -1 if measure in LOWER_IS_BETTER else 1
    epochs = epochs_of(path) if asked else []
    for least in asked:
        scores = [(one.get(f"validation_{measure}"), one["sent"]) for one in epochs]
        good = (
            sent for score, sent in scores if score is not None and sign * score >= sign * least
        )
        if (sent := next(good, None)) is not None:
            yield Record(
                **about, evaluator="cost", subject=TRAINING, measure=bytes_to(least), value=sent
            )


def bytes_to(least: float) -> str:
    """The measure: bytes until the validation rows were so good."""
    return f"bytes_to_{least:g}"


def attacks_of(folder: GridFolder) -> list[Record]:
    """Every attack on the victims of a grid that are whole, in the order of the settings.

    What a cell holds of earlier settings is left out, and so is a cell that failed since.

    Raises:
        RunFolderError: a file of a cell is damaged.
    """
    settings = grid_settings_of(folder.experiment())
    attackers = read_attackers(folder.path)
    asked = {*settings.attack_specs, *settings.trainings, *attackers}
    setting = setting_text(settings)

    def is_wanted(one: ScoreRecord) -> bool:
        leak = one.k in (0, *settings.leaks) and one.draw < settings.draws
        return one.attack in asked and leak

    free: dict[int, list[ScoreRecord]] = {}
    today = Today()
    of_free: dict[int, dict[str, str]] = {}
    found: dict[str, list[Record]] = {spec: [] for spec in settings.victims}
    for cell in folder.cells():
        path, seed = folder.cells_path / cell.name, cell.experiment.seed
        scores = [] if failure_of(path) else read_scores(path / OF_CELL, setting)
        changed = today.changed(read_codes(path / OF_CELL), scores)
        scores += read_scores(path / OF_OUTSIDE, setting) if scores else []
        if cell.victim == BASELINES:
            free[seed], of_free[seed] = scores, changed
        elif scores:
            mine = [one for one in scores if is_wanted(one)]
            about = _about(cell, cell.name)
            changed |= of_free[seed]
            found[cell.victim] += _attacks(about, mine, free[seed], settings.baselines, changed)
    return [_signed(one, attackers) for records in found.values() for one in records]


class Today:
    """The code that attacks have today."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def changed(self, before: Mapping[str, str], scores: Sequence[ScoreRecord]) -> dict[str, str]:
        """Why some scores are of code that is no more, by `AttackJob.code_key`.

        An attack from outside is that of the file whose digest stands beside it.
        """
        jobs = {one.job.code_key: one.job for one in scores}
        found = {key: self._why(job, before.get(key)) for key, job in jobs.items()}
        return {key: why for key, why in found.items() if why}

    def _why(self, job: AttackJob, before: str | None) -> str:
        from vfl.experiments.attack_runner import code_of_job  # it needs torch

        if before is None:
            return UNKNOWN
        try:
            if job.code_key not in self._known:
                self._known[job.code_key] = code_of_job(job)
        except UserError as error:
            return f"its code cannot be loaded: {error.what}"
        return "" if self._known[job.code_key] == before else CODE


def _signed(one: Record, attackers: Mapping[str, Attacker]) -> Record:
    """With the author and the date of its attack, if that is from outside."""
    by = attackers.get(one.subject)
    return one if by is None else replace(one, author=by.author, date=by.date)


def attacks_on_run(path: Path, baselines: Sequence[str] = GridSettings().baselines) -> list[Record]:
    """The attacks on a single run; none if it was never attacked.

    Args:
        path: of the run.
        baselines: those that count, as far as they are there.

    Raises:
        RunFolderError: a file is damaged.
    """
    scores = read_scores(path / OF_RUN)
    if not scores:
        return []
    experiment = RunFolder(path).experiment()
    about = _about(Cell(experiment, experiment.name, {}), path.name)
    own = [one for one in scores if one.bottom == TRAINED]
    free = [one for one in scores if one.bottom != TRAINED]
    return list(_attacks(about, own, free, baselines))


def _attacks(
    about: dict[str, Any],
    scores: Sequence[ScoreRecord],
    free: Sequence[ScoreRecord],
    baselines: Sequence[str],
    changed: Mapping[str, str] | None = None,
) -> Iterator[Record]:
    """The attacks on one victim, a record for each measure.

    Args:
        about: the victim.
        scores: on its bottom.
        free: without it, on the same leaked rows.
        baselines: names of those that count.
        changed: why some are of code that is no more, by `AttackJob.code_key`.
    """
    changed = changed or {}
    known = {(one.job, measure): value for one in free for measure, value, _ in one.measured}
    for one in scores:
        beside = {} if one.of_training else baselines_of(one.job, baselines)
        whys = [changed.get(job.code_key, "") for job in (one.job, *beside.values())]
        for measure, value, guess in one.measured:
            own = {
                name: known[job, measure] for name, job in beside.items() if (job, measure) in known
            }
            yield Record(
                **about, evaluator="attack", subject=one.attack, k=one.k, draw=one.draw,
                measure=measure, value=value, guess=guess, seconds=one.seconds, baselines=own,
                threat=one.threat, access=one.access,
                report=one.report if measure == one.measure else None,
                stale=next(filter(None, whys), ""),
            )  # fmt: skip
