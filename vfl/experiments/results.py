"""One table for all results; each record is one measured value of one training.

There are four evaluators: "quality" of predictions, "cost" of the training, "codec" on the cuts of
the test rows, and "attack". A record also has the value of guessing and the best value without the
model, if these exist. A record is marked as stale if its code or data have changed since the
measurement. Tables, pages, plots and notebooks of studies use only this table, except for curves;
`LoadedGrid` and `LoadedRun` read the source files of the table, each file once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vfl.config import Experiment, GridSettings
from vfl.core.errors import UserError
from vfl.core.storage import write_text
from vfl.core.text import csv_text
from vfl.experiments.cells import (
    HONEST,
    Cell,
    GridFolder,
    failure_of,
    grid_settings_of,
    is_done,
    is_grid,
    settings_of,
)
from vfl.experiments.loaded_run import LoadedRun
from vfl.experiments.scores import (
    BASELINES,
    OF_CELL,
    OF_OUTSIDE,
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
from vfl.experiments.statistics import Estimate, resampled

if TYPE_CHECKING:
    import pandas as pd

RESULTS = "results.csv"
#: Measures of which a lower value is better.
LOWER_IS_BETTER = frozenset(
    {"loss", "log_loss", "brier", "uncalibrated_log_loss", "uncalibrated_brier", "rmse", "mae"}
)
#: If the largest class has more than this share of rows, accuracy is a poor measure: a constant
#: prediction of this class would reach the same accuracy.
IMBALANCED = 0.65
#: Subjects of a measurement other than parties and attacks.
TEST, TRAIN, TRAINING, ALL = "test rows", "training rows", "training", "all parties"
#: Metrics of a whole training, by their names in its summary.
_COSTS = (
    "seconds", "steps_per_second", "formula_ratio", "wire_ratio", "wire_ratio_up", "wire_ratio_down"
)  # fmt: skip
#: Measures of a cell's codecs that are added up over parties.
_SUMS = ("encode_ms", "decode_ms", "nonzeros", "dead_units")


@dataclass(frozen=True)
class Record:
    """One row of the results table.

    Attributes:
        training: name of the training, which is the same for all its seeds and adversaries.
        cell: name of the training's run folder.
        codec, defense, secure: its protection.
        adversary: spec of the adversary in the training; "none" for an honest training.
        repeat: seed or fold of the training.
        evaluator: kind of the measurement: "quality", "cost", "codec" or "attack".
        subject: the attack, party or rows on which the value was measured; for an adversary's own
            result, the adversary's spec.
        k, draw: number of leaked labels of each class, and number of the random draw of leaked
            rows; 0 if no labels leak.
        measure, value: name of the measure, and its value.
        guess: the best value without any evidence; None if there is no such value.
        seconds: running time of the attack in seconds.
        baselines: values of baselines without the model on the same leaked rows, by name of the
            baseline; "scratch" uses only the leaked rows, or the inputs for clusters.
        threat: sentence with the attacker and the attacker's knowledge.
        access: the attacker's access to the model; see `vfl.attacks.view.Access`.
        author, date: author and date of an attack from outside, see `vfl.experiments.outside`;
            empty for all other attacks.
        report: the attack's own report, see `vfl.attacks.Attack.last_report`; only the record of
            the headline measure has the report.
        stale: reason why the value does not come from the current data and code, see `staleness`;
            empty for a current value.
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
        """The best value of a baseline without the model; None if there is no baseline."""
        best = min if self.measure in LOWER_IS_BETTER else max
        return best(self.baselines.values(), default=None)

    @property
    def attacker(self) -> str:
        """Names of the attack, of an outside attack's author, and of the adversary if any."""
        own = f"{self.subject} ({self.author}, {self.date})" if self.author else self.subject
        return own if self.adversary in (HONEST, self.subject) else f"{own} after {self.adversary}"

    def row(self) -> dict[str, Any]:
        """Return the record as a line of `results.csv`, including the best baseline."""
        return {name: getattr(self, name) for name in COLUMNS}

    def as_json(self) -> dict[str, Any]:
        """Return all fields of the record, and the best baseline."""
        return asdict(self) | {"no_model": self.no_model}


#: Columns of `results.csv`, and of the pandas table.
COLUMNS = [one.name for one in fields(Record) if one.name not in ("baselines", "threat", "report")]
COLUMNS.insert(COLUMNS.index("seconds"), "no_model")


def fitting_quality(guess: Mapping[str, float]) -> str:
    """Return the measure of quality that fits a task, from the entry `guess` of a run's summary.

    >>> fitting_quality({"classes": 2, "accuracy": 0.88}), fitting_quality({"classes": 10})
    ('auc', 'accuracy')
    """
    if "rmse" in guess:
        return "rmse"
    uneven = guess.get("classes") == 2 or guess.get("accuracy", 0) > IMBALANCED
    return "auc" if uneven else "accuracy"


def records_of(path: Path) -> list[Record]:
    """Return the records of a run, a comparison, a grid or a value study.

    Raises:
        RunFolderError: the folder contains no run or study, or a file of the folder is damaged.
    """
    if is_grid(path):
        return LoadedGrid(GridFolder(path)).records
    run = LoadedRun(path)
    return [*trained_records(run), *attacks_on_run(run)]


def trained_records(run: LoadedRun) -> list[Record]:
    """Return the records of a single run, without records of attacks on the run."""
    return list(_measured(_about_run(run), run))


def grouped(records: Iterable[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    """Group records by some of their attributes, in the order of first occurrence."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for one in records:
        found.setdefault(tuple(getattr(one, name) for name in names), []).append(one)
    return found


def table_of(records: Iterable[Record]) -> pd.DataFrame:
    """Return records as a pandas table."""
    import pandas as pd

    return pd.DataFrame([one.row() for one in records], columns=COLUMNS)


class LoadedGrid:
    """A comparison, grid or value study with its cells' runs; it reads each file once.

    Args:
        folder: folder of the grid.

    Raises:
        RunFolderError: a file is damaged; every property of this class can raise this error.
    """

    def __init__(self, folder: GridFolder) -> None:
        self.folder, self.path = folder, folder.path

    @cached_property
    def experiment(self) -> Experiment:
        """Experiment from which vfl made the grid."""
        return self.folder.experiment()

    @cached_property
    def cells(self) -> Sequence[Cell]:
        """Cells of the study (trainings and baselines), in order."""
        return self.folder.cells()

    @cached_property
    def runs(self) -> Mapping[str, LoadedRun]:
        """Run of each finished cell, by the cell's name."""
        found = ((cell.name, self.path_of(cell)) for cell in self.cells)
        return {name: LoadedRun(path) for name, path in found if (path / "summary.json").exists()}

    def path_of(self, cell: Cell) -> Path:
        """Return the run folder of a cell."""
        return self.folder.cells_path / cell.name

    @cached_property
    def failures(self) -> Mapping[str, Mapping[str, Any]]:
        """Reasons why cells failed, by the cells' titles."""
        found = ((cell.title, failure_of(self.path_of(cell))) for cell in self.cells)
        return {title: failure for title, failure in found if failure is not None}

    @cached_property
    def records(self) -> list[Record]:
        """All records of the study; stale records contain the reason."""
        stale = stale_cells(self.folder)
        found = [replace(one, stale=stale.get(one.cell, "")) for one in self._trained()]
        if self.folder.kind == "attacks":
            free = {cell.repeat: stale.get(cell.name, "") for cell in self.cells
                    if cell.victim == BASELINES}  # fmt: skip
            for one in self.attacks:
                why = stale.get(one.cell) or free[one.repeat] or one.stale
                found.append(replace(one, stale=why))
        return found

    @property
    def current(self) -> list[Record]:
        """Records of the study that come from the current data and code."""
        return [one for one in self.records if not one.stale]

    @property
    def compared(self) -> str:
        """Metric of the comparison: the requested metric, or one that fits the first run's task."""
        if (asked := settings_of(self.experiment).measure) is not None:
            return asked
        for run in self.runs.values():
            found = run.summary
            if not found.get("guess") and "test_loss" in found and "test_accuracy" not in found:
                return "loss"  # only a model with one label per token lacks the other metrics
            return fitting_quality(found.get("guess") or {})
        return "accuracy"

    def _trained(self) -> Iterator[Record]:
        """Yield the records of each training, without records of attacks."""
        asked = settings_of(self.experiment).accuracy if self.folder.kind == "codecs" else ()
        for cell in self.cells:
            if cell.victim != BASELINES and (run := self.runs.get(cell.name)) is not None:
                yield from _measured(_about(cell, cell.name, run), run)
                for least in asked:
                    yield from _bytes_to(_about(cell, cell.name, run), run, self.compared, least)

    @cached_property
    def attacks(self) -> list[Record]:
        """All attacks on finished victims of the grid, in the order of the settings.

        Results from earlier settings of a cell are left out, and so are results of cells that
        failed later.
        """
        settings = grid_settings_of(self.experiment)
        attackers = read_attackers(self.path)
        asked = {*settings.attack_specs, *settings.trainings, *attackers}
        setting, today = setting_text(settings), Today(attackers)

        def is_wanted(one: ScoreRecord) -> bool:
            leak = one.k in (0, *settings.leaks) and one.draw < settings.draws
            return one.attack in asked and leak

        free: dict[int, list[ScoreRecord]] = {}
        of_free: dict[int, dict[str, str]] = {}
        found: dict[str, list[Record]] = {spec: [] for spec in settings.victims}
        for cell in self.cells:
            path, seed = self.path_of(cell), cell.experiment.seed
            scores, changed = list[ScoreRecord](), dict[str, str]()
            for file in () if cell.title in self.failures else (OF_CELL, OF_OUTSIDE):
                own = read_scores(path / file, setting) if scores or file == OF_CELL else []
                changed |= today.changed(read_codes(path / file), own)
                scores += own
            if cell.victim == BASELINES:
                free[seed], of_free[seed] = scores, changed
            elif scores:
                mine = [one for one in scores if is_wanted(one)]
                changed |= of_free[seed]
                about = _about(cell, cell.name, self.runs.get(cell.name))
                for one in _attacks(about, mine, free[seed], settings.baselines, changed):
                    by = attackers.get(one.subject)
                    signed = one if by is None else replace(one, author=by.author, date=by.date)
                    found[cell.victim].append(signed)
        return [one for records in found.values() for one in records]

    def lines(self, records: Iterable[Record]) -> list[Line]:
        """Return table lines in the order of the cells, without cells that have no run."""
        figures: dict[str, dict[Figure, float]] = {}
        for one in records:
            if one.evaluator != "attack":
                figures.setdefault(one.cell, {})[one.subject, one.measure] = one.value
        found: dict[tuple[tuple[str, str], ...], Line] = {}
        for cell in self.cells:
            about = {key: value for key, value in cell.about.items() if key != "repeat"}
            line = found.setdefault(tuple(about.items()), Line(about))
            repeat = cell.about["repeat"]
            line.repeats.append(repeat)
            if cell.name in figures and is_done(self.path_of(cell)):
                line.runs[repeat] = self.runs[cell.name]
                for figure, value in figures[cell.name].items():
                    line.figures.setdefault(figure, {})[repeat] = value
        return list(found.values())

    @property
    def unfinished(self) -> list[str]:
        """Notes about missing trainings (cells), which are printed with the results."""
        attacked = self.folder.kind == "attacks"
        going = [self.path_of(one) for one in self.cells if one.title not in self.failures]
        left = sum(not ((one / OF_CELL).exists() if attacked else is_done(one)) for one in going)
        cells, failed = len(self.cells), len(self.failures)
        found = [f"{failed} of {cells} cells failed and are left out"] if failed else []
        not_yet = "done" if attacked else "trained"
        return found + ([f"{left} of {cells} cells are not {not_yet} yet"] if left else [])


#: Subject and measure of a value, as keys.
Figure = tuple[str, str]


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a table: one kind of training, with its repeats (seeds or folds) and metrics.

    Attributes:
        about: description of the training, by column; see `Cell.about`.
        repeats: planned repeats.
        runs: trained runs, by repeat (seed or fold).
        figures: values by subject and measure, then by repeat; see `Record`.
        reference: line with which this line is compared; None if the study has no reference, or
            this line is the reference.
        ratio: number of test rows divided by number of training rows, if each repeat draws both
            kinds of rows again; see `resampled`.
    """

    about: Mapping[str, str]
    repeats: list[str] = field(default_factory=list)
    runs: dict[str, LoadedRun] = field(default_factory=dict)
    figures: dict[Figure, dict[str, float]] = field(default_factory=dict)
    reference: Line | None = None
    ratio: float = 0.0

    def values(self, measure: str, subject: str = TEST) -> Mapping[str, float]:
        """Return the values of a metric by repeat, without repeats that lack the metric."""
        return self.figures.get((subject, measure), {})

    def over(self, measure: str, subject: str = TEST) -> Estimate | None:
        """Return the mean of a metric with its interval, over the repeats that have the metric."""
        return resampled(list(self.values(measure, subject).values()), self.ratio)

    def mean(self, measure: str, subject: str = TEST) -> float | None:
        """Return the mean of a metric over repeats that have the metric."""
        found = self.over(measure, subject)
        return None if found is None else found.mean

    @property
    def sent_percent(self) -> float:
        """Sent bytes in percent of dense float32: mean over both directions and all repeats."""
        ratios = [self.mean(f"wire_ratio_{way}", TRAINING) for way in ("up", "down")]
        return 50 * sum(ratio or 0.0 for ratio in ratios)

    def less(self, other: Line | None, measure: str, subject: str = TEST) -> Estimate | None:
        """Return a metric minus the other line's value of the metric, paired by repeat."""
        ours, theirs = self.values(measure), {} if other is None else other.values(measure, subject)
        both = [ours[repeat] - theirs[repeat] for repeat in ours if repeat in theirs]
        return resampled(both, self.ratio)

    def difference(self, measure: str) -> Estimate | None:
        """Return a metric minus the reference line's value; None for the reference itself."""
        return self.less(self.reference, measure)


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write records as `results.csv` into a grid's folder."""
    write_text(path / RESULTS, csv_text(COLUMNS, [one.row() for one in records]))


def _about(cell: Cell, name: str, run: LoadedRun | None = None) -> dict[str, Any]:
    """Return the columns that describe a training; a module's run has the codecs in its summary."""
    one = cell.experiment
    used = run.summary.get("codec") if run is not None and run.has_ended else None
    again = (f"seed={one.seed}", cell.repeat)
    training = " ".join(word for word in cell.title.split() if word not in again)
    return {
        "training": cell.victim or training,
        "cell": name,
        "codec": used or one.codec,
        "defense": one.defense,
        "secure": one.secure,
        "adversary": cell.adversary,
        "repeat": cell.repeat,
    }


def _about_run(run: LoadedRun) -> dict[str, Any]:
    return _about(Cell(run.experiment, run.experiment.name, {}), run.path.name)


def _measured(about: dict[str, Any], run: LoadedRun) -> Iterator[Record]:
    """Yield records from a training's summary, and of its codec on the cuts of test rows."""
    if not run.has_ended:
        return
    summary, codec = run.summary, run.codec
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
    if run.epochs:  # the loss of the kept epoch, with random draws of training
        kept = run.epochs[summary.get("best_epoch", len(run.epochs)) - 1]
        yield from record("quality", TRAINING, "loss", kept.get("train_loss"))
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
    """Return the codecs' measures, added up over all parties; sizes are shares of float32."""
    total = {
        name: sum(one[name] for one in parties) for name in (*_SUMS, "wire_bytes", "dense_bytes")
    }
    bounds = [one["entropy_bound_bytes"] for one in parties]
    stated = None not in bounds  # the sum exists only if all codecs have a bound
    usage = usage_of(parties)
    return {
        **{name: total[name] for name in _SUMS},
        "frame_ratio": total["wire_bytes"] / total["dense_bytes"],
        "bound_ratio": sum(bounds) / total["dense_bytes"] if stated else None,
        "units": len(usage),
        "never_sent": usage.count(0),
    }


def usage_of(parties: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the number of test rows for which each unit is sent, party by party."""
    return [count for party in parties for count in party["usage"]]


def _bytes_to(
    about: dict[str, Any], run: LoadedRun, measure: str, least: float
) -> Iterator[Record]:
    """Yield the bytes until the validation score reached a target; nothing if it never did."""
    sign = -1 if measure in LOWER_IS_BETTER else 1
    for epoch in run.epochs:
        score = epoch.get(f"validation_{measure}")
        if score is not None and sign * score >= sign * least:
            sent = epoch.get("sent", 0)
            yield Record(
                **about, evaluator="cost", subject=TRAINING, measure=bytes_to(least), value=sent
            )
            return


def bytes_to(least: float) -> str:
    """Return the measure's name for the bytes until validation rows reach a score."""
    return f"bytes_to_{least:g}"


class Today:
    """The current code of attacks, to compare with the code that produced stored scores.

    Args:
        attackers: attackers from users' files ("from outside"), by spec. If this process has not
            loaded an attack from outside, the attack's newest file is used.
    """

    def __init__(self, attackers: Mapping[str, Attacker] | None = None) -> None:
        self._known: dict[str, str] = {}
        self._attackers = attackers or {}

    def changed(self, before: Mapping[str, str], scores: Sequence[ScoreRecord]) -> dict[str, str]:
        """Return the reasons why scores come from code that has changed, by `AttackJob.code_key`.

        Args:
            before: digests of the code that produced the scores, from `read_codes`.
            scores: scores of attacks.
        """
        jobs = {one.job.code_key: one.job for one in scores}
        found = {key: self._why(job, before) for key, job in jobs.items()}
        return {key: why for key, why in found.items() if why}

    def _why(self, job: AttackJob, before: Mapping[str, str]) -> str:
        # imported late, because the imported module needs torch
        from vfl.experiments.attack_runner import code_of_job

        if job.code_key not in before:
            return UNKNOWN
        try:
            if job.code_key not in self._known:
                self._known[job.code_key] = code_of_job(job)
        except UserError as error:
            if (by := self._attackers.get(job.attack)) is None:
                return f"the attack's code cannot be loaded: {error.what}"
            return "" if before.get(by.code_key) == by.sha256 else CODE
        return "" if self._known[job.code_key] == before[job.code_key] else CODE


def attacks_on_run(
    run: LoadedRun, baselines: Sequence[str] = GridSettings().baselines
) -> list[Record]:
    """Return the records of attacks on a single run; empty if the run was never attacked.

    Args:
        run: the attacked run.
        baselines: names of the baselines that the attacks are compared with, if these baselines
            exist.

    Raises:
        RunFolderError: a file of the run is damaged.
    """
    if not run.scores:
        return []
    own = [one for one in run.scores if one.bottom == TRAINED]
    free = [one for one in run.scores if one.bottom != TRAINED]
    changed = Today().changed(run.codes, run.scores)
    return list(_attacks(_about_run(run), own, free, baselines, changed))


def attacks_of(
    experiment: Experiment, scores: Sequence[ScoreRecord], baselines: Sequence[str]
) -> list[Record]:
    """Return attacks on a victim without a run, from scores of attacks and of baselines."""
    about = _about(Cell(experiment, experiment.name, {}), "")
    own = [one for one in scores if one.bottom == TRAINED]
    free = [one for one in scores if one.bottom != TRAINED]
    return list(_attacks(about, own, free, baselines, {}))


def _attacks(
    about: dict[str, Any],
    scores: Sequence[ScoreRecord],
    free: Sequence[ScoreRecord],
    baselines: Sequence[str],
    changed: Mapping[str, str],
) -> Iterator[Record]:
    """Yield the records of attacks on one victim, with one record per measure.

    Args:
        about: the victim.
        scores: scores of attacks on the victim's trained bottom model.
        free: scores of baselines (from scratch, and on bottom models that were trained without
            labels), for the same leaked rows.
        baselines: names of the baselines that the attacks are compared with.
        changed: reasons why scores come from code that has changed, by `AttackJob.code_key`.
    """
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
