"""What a label party reads of another party's columns, before and behind each protection.

    python -m benchmarks.columns --seeds 0,1,2 --out columns.csv

Two tables below the folder in VFL_DATA, three parties each. The label party holds columns of its
own, and whole rows of the attacked party for some customers; of test rows it wants every column.
Categories are read by the composed attacker (`adaptive`), scored by the AUC of one value against
the rest; numbers by the best of several regressions, chosen on rows that the attacker knows, scored
by R2 of their rank. Each is done from the label party's own columns alone, from cuts alone, and
from both; the first is the guess beside which the better of the others is to be read. A line of
--out is a column; what is there is not trained again.
"""

from __future__ import annotations

import csv
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import harness
from vfl import attacks
from vfl.attacks.cases import Victim, draw_columns
from vfl.attacks.labels.regression import predicted
from vfl.attacks.view import Evidence, Holdings, ThreatModel, View
from vfl.config import Experiment
from vfl.core.seeds import generator, use_one_thread
from vfl.experiments.tables import Table
from vfl.training.local import LocalSession
from vfl.training.run import load_data

_WIDTH, _TARGETS, _COMMON, _FOLDS = 32, 4000, 8, 3
#: Layers that each attack reads.
READS = {"own": "inputs", "cut": "cut", "both": "cut+inputs"}


@dataclass(frozen=True)
class TableTask:
    """A table, who holds what of it, and which columns are looked for.

    Attributes:
        source: below the folder of data sets.
        separator: of its cells.
        label: the label party and its column.
        parties: their columns.
        wanted: columns that are looked for, by party, and whether each is a number.
    """

    source: str
    separator: str
    label: tuple[str, str]
    parties: Mapping[str, Sequence[str]]
    wanted: Mapping[str, Mapping[str, bool]]

    @property
    def columns(self) -> list[str]:
        """All that are looked for."""
        return [each for some in self.wanted.values() for each in some]

    def experiment(self, seed: int, changes: Mapping[str, Any], folder: Path) -> Experiment:
        """The training with one protection."""
        bottom = changes.get("bottom", "mlp:hidden=64")
        party = {"width": changes.get("width", _WIDTH), "bottom": bottom}
        own = {name: party | {"columns": list(some)} for name, some in self.parties.items()}
        settings: dict[str, Any] = {
            "name": "columns",
            "seed": seed,
            "data": {
                "source": str(folder / self.source), "separator": self.separator, "bins": 16,
                "validation": 0.1, "test": 0.2, "split": "stratified",
            },
            "label": {"party": self.label[0], "column": self.label[1], "top": "mlp:hidden=32"},
            "train": {"epochs": 6, "batch_size": 256, "learning_rate": 2e-3},
            "parties": own,
        }  # fmt: skip
        more = {name: value for name, value in changes.items() if name not in ("bottom", "width")}
        return Experiment.model_validate(settings | more)


TASKS = {
    "bank_marketing": TableTask(
        "bank-marketing/bank-full.csv.gz", ";", ("lender", "y"),
        {
            "campaign": ["campaign", "pdays", "previous", "day", "contact", "month", "poutcome"],
            "credit": ["balance", "default", "housing", "loan"],
            "lender": ["age", "job", "marital", "education"],
        },
        {
            "credit": {"balance": True, "housing": False},
            "campaign": {"contact": False, "poutcome": False},
        },
    ),
    "credit_default": TableTask(
        "credit-default/UCI_Credit_Card.csv.gz", ",", ("lender", "DEFAULT_PAYMENT_NEXT_MONTH"),
        {
            "bank": ["BILL_AMT*", "PAY_AMT*"],
            "bureau": ["PAY_0", "PAY_2", "PAY_3", "PAY_4", "PAY_5", "PAY_6"],
            "lender": ["LIMIT_BAL", "AGE", "SEX", "EDUCATION", "MARRIAGE"],
        },
        {
            "bank": {"BILL_AMT1": True, "PAY_AMT1": True},
            "bureau": {"PAY_0": False, "PAY_6": False},
        },
    ),
}  # fmt: skip
#: What protects, as changes of the experiment. `beaver` opens the sum of linear first layers, which
#: is what the training named so here sends; its other half, the protocol, tells no more.
PROTECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "width 4": {"width": 4},
    "width 1": {"width": 1},
    "topk:k=4,values=8": {"codec": "topk:k=4,values=8"},
    "quantise:values=2,grad=8": {"codec": "quantise:values=2,grad=8"},
    "sign:grad=8": {"codec": "sign:grad=8"},
    "nopeek:alpha=0.1": {"defense": "nopeek:alpha=0.1"},
    "nopeek:alpha=1": {"defense": "nopeek:alpha=1"},
    "nopeek:alpha=10": {"defense": "nopeek:alpha=10"},
    "clipped_noise:sigma=0.1": {"defense": "clipped_noise:sigma=0.1"},
    "clipped_noise:sigma=0.5": {"defense": "clipped_noise:sigma=0.5"},
    "clipped_noise:sigma=2": {"defense": "clipped_noise:sigma=2"},
    "label_free": {"defense": "label_free"},
    "secure sum": {"secure": "sum", "merge": "sum"},
    "beaver": {"merge": "sum", "bottom": "mlp:hidden=none"},
}
#: Those whose label party is sent nothing but the sum over the feature parties.
SUMMED = ("secure sum", "beaver")


@dataclass(frozen=True)
class ColumnRow:
    """What was read of one column.

    Attributes:
        task, protection, seed: of the training.
        utility: AUC of the task's test rows.
        column: that was looked for.
        measure: "auc" or "r2".
        own, cut, both: how well, by what was read.
        cpu_s: of the three attacks.
    """

    task: str
    protection: str
    seed: int
    utility: float
    column: str
    measure: str
    own: float
    cut: float
    both: float
    cpu_s: float


@dataclass(frozen=True)
class Known:
    """What the label party has of some rows: its own columns, and what it was sent."""

    own: Tensor
    cuts: Tensor

    def layers(self, reads: str) -> Tensor:
        """Axes (rows, features)."""
        parts = {"own": [self.own], "cut": [self.cuts], "both": [self.cuts, self.own]}[reads]
        return torch.cat(parts, 1)

    def evidence(self, labels: Tensor | None = None) -> Evidence:
        """The same for an attack on labels."""
        return Evidence(inputs=self.own, cuts=self.cuts, labels=labels)


def read_category(
    known: Known, labels: Tensor, asked: Known, truth: Tensor, reads: str, seed: int
) -> float:
    """AUC of each value against the rest, weighted by how many rows have it.

    Args:
        known: rows whose value the attacker knows.
        labels: the code of each.
        asked: rows that it is after.
        truth: their codes.
        reads: of READS.
        seed: what compositions are tried.
    """
    from sklearn.metrics import roc_auc_score

    classes = int(labels.max()) + 1
    attack = attacks.make(f"adaptive:at={READS[reads]},candidates=8")
    held = Holdings(asked.evidence(), known.evidence(labels), asked.evidence())
    threat = ThreatModel("label party", "inference", attack.needs)
    scores = attack.run(View(threat, classes, held), generator(seed, "columns")).softmax(1)
    found = []
    for code in range(classes):
        rows = (truth == code).numpy()
        if 0 < rows.sum() < len(rows):
            found.append((rows.sum(), roc_auc_score(rows, scores[:, code].numpy())))
        if classes == 2:
            break
    return float(np.average([auc for _, auc in found], weights=[count for count, _ in found]))


def read_number(known: Tensor, ranks: Tensor, asked: Tensor, truth: Tensor) -> float:
    """R2 of the ranks of numbers, by the regression that does best on rows that are held back.

    Args:
        known: rows whose number the attacker knows, axes (rows, features).
        ranks: of their numbers, axes (rows,).
        asked: rows that it is after, axes (rows, features).
        truth: the ranks of theirs.
    """
    everything = torch.cat([known, asked])
    mean, spread = everything.mean(0), everything.std(0).clamp_min(1e-6)
    known, asked = (known - mean) / spread, (asked - mean) / spread
    fold = torch.arange(len(known)) % _FOLDS

    def held_back(way: str) -> float:
        guesses = torch.empty_like(ranks)
        for one in range(_FOLDS):
            rest = fold != one
            guesses[~rest] = _regress(way, known[rest], ranks[rest], known[~rest])
        return _r2(guesses, ranks)

    best = max(_REGRESSIONS, key=held_back)
    return _r2(_regress(best, known, ranks, asked), truth)


_REGRESSIONS = ("ridge:0.001", "ridge:0.01", "ridge:0.1", "kernel:1", "kernel:10", "neighbours:1",
                "trees", "mlp")  # fmt: skip


def _regress(way: str, known: Tensor, numbers: Tensor, asked: Tensor) -> Tensor:
    name, _, strength = way.partition(":")
    mean = numbers.mean()
    if name in ("ridge", "kernel", "neighbours"):
        return mean + predicted(known, numbers - mean, asked, name, float(strength))  # type: ignore[arg-type]
    model = _model(name).fit(known.numpy(), numbers.numpy())
    return torch.from_numpy(model.predict(asked.numpy())).float()


def _model(name: str) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.neural_network import MLPRegressor

    if name == "trees":
        return HistGradientBoostingRegressor(max_iter=50, min_samples_leaf=10, random_state=0)
    return MLPRegressor(
        hidden_layer_sizes=(64,), alpha=1e-2, max_iter=500, tol=1e-3, random_state=0
    )


def _r2(guesses: Tensor, truth: Tensor) -> float:
    return float(1 - (guesses - truth).square().mean() / truth.var(unbiased=False))


def codes_of(column: np.ndarray, known: np.ndarray) -> Tensor:
    """Categories as codes: those that enough known rows have, and one for all others."""
    values, counts = np.unique(column[known], return_counts=True)
    common = values[counts >= _COMMON]
    found = np.full(len(column), len(common))
    for code, value in enumerate(common):
        found[column == value] = code
    if not (found[known] == len(common)).any():  # nobody is known to be of the others
        found = np.minimum(found, len(common) - 1)
    return torch.from_numpy(found)


def ranks_of(column: np.ndarray, known: np.ndarray) -> Tensor:
    """Share of the known rows that are not above each number, in 0 to 1."""
    ordered = np.sort(column[known])
    low, high = (np.searchsorted(ordered, column, side) for side in ("left", "right"))
    return torch.from_numpy((low + high) / (2 * len(ordered))).float()


def rows_of(
    name: str, protection: str, seed: int, leaks: int, alone: Mapping[str, float], folder: Path
) -> Iterator[ColumnRow]:
    """Train once, and look for each column.

    Args:
        name: of the task.
        protection: of PROTECTIONS.
        seed: of the training, of the split, and of who leaked.
        leaks: rows that the attacker knows.
        alone: what own columns tell of each column, where that is known; no training changes it.
        folder: of the data sets.
    """
    import pandas as pd
    from sklearn.metrics import roc_auc_score

    task = TASKS[name]
    experiment = task.experiment(seed, PROTECTIONS[protection], folder)
    data = load_data(experiment)
    label = data[experiment.label.party]
    session = LocalSession(experiment, data, outputs=label.outputs).run()
    answers = torch.cat(session.label.tested).softmax(1)[:, 1].numpy()
    assert label.labels is not None
    assert label.inputs is not None
    utility = float(roc_auc_score(label.labels[label.split.test].numpy(), answers))
    draw = generator(seed, "leak")
    leaked = draw_columns(torch.from_numpy(label.split.validation), leaks, draw, "validation")
    test = torch.from_numpy(label.split.test)
    groups = leaked[:leaks], test[torch.randperm(len(test), generator=draw)[:_TARGETS]]
    weights = session.weights()
    sent = {
        each: [Victim(experiment, data, each, weights[each]).cuts(rows) for rows in groups]
        for each in experiment.feature_parties
    }
    table = pd.read_csv(folder / task.source, sep=task.separator)
    for victim, column, is_number in (
        (victim, *each) for victim, some in task.wanted.items() for each in some.items()
    ):
        senders = list(sent) if protection in SUMMED else [victim]
        known, asked = (
            Known(label.inputs[rows], torch.stack([sent[each][at] for each in senders]).sum(0))
            for at, rows in enumerate(groups)
        )
        coded = (ranks_of if is_number else codes_of)(table[column].to_numpy(), groups[0].numpy())
        facts, truth = coded[groups[0]], coded[groups[1]]
        started, found = time.process_time(), {}
        for reads in READS:
            if reads == "own" and column in alone:
                found[reads] = alone[column]
            elif is_number:
                found[reads] = read_number(known.layers(reads), facts, asked.layers(reads), truth)
            else:
                found[reads] = read_category(known, facts, asked, truth, reads, seed)
        spent = time.process_time() - started
        measure = "r2" if is_number else "auc"
        yield ColumnRow(name, protection, seed, utility, column, measure, **found, cpu_s=spent)


def measure(asked: Namespace) -> list[ColumnRow]:
    """Train and attack what `--out` does not have yet; all its rows of the tasks asked for."""
    use_one_thread()
    folder = Path(os.environ["VFL_DATA"])
    found = stored(asked.out)
    done = {(row.task, row.protection, row.seed) for row in found}
    for seed in harness.numbers(asked.seeds):
        for name in asked.tasks:
            for protection in asked.protections or PROTECTIONS:
                if (name, protection, seed) in done:
                    continue
                of_seed = [row for row in found if (row.task, row.seed) == (name, seed)]
                alone = {row.column: row.own for row in of_seed}
                new = list(rows_of(name, protection, seed, asked.leaks, alone, folder))
                store(asked.out, new)
                found += new
                print(f"{name} {protection} seed {seed}", file=sys.stderr, flush=True)
    return [row for row in found if row.task in asked.tasks]


def stored(path: Path) -> list[ColumnRow]:
    """The rows of a file; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as lines:
        return [_row(line) for line in csv.DictReader(lines)]


def _row(line: Mapping[str, str]) -> ColumnRow:
    texts = {"task", "protection", "column", "measure"}
    return ColumnRow(
        **{  # type: ignore[arg-type]
            name: text if name in texts else int(text) if name == "seed" else float(text)
            for name, text in line.items()
        }
    )


def store(path: Path, rows: Sequence[ColumnRow]) -> None:
    """Add the rows of one training."""
    begun = path.exists()
    with path.open("a", newline="") as lines:
        writer = csv.DictWriter(lines, [each.name for each in fields(ColumnRow)])
        if not begun:
            writer.writeheader()
        for row in rows:
            values = asdict(row)
            writer.writerow(
                {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in values.items()}
            )


def reached(rows: Sequence[ColumnRow], column: str) -> list[float]:
    """How well a column is read behind one protection, of each seed.

    By cuts or by all that the attacker has, whichever is better on average.
    """
    some = [row for row in rows if row.column == column]
    return max(([row.cut for row in some], [row.both for row in some]), key=fmean)


def table(rows: Sequence[ColumnRow]) -> str:
    """One line a protection: utility, and how well each column is read; first without any cut.

    Means over seeds, and by how much seeds differ at most.
    """
    parts = []
    for name in dict.fromkeys(row.task for row in rows):
        of_task = [row for row in rows if row.task == name]
        wanted = TASKS[name].columns
        measures = {row.column: row.measure for row in of_task}
        found = {"nothing sent": [[r.own for r in of_task if r.column == c] for c in wanted]}
        utility = {"nothing sent": ""}
        for protection in dict.fromkeys(row.protection for row in of_task):
            some = [row for row in of_task if row.protection == protection]
            found[protection] = [reached(some, column) for column in wanted]
            utility[protection] = f"{fmean(row.utility for row in some):.3f}"
        lines = [
            [
                protection, utility[protection], *(f"{fmean(each):.3f}" for each in columns),
                f"{max(max(each) - min(each) for each in columns):.3f}",
            ]
            for protection, columns in found.items()
        ]  # fmt: skip
        head = [f"{column}, {measures[column]}" for column in wanted]
        made = Table(["protection", "utility, auc", *head, "seeds differ by at most"], lines)
        parts.append(f"{name}\n{made.markdown()}")
    return "\n".join(parts)


def main() -> None:
    """Read the command line."""
    options = harness.parser("columns", "What a label party reads of another party's columns.")
    options.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    options.add_argument("--protections", nargs="+", choices=PROTECTIONS, metavar="NAME")
    options.add_argument("--seeds", default="0,1,2")
    options.add_argument("--leaks", type=int, default=400, help="rows that the attacker knows")
    options.add_argument("--out", type=Path, default=Path("columns.csv"))
    harness.run(options, measure, table)


if __name__ == "__main__":
    main()
