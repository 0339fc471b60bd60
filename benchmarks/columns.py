"""Attacks of a label party on another party's columns, with and without each protection.

    python -m benchmarks.columns --seeds 0,1,2     # goes on where it was left
    python -m benchmarks.columns --redraw          # page and pictures of the stored rows

The tasks are two tables and a set of pictures in the folder that VFL_DATA names, each with three
parties. The label party has its own columns, and for some customers it knows whole rows of the
attacked party. For the test rows the label party infers every column of the attacked party.

The composed attacker (`adaptive`) infers categories; its score is the AUC of each category against
all other categories. Numbers are inferred by the best of several regressions, chosen on known rows;
the score is the R2 of the ranks. Pictures are inferred by the best of several decoders, chosen in
the same way, and by a blend of decoders; the scores are the R2 of the pixels and the structural
similarity.

Each attack runs on three inputs: the label party's own columns alone, the received cuts alone, and
both together. The result for own columns alone is the reference; the better of the two other
results is compared with this reference.

Each training of a task is a run in a subfolder of one folder. A result row describes one column.
All result rows are in one CSV file, and the page and its pictures are made from this file only.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.studies import (
    EXAMPLES,
    Dot,
    Families,
    StudyPage,
    family_of,
    over,
    picture,
    read_rows,
    source_of,
    write_rows,
)
from vfl import attacks
from vfl.attacks.cases import Victim, draw_columns
from vfl.attacks.inputs.inversion import Inversion
from vfl.attacks.labels.regression import predicted
from vfl.attacks.scoring import structural_similarity
from vfl.attacks.transcript import Transcript
from vfl.attacks.view import Evidence, Holdings, ThreatModel, View
from vfl.attacks.wrappers import mean_cuts
from vfl.cli.study import say_cell
from vfl.config import Experiment, ValueSettings
from vfl.config.run_folder import RunFolder
from vfl.core.registry import require_choice
from vfl.core.seeds import generator, use_one_thread
from vfl.core.text import csv_text
from vfl.datasets import PartyData
from vfl.experiments.cells import Cell, GridFolder, is_done
from vfl.experiments.scheduler import run_cells
from vfl.experiments.study import overrides_of
from vfl.experiments.tables import Table
from vfl.experiments.training import DataCache
from vfl.experiments.value import SPLIT
from vfl.training.specs import read_checked

_TARGETS, _COMMON, _FOLDS = 4000, 8, 3
#: Measures: "auc" for the values of a category, "r2" for the rank of a number or for pixels, "ssim"
#: for pictures.
Measure = Literal["auc", "r2", "ssim"]
#: Values that the attack reads in each of the three cases: own columns, cuts, or both.
READS = {"own": "inputs", "cut": "cut", "both": "cut+inputs"}


@dataclass(frozen=True)
class Task:
    """The columns that the label party infers after a training of `examples/columns`.

    Attributes:
        utility: metric of the trained model's utility.
        wanted: columns to infer, by party, with the measure of each. For pictures, the target is
            the last party's part of each picture, as pixels and as a picture.
    """

    utility: str
    wanted: Mapping[str, Mapping[str, Measure]]


TASKS = {
    "bank_marketing": Task("auc", {
        "credit": {"balance": "r2", "housing": "auc"},
        "campaign": {"contact": "auc", "poutcome": "auc"},
    }),
    "credit_default": Task("auc", {
        "bank": {"BILL_AMT1": "r2", "PAY_AMT1": "r2"},
        "bureau": {"PAY_0": "auc", "PAY_6": "auc"},
    }),
    "fashion_mnist": Task("accuracy", {"right": {"pixels": "r2", "structure": "ssim"}}),
}  # fmt: skip
#: Protections by name, each with the settings of the experiment that it changes. The secure mode
#: `beaver` discloses only the sum of linear first layers. The training named "beaver" sends exactly
#: this sum, so the attacks read the same values as in the secure mode.
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
    "clipped_noise:sigma=0.5 six times": {"defense": "clipped_noise:sigma=0.5"},
    "clipped_noise:sigma=2 six times": {"defense": "clipped_noise:sigma=2"},
    "label_free": {"defense": "label_free"},
    "secure sum": {"secure": "sum", "merge": "sum"},
    "beaver": {"merge": "sum", "bottom": "mlp:hidden=none"},
}
#: Number of queries for the same rows, by protection; a protection that is not listed has one
#: query. Each repeated query has new noise, as in each epoch of a training, and the label party
#: averages the received cuts.
TIMES = {name: 6 for name in PROTECTIONS if name.endswith("six times")}
#: Party settings that a protection may change; all other changes are settings of the experiment.
_OF_PARTIES = ("width", "bottom")
#: Protections under which the label party receives only the sum of the feature parties' cuts.
SUMMED = ("secure sum", "beaver")
#: Name and colour of a protection's family, by the beginning of the protection's name.
FAMILIES: Families = {
    "none": ("undefended", 0), "width": ("narrow cut", 2), "topk": ("codec", 3),
    "quantise": ("codec", 3), "sign": ("codec", 3), "nopeek": ("NoPeek", 4),
    "clipped_noise": ("noise", 5), "label_free": ("label-free bottom", 1),
    "secure sum": ("secure sum", 6), "beaver": ("beaver", 7),
}  # fmt: skip


@dataclass(frozen=True)
class ColumnRow:
    """Result of the attacks on one column in one training.

    Attributes:
        task, protection, seed: name of the task, protection and seed of the training.
        utility: AUC on the task's test rows; for pictures, accuracy.
        column: the attacked column.
        measure: one of `Measure`.
        own, cut, both: value of the measure if the attacker reads the label party's own columns,
            the cuts, or both.
        cpu_s: processor time of the three attacks, in seconds.
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
    """The label party's knowledge of some rows: its own columns and the received cuts."""

    own: Tensor
    cuts: Tensor

    def layers(self, reads: str) -> Tensor:
        """Return the values that the attack reads; axes (rows, features)."""
        parts = {"own": [self.own], "cut": [self.cuts], "both": [self.cuts, self.own]}[reads]
        return torch.cat(parts, 1)

    def evidence(self, labels: Tensor | None = None) -> Evidence:
        """Return the same knowledge in the form for attacks on labels."""
        return Evidence(inputs=self.own, cuts=self.cuts, labels=labels)


def read_category(
    known: Known, labels: Tensor, asked: Known, truth: Tensor, reads: str, seed: int
) -> float:
    """Return the AUC of each value against all other values; the mean is weighted by row counts.

    Args:
        known: rows for which the attacker knows the value.
        labels: code of the value in each of these rows.
        asked: rows for which the attacker infers the value.
        truth: their codes.
        reads: key of READS, which selects the values that the attack reads.
        seed: seed that determines the attacker's compositions.
    """
    from sklearn.metrics import roc_auc_score

    classes = int(labels.max()) + 1
    attack = attacks.make(f"adaptive:at={READS[reads]},candidates=15")
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
    """Return the R2 of inferred ranks of numbers, by the regression that is best on held-out rows.

    Args:
        known: rows for which the attacker knows the number, axes (rows, features).
        ranks: ranks of these known numbers, axes (rows,).
        asked: rows for which the attacker infers the number, axes (rows, features).
        truth: true ranks of the inferred numbers.
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


_DECODERS = ("ridge:0.001", "ridge:0.01", "ridge:0.1", "kernel:1", "kernel:10", "neighbours:1",
             "convolutions")  # fmt: skip


def read_pictures(
    known: Known, pictures: Tensor, asked: Known, truth: Tensor, seed: int
) -> dict[str, dict[Measure, float]]:
    """Return the pixels' R2 (about the mean picture) and structural similarity, for each input.

    The inputs are own columns alone, cuts alone, and both together. Each of the first two inputs is
    decoded by the decoder that is best for it. For both together, the result is a blend of three
    guesses: those of these two decoders, and those of the best decoder of the concatenated inputs.

    Args:
        known: rows for which the attacker knows the picture.
        pictures: pictures of the known rows, axes (rows, channels, height, width).
        asked: rows for which the attacker infers the picture.
        truth: their pictures.
        seed: seed of initial weights and batches.
    """
    decoded = {
        reads: best_decoded(known.layers(reads), pictures, asked.layers(reads), seed)
        for reads in READS
    }
    guesses = {reads: each.asked for reads, each in decoded.items()}
    guesses["both"] = blended(list(decoded.values()), pictures)
    about = (truth - pictures.mean(0)).square().mean()
    return {
        reads: {
            "r2": 1 - float((each - truth).square().mean() / about),
            "ssim": structural_similarity(each, truth),
        }
        for reads, each in guesses.items()
    }


@dataclass(frozen=True, eq=False)
class Decoded:
    """Guesses of pictures by one decoder, axes (rows, channels, height, width).

    Attributes:
        held: guesses for known rows that were held out from the decoder's training.
        asked: guesses for the attacked rows.
    """

    held: Tensor
    asked: Tensor


def best_decoded(known: Tensor, pictures: Tensor, asked: Tensor, seed: int) -> Decoded:
    """Return the guesses of the decoder with the smallest squared error on held-out known rows.

    Args:
        known: rows for which the attacker knows the picture, axes (rows, features).
        pictures: pictures of the known rows, axes (rows, channels, height, width).
        asked: rows for which the attacker infers the picture, axes (rows, features).
        seed: seed of initial weights and batches.
    """
    held = _held_back(len(known))
    tried = {
        way: _decode(way, known[~held], pictures[~held], known[held], seed) for way in _DECODERS
    }
    best = min(tried, key=lambda way: float((tried[way] - pictures[held]).square().mean()))
    return Decoded(tried[best], _decode(best, known, pictures, asked, seed))


def blended(decoded: Sequence[Decoded], pictures: Tensor) -> Tensor:
    """Return a weighted sum of several decoders' guesses for the attacked rows.

    The weights minimise the squared error on held-out known rows, after the mean picture is
    subtracted. Each column of pixels has its own weights, because the attacker's own columns
    predict neighbouring pixels better than distant ones.

    Args:
        decoded: guesses of several decoders.
        pictures: pictures of the known rows.
    """
    middle, held = pictures.mean(0), pictures[_held_back(len(pictures))]

    # The result has axes (width, pixels, decoders).
    def by_column(guesses: Sequence[Tensor]) -> Tensor:
        return torch.stack([each - middle for each in guesses], -1).movedim(-2, 0).flatten(1, -2)

    weights = torch.linalg.lstsq(
        by_column([each.held for each in decoded]), by_column([held])
    ).solution
    found: Tensor = by_column([each.asked for each in decoded]) @ weights
    asked = decoded[0].asked
    return middle + found.reshape(asked.shape[-1], *asked.shape[:-1]).movedim(0, -1)


def _held_back(rows: int) -> Tensor:
    return torch.arange(rows) % _FOLDS == 0


def _decode(way: str, known: Tensor, pictures: Tensor, asked: Tensor, seed: int) -> Tensor:
    name, _, strength = way.partition(":")
    if name == "convolutions":
        attack = Inversion()
        threat = ThreatModel("label party", "inference", attack.needs)
        held = Holdings(Evidence(cuts=asked), Evidence(cuts=known, inputs=pictures))
        return attack.run(View(threat, 0, held), generator(seed, "decoder"))
    everything = torch.cat([known, asked])
    mean, spread = everything.mean(0), everything.std(0).clamp_min(1e-6)
    known, asked = (known - mean) / spread, (asked - mean) / spread
    middle = pictures.mean(0)
    flat = (pictures - middle).flatten(1)
    found = predicted(known, flat, asked, name, float(strength))  # type: ignore[arg-type]
    return middle + found.reshape(-1, *pictures.shape[1:])


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
    """Return categories as codes: one for each frequent category, one for all others."""
    values, counts = np.unique(column[known], return_counts=True)
    common = values[counts >= _COMMON]
    found = np.full(len(column), len(common))
    for code, value in enumerate(common):
        found[column == value] = code
    if not (found[known] == len(common)).any():  # no known row has one of the other categories
        found = np.minimum(found, len(common) - 1)
    return torch.from_numpy(found)


def ranks_of(column: np.ndarray, known: np.ndarray) -> Tensor:
    """Return, for each number, the fraction of known rows whose number is not larger."""
    ordered = np.sort(column[known])
    low, high = (np.searchsorted(ordered, column, side) for side in ("left", "right"))
    return torch.from_numpy((low + high) / (2 * len(ordered))).float()


def experiment_of(name: str, protection: str, seed: int) -> Experiment:
    """Return the experiment of a task's training with one protection."""
    file, changes = EXAMPLES / "columns" / f"{name}.toml", PROTECTIONS[protection]
    asked = {key: value for key, value in changes.items() if key not in _OF_PARTIES}
    for party in read_checked(file, [])[0].parties:
        own = {key: value for key, value in changes.items() if key in _OF_PARTIES}
        asked |= {f"parties.{party}.{key}": value for key, value in own.items()}
    overrides = [*source_of(file), *overrides_of(None, {"seed": seed, **asked})]
    return read_checked(file, overrides)[0]


def cells_of(name: str, trainings: Sequence[tuple[int, str]]) -> list[Cell]:
    """Return a task's trainings as grid cells, the form in which `vfl value` measures a cost.

    Args:
        name: name of the task.
        trainings: seed and protection of each training.
    """
    return [
        Cell(
            experiment_of(name, protection, seed),
            f"{protection} seed={seed}",
            {
                "what": SPLIT if protection == "none" else protection,
                "party": "",
                "repeat": str(seed),
            },
            victim=protection,
        )
        for seed, protection in trainings
    ]


def rows_of(
    name: str,
    protection: str,
    run: RunFolder,
    data: Mapping[str, PartyData],
    leaks: int,
    alone: Mapping[str, float],
) -> Iterator[ColumnRow]:
    """Attack each target column in a finished training, and yield a result row for each.

    Args:
        name: name of the task.
        protection: name of the protection, a key of PROTECTIONS.
        run: run folder of the training, whose seed also selects the leaked rows.
        data: data of every party.
        leaks: number of rows that the attacker knows.
        alone: results for own columns alone, by column, if they are already computed; these results
            do not depend on the training.
    """
    task, experiment = TASKS[name], run.experiment()
    label, seed = data[experiment.label.party], experiment.seed
    assert label.inputs is not None
    utility = run.summary()[f"test_{task.utility}"]
    draw = generator(seed, "leak")
    leaked = draw_columns(torch.from_numpy(label.split.validation), leaks, draw, "validation")
    test = torch.from_numpy(label.split.test)
    groups = leaked[:leaks], test[torch.randperm(len(test), generator=draw)[:_TARGETS]]
    parties = {each: Victim.of_run(run, data, each) for each in experiment.feature_parties}
    times, again = TIMES.get(protection, 1), generator(seed, "again")
    sent = {
        each: [_received(party, rows, times, again) for rows in groups]
        for each, party in parties.items()
    }
    for victim, wanted in task.wanted.items():
        senders = list(sent) if protection in SUMMED else [victim]
        known, asked = (
            Known(
                label.inputs[rows].flatten(1),
                torch.stack([sent[each][at] for each in senders]).sum(0),
            )
            for at, rows in enumerate(groups)
        )
        if not experiment.is_table:
            pictures = data[victim].inputs
            assert pictures is not None
            read = _pictures_read(wanted, known, asked, pictures, groups, seed)
        else:
            read = _columns_read(experiment, wanted, known, asked, groups, alone)
        for column, found, spent in read:
            yield ColumnRow(
                name, protection, seed, utility, column, wanted[column], **found, cpu_s=spent
            )


def _received(party: Victim, rows: Tensor, times: int, draw: torch.Generator) -> Tensor:
    """Return the mean of the cuts that the label party receives when it repeats a query."""
    if times == 1:
        return party.cuts(rows)
    return mean_cuts(Transcript(len(rows), party.asked_again(rows, times, draw)))


#: Type: an attacked column, the attack's result for each key of READS, and the processor time.
Read = tuple[str, dict[str, float], float]


def _columns_read(
    experiment: Experiment, wanted: Mapping[str, Measure], known: Known, asked: Known,
    groups: Sequence[Tensor], alone: Mapping[str, float],
) -> Iterator[Read]:  # fmt: skip
    import pandas as pd

    table = pd.read_csv(experiment.data.source, sep=experiment.data.separator)
    for column, measure in wanted.items():
        coded = ranks_of if measure == "r2" else codes_of
        codes = coded(table[column].to_numpy(), groups[0].numpy())
        facts, truth = codes[groups[0]], codes[groups[1]]
        started, found = time.process_time(), {}
        for reads in READS:
            if reads == "own" and column in alone:
                found[reads] = alone[column]
            elif measure == "r2":
                found[reads] = read_number(known.layers(reads), facts, asked.layers(reads), truth)
            else:
                found[reads] = read_category(known, facts, asked, truth, reads, experiment.seed)
        yield column, found, time.process_time() - started


def _pictures_read(
    wanted: Mapping[str, Measure], known: Known, asked: Known, pictures: Tensor,
    groups: Sequence[Tensor], seed: int,
) -> Iterator[Read]:  # fmt: skip
    with harness.measured() as cost:
        facts, truth = (pictures[rows] for rows in groups)
        found = read_pictures(known, facts, asked, truth, seed)
    for column, measure in wanted.items():
        yield column, {reads: found[reads][measure] for reads in READS}, cost.cpu_s


def reached(rows: Sequence[ColumnRow], column: str) -> list[float]:
    """Return the result of the attacks on one column under one protection, for each seed.

    The result is the one for cuts alone, or the one for cuts and own columns together, whichever is
    better on average over the seeds.
    """
    some = [row for row in rows if row.column == column]
    return max(([row.cut for row in some], [row.both for row in some]), key=fmean)


def table_of(rows: Sequence[ColumnRow]) -> Table:
    """Return a table with a line for each protection: utility and results for each column.

    The table's first line shows the attack on own columns, without any cut.

    Values are means over seeds, with the largest difference between seeds, and the result of the
    function `opened`.

    Args:
        rows: result rows of a single task.
    """
    task = TASKS[rows[0].task]
    wanted = [each for some in task.wanted.values() for each in some]
    measures = {row.column: row.measure for row in rows}
    alone = [{r.seed: r.own for r in rows if r.column == column} for column in wanted]
    found = {"nothing sent": [list(each.values()) for each in alone]}
    utility, whole = {"nothing sent": ""}, {"nothing sent": "0"}
    for protection in dict.fromkeys(row.protection for row in rows):
        some = [row for row in rows if row.protection == protection]
        called = f"`{protection}`" if ":" in protection else protection
        found[called] = [reached(some, column) for column in wanted]
        utility[called] = f"{fmean(row.utility for row in some):.3f}"
        whole[called] = f"{100 * fmean(opened(some)):.0f}"
    lines = [
        [
            protection, utility[protection], *(f"{fmean(each):.3f}" for each in columns),
            f"{max(max(each) - min(each) for each in columns):.3f}", whole[protection],
        ]
        for protection, columns in found.items()
    ]  # fmt: skip
    head = ["protection", f"utility, {task.utility}"]
    head += [f"{column}, {measures[column]}" for column in wanted]
    head += ["seeds differ by at most", "inferred beyond own columns, %"]
    return Table(head, lines)


def table(rows: Sequence[ColumnRow]) -> str:
    """Return the tables of all tasks as text."""
    return "\n".join(f"{name}\n{table_of(own).markdown()}" for name, own in by_task(rows).items())


def by_task(rows: Sequence[ColumnRow]) -> dict[str, list[ColumnRow]]:
    """Return the result rows by task, in the order of TASKS."""
    found = {name: [row for row in rows if row.task == name] for name in TASKS}
    return {name: own for name, own in found.items() if own}


def opened(rows: Sequence[ColumnRow]) -> list[float]:
    """Return, by seed, the fraction of the gap from own columns alone to 1 that an attack closes.

    The fraction is the mean over columns of (reached - own) / (1 - own), because 1 is the best
    value of every measure in this module. The fraction is below 0 where cuts predict less than own
    columns alone.
    """
    found: list[list[float]] = []
    for column in dict.fromkeys(row.column for row in rows):
        own = [row.own for row in rows if row.column == column]
        read = zip(reached(rows, column), own, strict=True)
        found.append([(value - alone) / (1 - alone) for value, alone in read])
    return [fmean(each) for each in zip(*found, strict=True)]


def picture_of(rows: Sequence[ColumnRow]) -> str:
    """Draw a task's utility against the leakage of columns as SVG; a dot is a protection."""
    name, dots = rows[0].task, []
    utility = TASKS[name].utility
    for protection in dict.fromkeys(row.protection for row in rows):
        some = [row for row in rows if row.protection == protection]
        good = over({row.seed: row.utility for row in some}.values())
        read = over(opened(some))
        what = f"{protection}: {utility} {good.mean:.3f}, inferred {read.mean:.2f}"
        dots.append(Dot(family_of(protection, FAMILIES), what, read, good))
    return picture(
        f"{name}: test {utility} against inferred columns",
        f"test {utility}, percent", "; ".join(one.what for one in dots), dots,
        "percent inferred beyond own columns", FAMILIES,
    )  # fmt: skip


# --- page -----------------------------------------------------------------------------------------

SHOWN = """\
An undefended cut of 32 units discloses another party's columns almost exactly. Codecs, label-free
bottoms, a secure sum of two feature parties and `secure = "beaver"` do not prevent that.
Protections that hide categories cost at least 2.8 points of AUC (last column). The table is of bank
marketing and credit default. The label party knows 400 rows of the attacked party and receives each
cut once.

| protection | AUC of inferred categories | R2 of ranks of inferred numbers | points of AUC |
| --- | --- | --- | --- |
| own columns alone | .53 to .62 | .05 or less | |
| none | .99 or more | .85 to 1.00 | |
| a secure sum, `beaver` | .98 or more | | |
| a cut of one unit | .72 to .97 | .19 to .60 | a third at most |
| `nopeek:alpha=0.1`, `alpha=1` | .93 or more | .14 to .82 | half a point to 2 |
| noise of `sigma=0.1` | .77 to .95 | | less than half |
| noise of `sigma=0.5` | .58 to .88 | | 3 to 4 |
| noise of `sigma=2` | .53 to .65, from six cuts .60 to .81 | | 12 |

- In each epoch and each repeated query, a row's cut has new noise, so an attacker can average. With
  `sigma=0.5` on bank marketing it infers 44 % (*inferred beyond own columns*, below) from six cuts
  and 29 % from one cut. With `sigma=2` it infers 20 and 5 % (one seed).
- Protections that disclose under 8 % of pictures cost 4 to 10 points.
- Both tables were attacked by an earlier version of `adaptive`, with three equal votes. For
  pictures, four protections have three seeds, all others one.
"""
METHOD = """
## How it was measured

Three parties have columns of each table. The label party of bank marketing has age, job, marital
state and education; that of credit default has limit, age, sex, education and marital state.
Bottoms are `mlp:hidden=64`, the top is `mlp:hidden=32`, with cuts of width 32 and 6 epochs. The
attacker knows 400 whole validation rows, and attacks cuts of 4,000 test rows. `adaptive` infers
categories (AUC). For numbers, the best of five learners on held-back known rows is used (R2 of
ranks). Figures are those of the better of two attacks, on cuts alone and on cuts with own columns,
as means over seeds. *Inferred beyond own columns* is the mean of (reached - own) / (1 - own), where
*own* is the figure of an attack on the label party's own columns alone.

On fashion MNIST (6,000 pictures) the label party attacks the right nine columns of
pixels. R2 compares with the mean picture; *structure* is the mean SSIM.
With nine votes and seed 0 ([results](columns_reread.csv)), figures of categories change by -.027 to
+.060 and of numbers by -.020 to +.129. Only that of PAY_AMT1 behind noise changes by more than its
seeds differ (.129, .067).
"""
#: Protections that the results page shows.
ON_PAGE = (
    "nothing sent", "none", "width 1", "`nopeek:alpha=1`", "`clipped_noise:sigma=0.5`",
)  # fmt: skip


def task_section(rows: Sequence[ColumnRow], page: Path) -> Iterator[str]:
    """Return the page's section on one task; its picture is stored beside the page."""
    name = rows[0].task
    spoken, drawn = name.replace("_", " "), page.with_name(f"{page.stem}_{name}.svg")
    drawn.write_text(picture_of(rows), encoding="utf-8")
    yield f"\n## Columns of {spoken}\n"
    yield f"![{spoken}: utility against inferred columns]({drawn.name})\n"
    whole = table_of(rows)
    chosen = [line for line in whole.rows if line[0] in ON_PAGE]
    file = page.with_name(f"{page.stem}_table_{name}.csv")
    lines = (dict(zip(whole.head, line, strict=True)) for line in whole.rows)
    file.write_text(csv_text(whole.head, lines), encoding="utf-8")
    yield f"[All protections]({file.name}).\n"
    yield Table(whole.head, chosen or whole.rows).markdown()


PAGE = StudyPage[Sequence[ColumnRow]](
    "Columns of other parties that a label party infers",
    lambda found: "; `python -m benchmarks.columns`, [all results](columns.csv).",
    lambda found: [SHOWN],
    task_section,
    METHOD,
)


def bench_columns(
    tasks: Sequence[str] = tuple(TASKS),
    protections: Sequence[harness.Whole] = tuple(PROTECTIONS),
    seeds: Sequence[harness.OrZero] = (0, 1, 2),
    leaks: int = 400,
    jobs: int = 1,
    out: Path = Path("runs/columns"),
    page: Path = Path("docs/results/columns.md"),
    redraw: bool = False,
) -> list[ColumnRow]:
    """Attack columns of other parties as the label party; stored trainings are not repeated.

    Args:
        tasks: names of files of examples/columns.
        protections: protections to run; by default, all of them.
        seeds: seeds of trainings, splits and leaked rows.
        leaks: number of rows that the attacker knows.
        jobs: number of simultaneous trainings, each in its own process.
        out: folder for the trainings.
        page: file of the page; its result rows are in a CSV file next to it, and its pictures too.
        redraw: train nothing.
    """
    use_one_thread()
    file, cache = page.with_suffix(".csv"), DataCache()
    found = read_rows(file, ColumnRow)
    done = {(row.task, row.seed, row.protection) for row in found}
    for name, protection in product(tasks, protections):
        require_choice("task", name, tuple(TASKS))
        require_choice("protection", protection, tuple(PROTECTIONS))
    for name in () if redraw else tasks:
        left = [one for one in product(seeds, protections) if (name, *one) not in done]
        if not left:
            continue
        cells, folder = cells_of(name, left), GridFolder(out / name)
        plain = experiment_of(name, "none", 0).model_copy(update={"value": ValueSettings()})
        folder.write(plain, cells, shlex.join(sys.argv))
        run_cells(folder, cells, jobs, on_end=say_cell)
        for cell, (seed, protection) in zip(cells, left, strict=True):
            run = RunFolder(folder.cells_path / cell.name)
            if is_done(run.path):  # if a cell is not done, the reason was already printed
                alone = {
                    row.column: row.own for row in found if (row.task, row.seed) == (name, seed)
                }
                data = cache.of(cell.experiment)
                found += list(rows_of(name, protection, run, data, leaks, alone))
                write_rows(file, ColumnRow, found)
                harness.say(f"{name} {protection} seed {seed}")
    PAGE.write(page, list(by_task(found).values()), measured=not redraw)
    return [row for row in found if row.task in tasks]


main = harness.command(bench_columns, table)


if __name__ == "__main__":
    main()
