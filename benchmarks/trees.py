"""Boosted trees of several parties beside XGBoost in one place: time, memory, bytes, accuracy.

The label of a drawn table depends on some of many normal columns. All train with one thread in a
process of their own, from each party's float32 table on, one after the other, several times; what
is reported is the median of the turns, and ratios within a turn. Our parties share their process.
Rows that no training has seen tell the AUC.

With ``--tables`` real tables of the folder in VFL_DATA are learned instead, by us, by XGBoost, and
by XGBoost on our bins as cells, which shows whether a difference comes from bins or from trees.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

from benchmarks import harness
from benchmarks.worker import BenchmarkWorker, Parent
from vfl.config.toml import Settings
from vfl.core.errors import MissingDataError
from vfl.core.registry import require_choice

#: Protections by name, and the options that ask for them.
PROTECTIONS = {
    "order": "protect=order",
    "known": "protect=shared,nodes=known",
    "hidden": "protect=shared,nodes=hidden",
}
OURS, PEER, PEER_ON_BINS = "vfl, order", "XGBoost hist", "XGBoost hist, our bins"
#: Rows that tell the AUC or the error, as a share: of the training of a drawn table, of all rows.
_TESTED, _HELD_OUT = 0.1, 0.2
#: The C library gives memory back at once, so that a peak is what was in use.
_GIVES_BACK = ("env", "MALLOC_MMAP_THRESHOLD_=1048576", "MALLOC_TRIM_THRESHOLD_=1048576")


class TreesJob(Settings):
    """A table, and how many trees of which size are grown on it."""

    who: str
    rows: int
    columns: int
    parties: int
    rounds: int
    depth: int
    bins: int
    seed: int


class TreesCost(Settings):
    """What one training costs; `sent_bytes` of payload cross between the parties."""

    cpu_s: float
    peak_bytes: int
    sent_bytes: int
    auc: float


@dataclass(frozen=True, slots=True)
class TreesRow:
    """What one way to train costs, a median over the turns.

    Attributes:
        who: trained.
        cpu_s: of all parties together, binning included.
        cpu_ratio: in times of XGBoost's of the same turn; None where it is not installed.
        memory_ratio: most memory of all parties together beyond their tables, in times of a byte a
            cell.
        bytes_ratio: bytes that cross, in times of those that the protocol needs; None where all
            columns lie in one place.
        auc: of rows that were held out.
    """

    who: str
    cpu_s: float
    cpu_ratio: float | None
    memory_ratio: float
    bytes_ratio: float | None
    auc: float


@dataclass(frozen=True, slots=True)
class TableRow:
    """How well one seed's training on a real table answers the rows that it held out.

    Attributes:
        table: its name.
        measure: "AUC", or "RMSE".
        seed: of the rows that are held out.
        ours: with `protect=order`, two parties.
        xgboost: `hist` at the same parameters, with all columns in one place.
        xgboost_on_our_bins: the same, where the number of its bin stands for each cell.
    """

    table: str
    measure: str
    seed: int
    ours: float
    xgboost: float
    xgboost_on_our_bins: float


def bench_trees(
    rows: int = 1_000_000,
    *,
    columns: int = 50,
    parties: int = 2,
    rounds: int = 100,
    depth: int = 6,
    bins: int = 64,
    repeats: int = 3,
    protect: Sequence[str] = ("order",),
    tables: bool = False,
    out: Path | None = None,
) -> Sequence[TreesRow | TableRow]:
    """Boosted trees of several parties beside XGBoost in one place.

    Args:
        rows: of the training.
        columns: of all parties together.
        parties: feature parties that share the columns; the label party has none.
        rounds: trees.
        depth: of each tree.
        bins: most bins of a column.
        repeats: turns, or seeds of real tables.
        protect: protections that are measured: "order", or shares with nodes that are "known" or
            "hidden".
        tables: learn real tables instead.
        out: CSV file that rows of real tables are written to as they come.
    """
    if tables:
        return list(_written(_of_tables(repeats, rounds, depth, bins), out))
    for one in protect:
        require_choice("protect", one, tuple(PROTECTIONS))
    everybody = [*(f"vfl, {one}" for one in protect), *([PEER] if find_spec("xgboost") else [])]
    turns = []
    for seed in range(repeats):
        harness.say(f"turn {seed + 1} of {repeats}")
        turns.append(
            {
                who: _measured(
                    TreesJob(
                        who=who, rows=rows, columns=columns, parties=parties, rounds=rounds,
                        depth=depth, bins=bins, seed=seed,
                    )
                )
                for who in everybody
            }
        )  # fmt: skip
        harness.say(" ".join(f"{who}: {cost}" for who, cost in turns[-1].items()))
    cells, table = rows * columns, (rows, columns, parties)

    def row(who: str) -> TreesRow:
        costs = [turn[who] for turn in turns]
        ratios = [turn[who].cpu_s / turn[PEER].cpu_s for turn in turns if PEER in turn]
        return TreesRow(
            who,
            median(one.cpu_s for one in costs),
            median(ratios) if ratios else None,
            median(one.peak_bytes for one in costs) / cells,
            median(one.sent_bytes for one in costs) / needed_bytes(who, *table, rounds, depth, bins)
            if who != PEER
            else None,
            median(one.auc for one in costs),
        )

    return [row(who) for who in everybody]


def needed_bytes(
    who: str, rows: int, columns: int, parties: int, rounds: int, depth: int, bins: int
) -> int:
    """Bytes that a protection needs for full trees of two classes.

    A bin takes a byte, and what two parties send each other crosses two links. A share takes 8
    bytes, and so does each sum of both holders of shares; a node of a row takes a byte, a side a
    bit. Of two children the sums of one are asked.

    >>> needed_bytes("vfl, order", 1000, 4, 2, 10, 3, 16)
    4000
    """
    cells, asked = rows * columns, int(2 ** (depth - 1))
    if who == OURS:
        return cells
    sums = 2 * 8 * asked * columns * (bins + 1)
    if who == "vfl, known":
        tree = parties * rows * (8 + 2 * depth) + depth * rows // 8
    else:
        tree = parties * rows * 8 * asked + (2 * asked - 1) * rows // 8
    return 2 * cells + rounds * (tree + sums)


# --- a drawn table --------------------------------------------------------------------------------


def _measured(job: TreesJob) -> TreesCost:
    with BenchmarkWorker("trees", _GIVES_BACK) as worker:
        worker.put(job)
        return worker.get(TreesCost)


def work(parent: Parent) -> None:
    """Train once, for a process has one peak."""
    job = parent.get(TreesJob)
    train = train_xgboost if job.who == PEER else train_ours
    train(job.model_copy(update={"rounds": 1}), *_tables(job, 1000))  # imports, and machine code
    inputs, labels, held, truth = _tables(job, job.rows)
    harness.forget_peak()  # that of drawing the tables
    before, began = harness.resident_bytes("VmRSS"), time.process_time()
    answer, sent = train(job, inputs, labels, held, truth)
    peak, spent = harness.resident_bytes("VmHWM") - before, time.process_time() - began
    parent.put(
        TreesCost(
            cpu_s=spent,
            peak_bytes=peak,
            sent_bytes=sent,
            auc=roc_auc_score(truth, answer()),
        )
    )


#: Tables by party and labels, of the training rows and of held-out ones.
_Tables = tuple[list[np.ndarray], np.ndarray, list[np.ndarray], np.ndarray]
#: Chances of the held-out rows, to be worked out when nothing is measured; and bytes that crossed.
_Trained = tuple[Callable[[], np.ndarray], int]


def _tables(job: TreesJob, rows: int) -> _Tables:
    """Cells, float32, axes (rows, columns), by party where it trains as parties, and labels."""
    draw, count = np.random.default_rng(job.seed), rows + round(_TESTED * rows)
    cells = draw.standard_normal((count, job.columns), dtype=np.float32)
    score = np.sin(cells[:, ::3]).sum(axis=1) + cells[:, 0] * cells[:, -1]
    labels = (score + 2 * draw.standard_normal(count) > 0).astype(np.int64)
    parts = np.array_split(cells, 1 if job.who == PEER else job.parties, axis=1)
    train = [part[:rows].copy() for part in parts]
    return train, labels[:rows].copy(), [part[rows:].copy() for part in parts], labels[rows:].copy()


def train_ours(
    job: TreesJob,
    inputs: list[np.ndarray],
    labels: np.ndarray,
    held: list[np.ndarray],
    truth: np.ndarray,
) -> _Trained:
    """All parties in this process: the session that an experiment runs."""
    from vfl.datasets import Split
    from vfl.datasets.party import AlignedRows, Inputs
    from vfl.training.specs import checked
    from vfl.training.whole_network import WholeNetworkSession

    names = [f"party{number}" for number in range(1, 1 + len(inputs))]
    experiment = checked(
        {
            "name": "benchmark",
            "seed": job.seed,
            "model": f"trees:max_depth={job.depth},max_bin={job.bins},{_options(job.who)}",
            "parties": {name: {} for name in names},
            "label": {"party": "label", "task": "classification"},
            "train": {"epochs": job.rounds},
            "data": {"validation": 0.0, "test": 0.0},
        },
        "the benchmark's experiment",
    )

    def session(
        mode: Any, split: Split, parts: Sequence[np.ndarray], codes: np.ndarray, **more: Any
    ) -> Any:
        rows = AlignedRows.of(len(codes), split)
        data = {
            name: rows.party(name, Inputs(part)) for name, part in zip(names, parts, strict=True)
        }
        data["label"] = rows.party("label", labels=codes, classes=("0", "1"))
        return WholeNetworkSession(experiment, data, mode=mode, outputs=2, **more).run()

    none = np.empty(0, np.int64)
    trained = session("train", Split(np.arange(len(labels)), none, none), inputs, labels)
    sent = sum(row.payload_bytes for row in trained.ledger.rows())
    weights = trained.weights()

    def answer() -> np.ndarray:
        split = Split(none, none, np.arange(len(truth)))
        margins = session("predict", split, held, truth, weights=weights).outputs().numpy()
        difference: np.ndarray = margins[:, 1] - margins[:, 0]
        return difference

    return answer, sent


def _options(who: str) -> str:
    """The options of a protection, from who trains."""
    return PROTECTIONS[who.removeprefix("vfl, ")]


def train_xgboost(
    job: TreesJob,
    inputs: list[np.ndarray],
    labels: np.ndarray,
    held: list[np.ndarray],
    truth: np.ndarray,
) -> _Trained:
    """The same of XGBoost, with all columns in one place; nothing crosses."""
    import xgboost

    (cells,), (tested,) = inputs, held
    train = xgboost.QuantileDMatrix(cells, labels, max_bin=job.bins, nthread=1)
    model = xgboost.train(_asked("binary:logistic", job.depth, job.bins), train, job.rounds)
    return lambda: model.predict(xgboost.DMatrix(tested, nthread=1)), 0


def _asked(objective: str, depth: int, bins: int) -> dict[str, Any]:
    """XGBoost's parameters."""
    return {
        "objective": objective, "tree_method": "hist", "max_depth": depth, "max_bin": bins,
        "nthread": 1,
    }  # fmt: skip


# --- real tables ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """Where a table lies below VFL_DATA.

    Attributes:
        files: their rows together.
        target: its column, by name or by position.
        positive: the label that is 1; None for numbers.
        read: options of `pandas.read_csv`.
        without: columns that are no inputs.
    """

    files: tuple[str, ...]
    target: str | int
    positive: str | int | None
    read: Mapping[str, Any]
    without: tuple[str, ...] = ()


_SOURCES = {
    "Adult": _Source(
        ("adult/adult.data.gz", "adult/adult.test.gz"), 14, ">50K",
        {"header": None, "skipinitialspace": True, "comment": "|", "na_values": "?"},
    ),
    "bank marketing": _Source(("bank-marketing/bank-full.csv.gz",), "y", "yes", {"sep": ";"}),
    "credit default": _Source(
        ("credit-default/UCI_Credit_Card.csv.gz",), "DEFAULT_PAYMENT_NEXT_MONTH", 1, {}, ("ID",)
    ),
    "white wine": _Source(("wine-quality/winequality-white.csv.gz",), 11, None, {"header": None}),
    "abalone": _Source(("abalone/abalone.csv.gz",), 8, None, {"header": None}),
}  # fmt: skip


def _read(source: _Source) -> tuple[pd.DataFrame, np.ndarray]:
    """Inputs, texts as categories, and codes or numbers."""
    folder = Path(os.environ.get("VFL_DATA", ""))
    if missing := [one for one in source.files if not (folder / one).is_file()]:
        raise MissingDataError(
            "a table is not there", got=missing[0], fix="set VFL_DATA to the folder of the tables"
        )
    table = pd.concat([pd.read_csv(folder / one, **source.read) for one in source.files])
    table = table.reset_index(drop=True).set_axis([str(name) for name in table.columns], axis=1)
    target = table.pop(str(source.target))
    labels = target.to_numpy(float) if source.positive is None else None
    if labels is None:
        texts = target.astype(str).str.rstrip(".")
        labels = (texts == str(source.positive)).to_numpy().astype(float)
    inputs = table.drop(columns=list(source.without))
    texts = inputs.select_dtypes(exclude="number").columns
    return inputs.astype(dict.fromkeys(texts, "category")), labels


def _of_tables(seeds: int, rounds: int, depth: int, bins: int) -> Iterator[TableRow]:
    for name, source in _SOURCES.items():
        inputs, labels = _read(source)
        for seed in range(seeds):
            order = np.random.default_rng(seed).permutation(len(labels))
            train, test = np.split(order, [round((1 - _HELD_OUT) * len(order))])
            classes = source.positive is not None
            answers = _answers(inputs, labels, train, test, classes, (rounds, depth, bins))
            judged = [round(_quality(classes, labels[test], one), 6) for one in answers]
            yield TableRow(name, "AUC" if classes else "RMSE", seed, *judged)


def _quality(classes: bool, truth: np.ndarray, answer: np.ndarray) -> float:
    return (
        roc_auc_score(truth, answer) if classes else float(np.sqrt(np.mean((answer - truth) ** 2)))
    )


def _answers(
    inputs: pd.DataFrame,
    labels: np.ndarray,
    train: np.ndarray,
    test: np.ndarray,
    classes: bool,
    size: tuple[int, int, int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What our model, XGBoost, and XGBoost on our bins answer about the test rows."""
    import xgboost

    from vfl.trees import VFLBoostingClassifier, VFLBoostingRegressor
    from vfl.trees.bins import fit_bins

    rounds, depth, bins = size
    kind = VFLBoostingClassifier if classes else VFLBoostingRegressor
    ours = kind(2, n_estimators=rounds, max_depth=depth, max_bin=bins, random_state=0)
    texts = inputs.select_dtypes(include="category").columns
    table = inputs.astype(dict.fromkeys(texts, object))
    ours.fit(table.iloc[train], labels[train].astype(int) if classes else labels[train])
    answer = (
        ours.predict_proba(table.iloc[test])[:, 1] if classes else ours.predict(table.iloc[test])
    )

    def theirs(cells: pd.DataFrame) -> np.ndarray:
        parts = [
            xgboost.DMatrix(cells.iloc[rows], labels[rows], enable_categorical=True, nthread=1)
            for rows in (train, test)
        ]
        asked = _asked("binary:logistic" if classes else "reg:squarederror", depth, bins)
        found: np.ndarray = xgboost.train(asked, parts[0], rounds).predict(parts[1])
        return found

    binned = inputs.copy()
    for name in inputs.columns.difference(texts):
        column = inputs[[name]].to_numpy(np.float32)
        missing = np.isnan(column[:, 0])
        numbers = fit_bins(column[train], (0,), bins).bins(column)[:, 0].astype(float)
        binned[name] = np.where(missing, np.nan, numbers)
    return answer, theirs(inputs), theirs(binned)


def _written(rows: Iterable[TableRow], out: Path | None) -> Iterator[TableRow]:
    """The rows, each written to a file as it comes."""
    names = [one.name for one in fields(TableRow)]
    if out is None:
        yield from rows
        return
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(asdict(row))
            file.flush()
            yield row


COSTS = harness.table(
    ("who", "<20", "who"),
    ("CPU s", ">9.1f", "cpu_s"),
    ("of XGBoost", ">12", lambda row: row.cpu_ratio and harness.times(row.cpu_ratio)),
    ("memory", ">10", lambda row: harness.times(row.memory_ratio)),
    ("bytes", ">9", lambda row: row.bytes_ratio and f"{row.bytes_ratio:.3f}x"),
    ("AUC", ">8.4f", "auc"),
)
TABLES = harness.table(
    ("table", "<16", lambda rows: rows[0].table),
    ("measure", ">8", lambda rows: rows[0].measure),
    ("seeds", ">6", len),
    ("ours", ">9.5f", lambda rows: mean(row.ours for row in rows)),
    ("XGBoost", ">9.5f", lambda rows: mean(row.xgboost for row in rows)),
    ("on our bins", ">12.5f", lambda rows: mean(row.xgboost_on_our_bins for row in rows)),
)


def shown(rows: Sequence[TreesRow | TableRow]) -> str:
    """Either measurement's rows, for people; seeds of a table as their mean."""
    tables: dict[str, list[TableRow]] = {}
    for row in rows:
        if isinstance(row, TableRow):
            tables.setdefault(row.table, []).append(row)
    return TABLES(list(tables.values())) if tables else COSTS(rows)


main = harness.command(bench_trees, shown)


if __name__ == "__main__":
    main()
