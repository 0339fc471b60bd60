"""Top models on label-free bottoms, where the label party sends no gradient: their accuracy.

    python -m benchmarks.frozen_tops --task bank        # goes on where it was left
    python -m benchmarks.frozen_tops --task mnist --seeds 5 --tops network,logistic,svm
    python -m benchmarks.frozen_tops --redraw           # the table of the stored rows

A label-free bottom model sends cuts and receives gradients of zeros. What a feature party receives
therefore does not depend on the top model. So an attack by this feature party is the same as the
attack on the victim with this bottom model in `benchmarks.frontier`.

Each top model learns from the cuts and the label party's own columns of the training rows.
`network` is the top model of the experiment; all other top models are variants of it, or learners
of scikit-learn. Gains are differences from `network` on the best label-free bottom of the frontier,
for each seed. The options of each top model are fixed in this file; no test row was used to choose
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.semi_supervised import SelfTrainingClassifier
from sklearn.svm import SVC

from benchmarks import frontier, harness
from benchmarks.frontier import settings_of
from benchmarks.frontier_tops import FILE, NETWORK, TopRow, table_of
from benchmarks.studies import read_rows, source_of, stored, write_rows
from vfl import train
from vfl.attacks.cases import Victim
from vfl.config import Experiment, with_overrides
from vfl.core.errors import BadOptionError
from vfl.core.registry import require_choice
from vfl.datasets import Split
from vfl.training.run import load_data
from vfl.training.specs import read_checked


def _logistic(seed: int) -> ClassifierMixin:
    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))


def _boosting(seed: int) -> ClassifierMixin:
    return HistGradientBoostingClassifier(
        learning_rate=0.05, max_iter=200, max_leaf_nodes=15, l2_regularization=1.0,
        early_stopping=True, random_state=seed,
    )  # fmt: skip


def _forest(seed: int) -> ClassifierMixin:
    return RandomForestClassifier(200, min_samples_leaf=5, random_state=seed)


def _svm(seed: int) -> ClassifierMixin:
    return make_pipeline(StandardScaler(), SVC(C=10, random_state=seed))


def _semi_supervised(seed: int) -> ClassifierMixin:
    learner = LogisticRegression(max_iter=300)
    return make_pipeline(StandardScaler(), SelfTrainingClassifier(learner, threshold=0.95))


#: Variants of the experiment's top, as changed settings: more epochs; batch normalisation; both.
VARIANTS: Mapping[str, Callable[[Experiment], list[str]]] = {
    "longer": lambda made: [f"train.epochs={6 * made.train.epochs}"],
    "normalised": lambda made: [f"label.top={made.label.top},batch_norm=true"],
    "normalised_longer": lambda made: [
        f"label.top={made.label.top},batch_norm=true",
        f"train.epochs={3 * made.train.epochs}",
    ],
}
#: Tops that also learn from the cuts of validation rows, without their labels.
SEMI_SUPERVISED = "semi_supervised"
#: Tops that predict no probabilities, so they have no AUC.
_WITHOUT_AUC = "svm"
#: Top models by name.
TOPS: Mapping[str, Callable[[int], Any]] = {
    "logistic": _logistic,
    "boosting": _boosting,
    "forest": _forest,
    "svm": _svm,
    SEMI_SUPERVISED: _semi_supervised,
}


#: Names of all top models.
NAMES = (NETWORK, *VARIANTS, *TOPS)


def best_of(task: str, page: Path) -> str:
    """Return the best label-free bottom of a task on the frontier."""
    rows = stored(page.with_name("frontier.csv"), frontier.COLUMNS)
    return frontier.frontier_of(rows[rows.task == task]).best.defense


def bottoms_of(task: str, best: str) -> list[str]:
    """Return the label-free bottoms to use: the best of a task, and principal components."""
    known = settings_of(task).defenses
    others = (one for one in ("label_free:features=0", "label_free") if one in known)
    return list(dict.fromkeys([best, *others]))


def experiment_of(task: str, defense: str, seed: int) -> Experiment:
    """Return the experiment that trains one victim of the frontier."""
    file = frontier.FOLDER / f"{task}.toml"
    experiment, _ = read_checked(file, source_of(file))
    made = with_overrides(experiment, [f"seed={seed}"])
    return made.model_copy(update={"defense": defense, "grid": None})


@dataclass(frozen=True, eq=False)
class Held:
    """The label party's data after the training of a victim.

    Attributes:
        columns: cuts and the party's own columns, axes (rows, columns).
        labels: axes (rows,).
        split: the rows for training, validation and test.
        network: utility of the experiment's own top model.
        variant: function that trains one of `VARIANTS` on the same rows, and returns its utility.
    """

    columns: np.ndarray
    labels: np.ndarray
    split: Split
    network: float
    variant: Callable[[str], float]

    @classmethod
    def of(cls, experiment: Experiment, out: Path, measure: str) -> Held:
        """Train a victim, and return the label party's data after the training."""
        run = train(experiment, runs=out.parent, name=out.name, progress=False)
        data = load_data(experiment)
        label = data[experiment.label.party]
        victims = [Victim.of_run(run.folder, data, one) for one in experiment.feature_parties]
        rows = torch.arange(len(victims[0].labels))
        held = [one.cuts(rows) for one in victims]
        if label.inputs is not None:
            held.append(label.inputs.flatten(1).float())

        def variant(name: str) -> float:
            changes = VARIANTS[name](experiment)
            folder = f"{out.name}-{name}"
            again = train(experiment, *changes, runs=out.parent, name=folder, progress=False)
            return float(again.summary[f"test_{measure}"])

        network = float(run.summary[f"test_{measure}"])
        labels = victims[0].labels.numpy()
        return cls(torch.cat(held, 1).numpy(), labels, label.split, network, variant)

    def utility(self, top: str, seed: int, measure: str) -> float:
        """Train a top model; return its accuracy on the test rows, or its AUC for two classes."""
        if top == NETWORK:
            return self.network
        if top in VARIANTS:
            return self.variant(top)
        rows, labels = self.split.train, self.labels[self.split.train]
        if top == SEMI_SUPERVISED:
            unknown = self.split.validation
            rows = np.concatenate([rows, unknown])
            labels = np.concatenate([labels, np.full(len(unknown), -1)])
        made = TOPS[top](seed).fit(self.columns[rows], labels)
        tested, truth = self.columns[self.split.test], self.labels[self.split.test]
        if measure == "auc":
            return float(roc_auc_score(truth, made.predict_proba(tested)[:, 1]))
        return float(accuracy_score(truth, made.predict(tested)))


def bench_tops(
    task: str | None = None,
    seeds: int = 3,
    tops: Sequence[str] = NAMES,
    bottoms: Sequence[harness.Whole] = (),
    out: Path = Path("runs/frozen_tops"),
    page: Path = Path("docs/results/frontier.md"),
    redraw: bool = False,
) -> list[TopRow]:
    """Train the missing label-free bottoms of a task, and several top models on each.

    Args:
        task: name of a file of examples/frontier.
        seeds: number of victims of each bottom.
        tops: names of the top models.
        bottoms: label-free defenses that train the bottoms; by default, the best of the frontier
            and principal components.
        out: folder for the runs.
        page: page of the frontier, beside which the CSV files lie.
        redraw: only write the table again, without training.
    """
    file = page.with_name(FILE)
    rows = read_rows(file, TopRow)
    if redraw:
        return rows
    if task is None:
        raise BadOptionError("no task is given to train", want="--task NAME, or --redraw")
    require_choice("task", task, frontier.TASKS)
    for top in tops:
        require_choice("top", top, NAMES)
    measure = settings_of(task).measure
    known = {(one.task, one.defense, one.seed, one.top) for one in rows}
    for defense in bottoms or bottoms_of(task, best_of(task, page)):
        for seed in range(seeds):
            left = [
                top
                for top in tops
                if (task, defense, seed, top) not in known
                and not (measure == "auc" and top == _WITHOUT_AUC)
            ]
            if not left:
                continue
            name = f"{task}-{defense.replace(':', '_')}-{seed}-{time.time_ns()}"
            held = Held.of(experiment_of(task, defense, seed), out / name, measure)
            for top in left:
                utility = held.utility(top, seed, measure)
                rows.append(TopRow(task, defense, seed, top, utility))
            rows.sort(key=lambda one: frontier.TASKS.index(one.task))
            write_rows(file, TopRow, rows)
            harness.say(f"{task}, {defense}, seed {seed}")
    return rows


def shown(rows: Sequence[TopRow]) -> str:
    """Return the table of all tasks."""
    page = Path("docs/results/frontier.md")
    tasks = dict.fromkeys(one.task for one in rows)
    return table_of(rows, {task: best_of(task, page) for task in tasks})


main = harness.command(bench_tops, shown)


if __name__ == "__main__":
    main()
