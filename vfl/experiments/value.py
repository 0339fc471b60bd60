"""Value of a federation: quality of each party alone and of all together; cost of protection.

Every cell (training) is trained and tested on the rows that all parties have. So cells differ only
in the columns, in whether the training is split, or in the protection of the training.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.config import Experiment, PartySettings, TraceSettings, ValueSettings
from vfl.config.run_folder import RunFolder
from vfl.config.validate import STUDIES, check_one_label_party
from vfl.core.errors import RunFolderError
from vfl.core.storage import stamp, write_json
from vfl.core.traffic import Ledger
from vfl.experiments.cells import CODEC, Cell, GridFolder, data_digest, is_done, is_grid
from vfl.experiments.statistics import Estimate, paired_difference
from vfl.experiments.tables import MEASURES, SHARES, score_text

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from vfl.datasets import PartyData

SPLIT, CENTRAL, BOOSTING = "split", "the same network, in one place", "gradient boosting"
#: Largest number of trees of gradient boosting; the validation rows determine how many trees are
#: used.
_TREES, _TREE_RATE = 300, 0.05
#: Limits of trees, rows and classes for the model of the label party's columns, which is trained
#: after every training and must be cheap.
_FEW_TREES, _SAMPLE_ROWS, _MOST_CLASSES = 100, 20_000, 20
#: Name of the subfolder of a run or a study for the trainings of each party alone.
_ALONE = "alone"


def value_settings_of(experiment: Experiment) -> ValueSettings:
    """Return the experiment's [value] table, or default settings if it has none."""
    return experiment.value or ValueSettings()


def value_cells(experiment: Experiment) -> list[Cell]:
    """Return the cells of a value study, ordered by seed.

    Args:
        experiment: the experiment; the study also measures the experiment's own codec, defense and
            secure mode.
    """
    from vfl import models

    check_one_label_party(experiment, "vfl value")
    settings = value_settings_of(experiment)
    plain = experiment.model_copy(
        update=dict.fromkeys(STUDIES)
        | {"trace": TraceSettings(), "codec": "none", "defense": "none", "secure": "none"}
    )
    label = experiment.label.party
    own = {name: {name: experiment.parties[name]} for name in experiment.parties}
    # One stand-in party has all columns, and merges the cuts of its bottom models itself, so that
    # the top model gets an input of the expected width.
    merged = [one.width for one in experiment.parties.values()]
    whole = {"": PartySettings(width=models.make_merger(experiment.merge).width(merged))}
    asked: list[tuple[str, str, Experiment]] = []
    for name in sorted(own, key=lambda name: name != label):  # the label party is the first
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
    """Return a training in which one stand-in party has all columns, besides the label party."""
    name = "alone" if plain.label.party != "alone" else "single"
    (one,) = parties.values()
    return plain.model_copy(update={"parties": {name: one}, "merge": "concat"})


def alone_folder(path: Path) -> GridFolder:
    """Return the grid folder with the trainings of each party alone, for a run or study."""
    return GridFolder(path / _ALONE)


def plan_alone(path: Path) -> tuple[Experiment, list[Cell]]:
    """Return the trainings of each party alone, on the data of a run or of a study's repeats.

    These trainings use the data, seeds and settings of the run or study, but no codec, defense or
    secure mode.

    Raises:
        ConfigError: the experiment has several label parties, or a party in the middle.
        RunFolderError: the run is not finished, or no single process has the data of all parties.
    """
    if is_grid(path):
        folder = GridFolder(path)
        if folder.modules is not None:
            raise RunFolderError(
                "a caller's functions made the models and the data of this grid",
                where=str(path),
                want="a study of an experiment file",
            )
        found, trainings = folder.experiment(), dict[str, Experiment]()
        for cell in folder.cells():
            trainings.setdefault(cell.repeat, cell.experiment)
    else:
        run = RunFolder.open(path)
        run.summary()
        if run.mode != "in-process":
            raise RunFolderError(
                "no process has the rows of all parties of this run",
                where=str(path),
                fix="vfl value FILE, with an experiment file that names every table",
            )
        found = run.experiment()
        trainings = {str(found.seed): found}
    asked: dict[str, Any] = dict.fromkeys(STUDIES)
    cells = []
    for repeat, one in trainings.items():
        settings = ValueSettings(seeds=(one.seed,), codecs=(), defenses=())
        planned = value_cells(one.model_copy(update=asked | {"value": settings}))
        cells += [
            replace(cell, about={**cell.about, "repeat": repeat})
            for cell in planned
            if cell.about["party"] and BOOSTING not in cell.about["what"]
        ]
    return found.model_copy(update=asked | {"value": ValueSettings()}), cells


def alone_scores(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the metrics of each party alone, by party and repeat; empty without such trainings.

    Args:
        path: folder of the run or study.

    Raises:
        RunFolderError: a file of these trainings is damaged.
    """
    from vfl.experiments.staleness import stale_cells

    folder, found = alone_folder(path), dict[str, dict[str, dict[str, Any]]]()
    stale = stale_cells(folder) if is_grid(folder.path) else {}
    for cell in folder.cells() if is_grid(folder.path) else ():
        own = folder.cells_path / cell.name
        if is_done(own) and cell.name not in stale:
            found.setdefault(cell.about["party"], {})[cell.repeat] = RunFolder(own).summary()
    return found


def gains_over_alone(path: Path, measure: str, reached: Mapping[str, float]) -> str:
    """Return, as text, a training's gain over each party alone; empty if that gain is unknown.

    Args:
        path: folder of the run or study.
        measure: metric by which the trainings are compared.
        reached: score of the training, by repeat.
    """
    words = []
    for party, own in alone_scores(path).items():
        name = f"test_{measure}"
        scores = {repeat: one[name] for repeat, one in own.items() if one.get(name) is not None}
        if scores.keys() & reached.keys():
            less = score_text(paired_difference(reached, scores), measure, "+")
            words.append(f"{less}{' points' * (measure in SHARES)} over {party} alone")
    return ", ".join(words)


def run_value_cell(
    cell: Cell, folder: GridFolder, data: Mapping[str, PartyData], device: str
) -> None:
    """Complete a cell; continue where an earlier call stopped.

    Args:
        cell: the cell to complete.
        folder: folder of the study, whose experiment states the columns of each party.
        data: data of every party.
        device: device on which the networks are trained.
    """
    from vfl.experiments.staleness import put_aside_if_stale
    from vfl.experiments.training import train_cell

    what, path = cell.about["what"], folder.cells_path / cell.name
    rows = data if len(cell.experiment.parties) > 1 or _is_split(cell) else gathered(cell, data)
    put_aside_if_stale(cell, folder, data_digest(rows))
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
    """Return whether a cell trains the experiment's own parties with their own columns."""
    what = cell.about["what"]
    return not cell.about["party"] and what != CENTRAL and BOOSTING not in what


def gathered(cell: Cell, data: Mapping[str, PartyData]) -> dict[str, PartyData]:
    """Return the data of the stand-in, with one or all parties' columns, and of the label party."""
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
    """Return a party's inputs; the inputs that encode bins of one number become one column again.

    The sum of the inputs that encode a number's bins increases with the number, and trees need only
    the order of values.
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
    """Return all bottom models as one module, which merges their cuts as the label party does."""
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
    widths = [experiment.parties[name].width for name in data if data[name].inputs is not None]
    merger = models.make_merger(experiment.merge).build(widths)
    return models.JointBottom(parts, shapes, merger)


def _boost(cell: Cell, folder: GridFolder, data: Mapping[str, PartyData]) -> None:
    """Train gradient boosting on the columns of a cell's stand-in party, unless it is trained."""
    path = folder.cells_path / cell.name
    if (path / "summary.json").exists():
        return
    shutil.rmtree(path, ignore_errors=True)
    run = RunFolder.create(path, cell.experiment, "in-process", str(folder.head("command")))
    (inputs,) = _inputs(data)
    label = data[cell.experiment.label.party]
    figures = boosted(inputs, label, label.split.train, cell.experiment.seed, _TREES)
    nothing_sent: dict[str, Any] = {"bytes_up": {}, "bytes_down": {}, "wire_ratio": None}
    run.finish(figures | nothing_sent | {"seconds": 0.0}, Ledger())


def boosted(
    inputs: Tensor, label: PartyData, train: np.ndarray, seed: int, most_trees: int
) -> dict[str, float]:
    """Return test metrics of scikit-learn's histogram gradient boosting.

    Args:
        inputs: inputs of all rows, axes (rows, ...).
        label: labels and split of the label party's rows.
        train: positions of the rows to train on.
        seed: seed of the boosting.
        most_trees: largest number of trees. The validation rows determine the number of trees that
            are kept; the entry `epochs` of the result is this number.
    """
    import numpy as np
    import torch
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    from vfl.session.label.quality import classification_quality, regression_quality

    assert label.labels is not None
    columns, truth, split = inputs.flatten(1).numpy(), label.labels.numpy(), label.split
    regression = label.classes is None
    kind = HistGradientBoostingRegressor if regression else HistGradientBoostingClassifier
    options = {"max_iter": most_trees, "learning_rate": _TREE_RATE, "early_stopping": False}
    trees = kind(**options, random_state=seed)
    trees.fit(columns[train], truth[train])

    stages = trees.staged_predict if regression else trees.staged_predict_proba

    def loss(answers: Any) -> float:
        true = truth[split.validation]
        if regression:
            return float(np.square(answers - true).mean())
        return float(-np.log(answers[np.arange(len(true)), true].clip(1e-12)).mean())

    best = most_trees - 1
    if len(split.validation):
        best = int(np.argmin([loss(stage) for stage in stages(columns[split.validation])]))
    answers = next(one for place, one in enumerate(stages(columns[split.test])) if place == best)
    tested = label.labels[torch.from_numpy(split.test)]
    if regression:
        found = regression_quality(torch.from_numpy(answers)[:, None], tested)
    else:
        found = classification_quality(torch.from_numpy(np.log(answers.clip(1e-12))), tested)
    return {f"test_{name}": value for name, value in found.items()} | {"epochs": best + 1}


def label_alone(run: RunFolder, label: PartyData) -> bool:
    """Measure a model of only the label party's columns, if possible, and store its metrics.

    The model is gradient boosting, trained on the run's training rows, or on a sample of them if
    there are many, and tested on the run's test rows. The label party sends nothing for this.

    Args:
        run: folder of a finished run.
        label: data of the label party, with the split of the run's training.

    Returns:
        Whether the metrics were stored; this requires columns in memory, test rows, different
        labels, and not too many classes.
    """
    import numpy as np
    import torch

    few = label.classes is None or len(label.classes) <= _MOST_CLASSES
    train, split, seed = label.split.train, label.split, run.experiment().seed
    if type(label.inputs) is not torch.Tensor or label.labels is None or not few:
        return False
    learned = label.labels[torch.from_numpy(train)]
    if len(np.unique(learned)) < 2 or not len(split.test):
        return False
    if len(train) > _SAMPLE_ROWS:
        train = np.random.default_rng(seed).choice(train, _SAMPLE_ROWS, replace=False)
    inputs = for_trees(label)
    assert inputs is not None
    run.keep_label_alone(boosted(inputs, label, train, seed, _FEW_TREES))
    return True


def gain_over_label(run: RunFolder, measure: str, reached: float | None) -> str:
    """Return, as text, a run's gain over a model of its label party's columns; empty if unknown."""
    score = run.label_alone().get(f"test_{measure}")
    if score is None or reached is None:
        return ""
    less = score_text(paired_difference({"": reached}, {"": float(score)}), measure, "+")
    alone = score_text(Estimate(float(score), None, 1), measure)
    name = run.experiment().label.party
    of = f" {'points of ' * (measure in SHARES)}{MEASURES.get(measure, measure.upper())}"
    return f"{less}{of} over {name} alone ({alone}, {BOOSTING} on its own columns)"


def measure_of(experiment: Experiment) -> str:
    """Return the metric to compare: the requested metric, AUC, or root mean square error."""
    asked = value_settings_of(experiment).measure
    return asked or ("rmse" if experiment.label.task == "regression" else "auc")
