"""What joining buys: how good each party is alone, all together, and what protection costs.

Every cell is trained and tested on the rows that all parties share, so nothing but the columns, the
place of the training, or its protection differs.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from vfl.config import Experiment, PartySettings, TraceSettings, ValueSettings
from vfl.config.run_folder import RunFolder
from vfl.core.ledger import Ledger, size
from vfl.core.storage import read_json, stamp, write_json
from vfl.experiments.cells import CODEC, Cell, GridFolder, failure_of, is_done
from vfl.experiments.comparison_results import LOWER_IS_BETTER, score_text
from vfl.experiments.statistics import Estimate, resampled
from vfl.experiments.tables import SHARES, Table, left_out, write_tables

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vfl.datasets import PartyData

SPLIT, CENTRAL, BOOSTING = "split", "the same network, in one place", "gradient boosting"
#: Trees at most; the validation rows say how many are used.
_TREES, _TREE_RATE = 300, 0.05


def value_settings_of(experiment: Experiment) -> ValueSettings:
    """What is asked for, or what is measured unless anything is."""
    return experiment.value or ValueSettings()


def value_cells(experiment: Experiment) -> list[Cell]:
    """The trainings, so that one seed is whole before the next begins.

    Args:
        experiment: its own codec, defense and secure mode are priced too.
    """
    experiment.refuse_roles("vfl value")
    settings = value_settings_of(experiment)
    plain = experiment.model_copy(
        update={"compare": None, "grid": None, "value": None, "trace": TraceSettings()}
        | {"codec": "none", "defense": "none", "secure": "none"}
    )
    label = experiment.label.party
    own = {name: {name: experiment.parties[name]} for name in experiment.parties}
    # One party with all columns: the widths are merged inside it, as the top expects them.
    merged = [one.width for one in experiment.parties.values()]
    width = merged[0] if experiment.merge == "sum" else sum(merged)
    whole = {"": PartySettings(width=width)}
    asked: list[tuple[str, str, Experiment]] = []
    for name in sorted(own, key=lambda name: name != label):  # the label party first
        asked.append((f"{name} alone", name, _one_place(plain, own[name])))
    asked.append((f"{BOOSTING}, all columns", "", _one_place(plain, whole)))
    if label in own:
        alone = _one_place(plain, own[label])
        asked.insert(1, (f"{label} alone, {BOOSTING}", label, alone))
    asked.append((CENTRAL, "", _one_place(plain, whole)))
    asked.append((SPLIT, "", plain))
    priced = {f"codec {spec}": {"codec": spec} for spec in settings.codecs}
    priced |= {f"defense {spec}": {"defense": spec} for spec in settings.defenses}
    as_written = {key: getattr(experiment, key) for key in ("codec", "defense", "secure")}
    if as_written != {key: getattr(plain, key) for key in as_written}:
        priced["as the file says"] = as_written
    asked += [(what, "", plain.model_copy(update=change)) for what, change in priced.items()]
    return [
        Cell(
            one.model_copy(update={"seed": seed}),
            f"{what} seed={seed}",
            {"what": what, "party": party, "repeat": str(seed)},
            victim=what,
        )
        for seed in settings.seeds
        for what, party, one in asked
    ]


def _one_place(plain: Experiment, parties: Mapping[str, PartySettings]) -> Experiment:
    """A training whose columns lie at one stand-in for a party, beside the labels."""
    name = "alone" if plain.label.party != "alone" else "single"
    (one,) = parties.values()
    return plain.model_copy(update={"parties": {name: one}, "merge": "concat"})


def run_value_cell(
    cell: Cell, folder: GridFolder, data: Mapping[str, PartyData], device: str
) -> None:
    """Bring a cell to its end, from wherever an earlier call left it.

    Args:
        cell: what is trained.
        folder: of all cells; its experiment says whose columns are whose.
        data: every party's rows.
        device: where networks run.
    """
    from vfl.experiments.cells import discard_if_stale
    from vfl.experiments.training import train_cell

    what, path = cell.about["what"], folder.cells_path / cell.name
    rows = data if len(cell.experiment.parties) > 1 or _is_split(cell) else gathered(cell, data)
    discard_if_stale(cell, folder, rows)
    if BOOSTING in what:
        _boost(cell, folder, rows)
    else:
        (name,) = list(cell.experiment.parties)[:1]
        bottoms = {name: _merged(folder.experiment(), cell, data)} if what == CENTRAL else None
        train_cell(cell, folder, rows, device, bottoms=bottoms)
    split = rows[cell.experiment.label.party].split
    counts = {"train_rows": len(split.train), "test_rows": len(split.test)}
    if not (path / CODEC).exists():
        write_json(path / CODEC, stamp() | counts)


def _is_split(cell: Cell) -> bool:
    """Whether the experiment's own parties train, each with its columns."""
    what = cell.about["what"]
    return not cell.about["party"] and what != CENTRAL and BOOSTING not in what


def gathered(cell: Cell, data: Mapping[str, PartyData]) -> dict[str, PartyData]:
    """The columns of one party, or of all, at the stand-in; labels alone at the label party."""
    import torch

    label, (stand_in,) = data[cell.experiment.label.party], cell.experiment.parties
    if BOOSTING in cell.about["what"]:
        data = {name: replace(one, inputs=for_trees(one)) for name, one in data.items()}
    if cell.about["party"]:
        chosen = data[cell.about["party"]]
        inputs = chosen.inputs
    else:
        chosen = label
        inputs = torch.cat([x.flatten(1) for x in _inputs(data)], dim=1)
    own = replace(chosen, name=stand_in, inputs=inputs, labels=None, classes=None, row_weights=None)
    return {stand_in: own, label.name: replace(label, inputs=None, encoder=None)}


def for_trees(data: PartyData) -> Tensor | None:
    """A party's inputs, where a number in bins is one column again.

    The sum of its bins rises with the number, and how large a column is otherwise is nothing to
    trees.
    """
    import torch

    from vfl.datasets.encode import BinnedColumn

    inputs, columns = data.inputs, getattr(data.encoder, "columns", ())
    if inputs is None or not any(isinstance(column, BinnedColumn) for column in columns):
        return inputs
    made = []
    for column, own in zip(
        columns, torch.split(inputs, [c.width for c in columns], dim=1), strict=True
    ):
        bins = len(column.edges) - 1 if isinstance(column, BinnedColumn) else 0
        made += [own[:, :bins].sum(1, keepdim=True)] * bool(bins) + [own[:, bins:]]
    return torch.cat(made, dim=1)


def _inputs(data: Mapping[str, PartyData]) -> list[Any]:
    return [one.inputs for one in data.values() if one.inputs is not None]


def _merged(experiment: Experiment, cell: Cell, data: Mapping[str, PartyData]) -> nn.Module:
    """All parties' bottoms as one module, which merges their cuts as the label party would."""
    from vfl import models
    from vfl.core.seeds import scoped

    parts, shapes = [], []
    with scoped(cell.experiment.seed):
        for name in data:
            if (inputs := data[name].inputs) is None:
                continue
            asked, shape = experiment.parties[name], tuple(inputs.shape[1:])
            parts.append(models.make_bottom(asked.bottom).build(shape, asked.width))
            shapes.append(shape)
    return models.merged(parts, shapes, experiment.merge)


def _boost(cell: Cell, folder: GridFolder, data: Mapping[str, PartyData]) -> None:
    """Histogram gradient boosting of scikit-learn, as many trees as are best on validation rows."""
    import numpy as np
    import torch
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    from vfl.server.quality import classification_quality, regression_quality

    path = folder.cells_path / cell.name
    if (path / "summary.json").exists():
        return
    shutil.rmtree(path, ignore_errors=True)
    run = RunFolder.create(path, cell.experiment, "in-process", str(folder.head("command")))
    label = data[cell.experiment.label.party]
    (inputs,) = _inputs(data)
    assert label.labels is not None
    columns, truth, split = inputs.flatten(1).numpy(), label.labels.numpy(), label.split
    regression = label.classes is None
    kind = HistGradientBoostingRegressor if regression else HistGradientBoostingClassifier
    options = {"max_iter": _TREES, "learning_rate": _TREE_RATE, "early_stopping": False}
    trees = kind(**options, random_state=cell.experiment.seed)
    trees.fit(columns[split.train], truth[split.train])

    stages = trees.staged_predict if regression else trees.staged_predict_proba

    def loss(answers: Any) -> float:
        true = truth[split.validation]
        if regression:
            return float(np.square(answers - true).mean())
        return float(-np.log(answers[np.arange(len(true)), true].clip(1e-12)).mean())

    best = _TREES - 1
    if len(split.validation):
        best = int(np.argmin([loss(stage) for stage in stages(columns[split.validation])]))
    answers = next(one for place, one in enumerate(stages(columns[split.test])) if place == best)
    tested = label.labels[torch.from_numpy(split.test)]
    if regression:
        found = regression_quality(torch.from_numpy(answers)[:, None], tested)
    else:
        found = classification_quality(torch.from_numpy(np.log(answers.clip(1e-12))), tested)
    figures = {f"test_{name}": value for name, value in found.items()}
    nothing_sent: dict[str, Any] = {"bytes_up": {}, "bytes_down": {}, "wire_ratio": None}
    run.finish(figures | nothing_sent | {"epochs": best + 1, "seconds": 0.0}, Ledger())


@dataclass(frozen=True)
class Line:
    """One way of training, over its seeds.

    Attributes:
        what: in words.
        scores: of the test rows, by seed.
        sent: bytes of a whole training, mean over the seeds; 0 where nothing is sent.
        share: of dense float32, mean; None where nothing is sent.
        ratio: test rows to training rows.
        cells: how many there are to be.
    """

    what: str
    scores: Mapping[str, float]
    sent: float
    share: float | None
    ratio: float
    cells: int

    @property
    def score(self) -> Estimate | None:
        """Mean with its interval."""
        return resampled(list(self.scores.values()), self.ratio)

    def less(self, other: Line) -> Estimate | None:
        """Mean of the differences to another line, seed by seed."""
        both = [seed for seed in self.scores if seed in other.scores]
        return resampled([self.scores[x] - other.scores[x] for x in both], self.ratio)


def measure_of(experiment: Experiment) -> str:
    """The measure that is compared: what is asked for, or AUC, or the root of the mean square."""
    asked = value_settings_of(experiment).measure
    return asked or ("rmse" if experiment.label.task == "regression" else "auc")


def value_lines(folder: GridFolder) -> tuple[list[Line], list[str]]:
    """What is known, a line each in the order of the cells, and what is not known yet.

    Raises:
        RunFolderError: a file of a cell is damaged.
    """
    measure = f"test_{measure_of(folder.experiment())}"
    found: dict[str, list[dict[str, Any]]] = {}
    failed = missing = 0
    cells = folder.cells()
    for cell in cells:
        path, about = folder.cells_path / cell.name, dict[str, Any](cell.about)
        records = found.setdefault(about["what"], [])
        if not is_done(path):
            failed += failure_of(path) is not None
            missing += failure_of(path) is None
            continue
        summary = RunFolder(path).summary()
        score = summary.get(measure)
        if score is not None and math.isfinite(score):
            alone = about["party"] or about["what"] == CENTRAL  # a stand-in's frames, in one place
            sent = sum(summary["bytes_up"].values()) + sum(summary["bytes_down"].values())
            share = None if alone else summary["wire_ratio"]
            about |= {"score": score, "sent": 0 if alone else sent, "share": share}
            records.append(about | read_json(path / CODEC))
    lines = [
        Line(
            what,
            {one["repeat"]: one["score"] for one in records},
            _mean([one["sent"] for one in records]) or 0.0,
            _mean([one["share"] for one in records if one["share"] is not None]),
            _mean([one["test_rows"] / one["train_rows"] for one in records]) or 0.0,
            sum(cell.about["what"] == what for cell in cells),
        )
        for what, records in found.items()
    ]
    return lines, left_out(len(cells), failed, missing, "trained")


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def sentences(lines: Sequence[Line], measure: str) -> list[str]:
    """What a reader wants to know first; only what the intervals say."""
    named = {line.what: line for line in lines if line.scores}
    split = named.pop(SPLIT, None)
    if split is None:
        return []
    sign, unit = (-1, "") if measure in LOWER_IS_BETTER else (1, "")
    unit = " points" if measure in SHARES else unit
    found = []
    alone = [line for what, line in named.items() if what.endswith(" alone")]
    for line in alone:
        less = split.less(line)
        if less is not None:
            text = score_text(less, measure, "+")
            gain = sign * less.mean - (less.half_width or math.inf)
            verdict = "joining buys that" if gain > 0 else "no gain is shown"
            found.append(f"split less {line.what}: {text}{unit}; {verdict}")
    for what in (CENTRAL, f"{BOOSTING}, all columns"):
        if what in named and (less := split.less(named[what])) is not None:
            inside = less.half_width is not None and abs(less.mean) <= less.half_width
            verdict = "within the interval of 0" if inside else "outside the interval of 0"
            found.append(f"split less {what}: {score_text(less, measure, '+')}{unit}; {verdict}")
    return found


def value_table(lines: Sequence[Line], measure: str) -> Table:
    """A line each: how good, how far from split, and what is sent."""
    split = next(line for line in lines if line.what == SPLIT)
    less = "less split" + (", points" if measure in SHARES else "")
    head = ["training", measure.replace("_", " "), less, "bytes", "of dense", "seeds"]
    rows = [
        [
            line.what,
            score_text(line.score, measure),
            "" if line is split else score_text(line.less(split), measure, "+"),
            size(round(line.sent)) if line.sent else "",
            "" if line.share is None else f"{100 * line.share:.2f} %",
            f"{len(line.scores)} of {line.cells}",
        ]
        for line in lines
    ]
    return Table(head, rows)


def write_value(folder: GridFolder) -> tuple[str, dict[str, Any]]:
    """Write `results.json` and `table.md` from what the cells hold.

    Returns:
        The table in Markdown with what it says, and the content of the JSON file.
    """
    measure = measure_of(folder.experiment())
    lines, missing = value_lines(folder)
    said = sentences(lines, measure)
    split = next(line for line in lines if line.what == SPLIT)
    records = [
        {
            "training": line.what,
            measure: asdict(found) if (found := line.score) else None,
            "less_split": asdict(less) if (less := line.less(split)) and line != split else None,
            "scores": dict(line.scores),
            "bytes": line.sent,
            "of_dense": line.share,
        }
        for line in lines
    ]
    content = {"measure": measure, "trainings": records, "sentences": said}
    return write_tables(folder.path, content, [value_table(lines, measure)], said + missing)
