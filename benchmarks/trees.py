"""Boosted trees of several parties, compared with XGBoost: time, memory, bytes, accuracy.

The label of a synthetic table depends on some of its many normally distributed columns. All systems
train with one thread, each in its own process; the measurement begins with each party's float32
table in memory. The systems run one after the other, several times; result rows show the median
over the turns, and ratios within a turn. vfl's parties share one process. The AUC is measured on
rows that are not in the training.

With ``--wan 80mbps,40ms``, a training of vfl also runs over computed network links, where
computation takes no time (`LinkModel`); its messages are those of the training on the loopback
interface. With ``--peer PYTHON``, an interpreter whose XGBoost has the federated plug-in, XGBoost's
vertical mode is measured too: its server and its parties are processes with proxies between them.

With ``--tables``, real tables from the folder in VFL_DATA are used instead, with four systems: vfl,
XGBoost, XGBoost on vfl's bins as cells, and XGBoost on the same rows in another order. The third
system shows whether a difference comes from the bins or from the trees; the fourth shows the effect
of XGBoost's approximate bins alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from pydantic import Field
from sklearn.metrics import roc_auc_score

from benchmarks import harness
from benchmarks.emulation import LinkModel, ProxyNetwork, Wan
from benchmarks.pages import written
from benchmarks.worker import BenchmarkWorker, Message, Parent
from vfl.config.toml import Settings
from vfl.core.errors import MissingDataError
from vfl.core.registry import require_choice
from vfl.llm.project import free_addresses

#: Protections by name, and their options.
PROTECTIONS = {
    "order": "protect=order",
    "known": "protect=shared,nodes=known",
    "hidden": "protect=shared,nodes=hidden",
}
OURS, PEER, FEDERATED = "vfl, order", "XGBoost hist", "XGBoost federated"
#: Number of test rows, as a fraction of the training rows of a synthetic table, or of all rows of a
#: real table.
_TESTED, _HELD_OUT = 0.1, 0.2
_FEDERATED = Path(__file__).parent / "peers" / "xgboost_federated.py"
#: Setting by which the C library returns freed memory at once, so that a peak is memory in use.
_GIVES_BACK = ("env", "MALLOC_MMAP_THRESHOLD_=1048576", "MALLOC_TRIM_THRESHOLD_=1048576")


class TreesJob(Settings):
    """Job of one process: a table, and the number and size of the trees."""

    who: str
    rows: int
    columns: int
    parties: int
    rounds: int
    depth: int
    bins: int
    seed: int
    wan: str = ""


class TreesCost(Settings):
    """Cost of one training; `sent_bytes` counts the payload bytes that all parties sent."""

    cpu_s: float
    peak_bytes: int
    sent_bytes: int
    auc: float


@dataclass(frozen=True, slots=True)
class Mark:
    """State of a training over computed network links after a tree.

    Attributes:
        seconds: time on the label party's clock.
        hops: number of sequential messages.
        sent_bytes: number of bytes that all parties sent, headers included.
    """

    seconds: float
    hops: int
    sent_bytes: int


class LineRow(Settings):
    """Cost of a training over network links, and of the same training on the loopback interface.

    Attributes:
        who: name of the system.
        cpu_s: processor seconds of the whole training, of all parties together.
        line_s: seconds that the network links add to the whole training, without computation; for
            another system, the time over the links minus the time on the loopback interface.
        tree_s: seconds that the network links add for each tree.
        round_trips: number of sequential round trips per tree; None if they are not counted.
        first_bytes: bytes sent before the first tree; 0 for another system.
        tree_bytes: bytes per tree; for another system, all bytes divided by the number of trees.
        auc: AUC on held-out rows.
    """

    who: str
    cpu_s: float
    line_s: float
    tree_s: float
    round_trips: int | None
    first_bytes: float
    tree_bytes: float
    auc: float


@dataclass(frozen=True, slots=True)
class TreesRow:
    """Cost of one way to train; medians over the turns.

    Attributes:
        who: name of the system.
        cpu_s: CPU time of all parties together, including the computation of bins.
        cpu_ratio: CPU time divided by XGBoost's in the same turn; None if XGBoost is not installed.
        memory_ratio: peak memory of all parties together without their tables, divided by one byte
            for each cell of the tables.
        bytes_ratio: sent bytes divided by the least bytes of the protocol; None if one process has
            all columns.
        auc: AUC on held-out rows.
    """

    who: str
    cpu_s: float
    cpu_ratio: float | None
    memory_ratio: float
    bytes_ratio: float | None
    auc: float


@dataclass(frozen=True, slots=True)
class TableRow:
    """Quality of trainings with one seed, on the held-out rows of a real table.

    Attributes:
        table: name of the table.
        measure: "AUC", or "RMSE".
        seed: seed of the held-out rows.
        ours: value of the measure for vfl with `protect=order` and two parties.
        xgboost: value for XGBoost's `hist` with the same parameters and all columns in one process.
        xgboost_on_our_bins: value for XGBoost if each cell is replaced by the number of the cell's
            bin in vfl.
        xgboost_reordered: value for XGBoost with the training rows in another order.
    """

    table: str
    measure: str
    seed: int
    ours: float
    xgboost: float
    xgboost_on_our_bins: float
    xgboost_reordered: float


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
    only: str | None = None,
    out: Path | None = None,
    wan: Wan | None = None,
    peer: str | None = None,
) -> Sequence[TreesRow | TableRow | LineRow]:
    """Measure boosted trees of several parties, and XGBoost with all columns in one process.

    Args:
        rows: training rows.
        columns: number of columns of all parties together.
        parties: number of feature parties, which divide the columns; the label party has none.
        rounds: number of trees.
        depth: depth of each tree.
        bins: largest number of bins of a column.
        repeats: number of turns, or of seeds for real tables.
        protect: protections to measure: "order", or shares with nodes that are "known" to the
            feature parties or "hidden" from them.
        tables: whether to train on real tables instead of a synthetic one.
        only: name of the only table to train on.
        out: CSV file for the results on real tables; each result is written as soon as it is
            measured.
        wan: network link of every party; with this option, the benchmark only trains once over such
            links.
        peer: a Python interpreter whose XGBoost has the federated plug-in, for a training over
            network links.
    """
    if tables:
        if only is not None:
            require_choice("only", only, tuple(_SOURCES))
        names = [only] if only else list(_SOURCES)
        return list(written(_of_tables(names, repeats, rounds, depth, bins), out))
    for one in protect:
        require_choice("protect", one, tuple(PROTECTIONS))
    ours, peers = [f"vfl, {one}" for one in protect], [PEER] if find_spec("xgboost") else []

    def job(who: str, seed: int) -> TreesJob:
        return TreesJob(
            who=who, rows=rows, columns=columns, parties=parties, rounds=rounds, depth=depth,
            bins=bins, seed=seed, wan=str(wan or ""),
        )  # fmt: skip

    if wan:
        lines = [_measured(job(who, 0), LineRow) for who in ours]
        return [*lines, *([federated(job(FEDERATED, 0), peer)] if peer else [])]
    everybody, turns = [*ours, *peers], []
    for seed in range(repeats):
        harness.say(f"turn {seed + 1} of {repeats}")
        turns.append({who: _measured(job(who, seed), TreesCost) for who in everybody})
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
    """Return the bytes that a protection needs at least, for full trees and two classes.

    A bin takes one byte, and a message between two feature parties crosses two links. A share takes
    8 bytes, and each of the two holders of shares sends 8 bytes for each sum. A row's node number
    takes one byte, and the child to which a split sends the row takes one bit. Sums are requested
    for only one of the two children of a node.

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


# --- a synthetic table ----------------------------------------------------------------------------


def _measured(job: TreesJob, kind: type[Message]) -> Message:
    with BenchmarkWorker("trees", _GIVES_BACK) as worker:
        worker.put(job)
        return worker.get(kind)


def work(parent: Parent) -> None:
    """Train once and end, because only a new process has its own memory peak."""
    job = parent.get(TreesJob)
    train = train_xgboost if job.who == PEER else train_ours
    # the first training loads imports and compiles machine code
    train(job.model_copy(update={"rounds": 1}), *_tables(job, 1000))
    if job.wan:
        parent.put(over_lines(job))
        return
    inputs, labels, held, truth = _tables(job, job.rows)
    harness.forget_peak()  # forget the peak that drawing the tables has caused
    with harness.measured() as cost:
        answer, sent = train(job, inputs, labels, held, truth)
    parent.put(
        TreesCost(
            cpu_s=cost.cpu_s,
            peak_bytes=cost.peak_bytes,
            sent_bytes=sent,
            auc=roc_auc_score(truth, answer()),
        )
    )


#: Type: training inputs by party, training labels, held-out inputs by party, held-out labels.
_Tables = tuple[list[np.ndarray], np.ndarray, list[np.ndarray], np.ndarray]
#: Type: a function that predicts the held-out rows after the measurement, and the number of sent
#: bytes.
_Trained = tuple[Callable[[], np.ndarray], int]


def _tables(job: TreesJob, rows: int) -> _Tables:
    """Return float32 inputs, axes (rows, columns), by party, and labels; also of held-out rows."""
    draw, count = np.random.default_rng(job.seed), rows + round(_TESTED * rows)
    cells = draw.standard_normal((count, job.columns), dtype=np.float32)
    score = np.sin(cells[:, ::3]).sum(axis=1) + cells[:, 0] * cells[:, -1]
    labels = (score + 2 * draw.standard_normal(count) > 0).astype(np.int64)
    parts = np.array_split(cells, 1 if job.who == PEER else job.parties, axis=1)
    train = [part[:rows].copy() for part in parts]
    return train, labels[:rows].copy(), [part[rows:].copy() for part in parts], labels[rows:].copy()


def over_lines(job: TreesJob) -> LineRow:
    """Train with all parties in this process, on the clocks of computed network links."""
    label, tables, marks = "label", _tables(job, job.rows), list[Mark]()
    names = [label, "helper", *_names(len(tables[0]))]
    model = LinkModel(names, Wan.parse(job.wan))

    def mark(record: dict[str, Any]) -> None:
        sent = sum(model.bytes_sent().values())
        marks.append(Mark(model.now(label), model.hops, sent))

    with harness.measured() as cost:
        answer, _ = train_ours(job, *tables, carry=partial(model.star, label), on_epoch=mark)
    trees = len(marks) - 1
    first, last = marks[0], marks[-1]
    tree_bytes = (last.sent_bytes - first.sent_bytes) / trees
    return LineRow(
        who=job.who,
        cpu_s=cost.cpu_s,
        line_s=model.seconds,
        tree_s=(last.seconds - first.seconds) / trees,
        # Rounded, because the number of messages depends on which party read the last message.
        round_trips=round((last.hops - first.hops) / trees / 2),
        first_bytes=first.sent_bytes - tree_bytes,
        tree_bytes=tree_bytes,
        auc=roc_auc_score(tables[-1], answer()),
    )


class PeerReady(Settings):
    """Message: the server listens."""


class PeerTrained(Settings):
    """Message: a training's cost at one party; rank 0 adds its held-out predictions."""

    seconds: float
    cpu_s: float
    answer: tuple[float, ...]


class PeerJob(Settings):
    """Job of XGBoost's server or of one of its parties; see `xgboost_federated.py`."""

    parties: int
    port: int
    server: str = ""
    rank: int | None = None
    cells: str = ""
    tested: str = ""
    labels: str | None = None
    rounds: int = 0
    asked: dict[str, Any] = Field(default_factory=dict)


def federated(job: TreesJob, python: str) -> LineRow:
    """Run XGBoost's vertical mode over proxies, without and with emulated network links.

    Args:
        job: settings of the training; rank 0 has the labels, but no columns.
        python: Python interpreter that has the plug-in.
    """
    inputs, labels, held, truth = _tables(job, job.rows)
    with TemporaryDirectory() as folder:

        def kept(name: str, array: np.ndarray) -> str:
            np.save(path := f"{folder}/{name}.npy", array)
            return path

        parts = [(inputs[0][:, :0], held[0][:, :0]), *zip(inputs, held, strict=True)]
        files = [
            (kept(f"cells{rank}", cells), kept(f"tested{rank}", tested))
            for rank, (cells, tested) in enumerate(parts)
        ]
        turn = partial(_federated, job, python, files, kept("labels", labels))
        (loopback, _), (lined, sent) = turn(Wan()), turn(Wan.parse(job.wan))
    line_s = max(one.seconds for one in lined) - max(one.seconds for one in loopback)
    return LineRow(
        who=job.who,
        cpu_s=sum(one.cpu_s for one in loopback),
        line_s=line_s,
        tree_s=line_s / job.rounds,
        round_trips=None,
        first_bytes=0,
        tree_bytes=sent / job.rounds,
        auc=roc_auc_score(truth, lined[0].answer),
    )


def _federated(
    job: TreesJob, python: str, files: Sequence[tuple[str, str]], labels: str, wan: Wan
) -> tuple[list[PeerTrained], int]:
    """Return the cost of each party, and the bytes that all parties sent."""
    server, names = "server", _names(len(files))
    command = (python, "-I", str(_FEDERATED))
    with ProxyNetwork([server, *names], wan) as network, ExitStack() as stack:
        address = free_addresses(1)[0]
        about = PeerJob(parties=len(names), port=int(address.rpartition(":")[2]))
        with BenchmarkWorker(FEDERATED, command=command) as serving:
            serving.put(about)
            serving.get(PeerReady)
            workers = [
                stack.enter_context(BenchmarkWorker(FEDERATED, command=command)) for _ in names
            ]
            for rank, (name, worker) in enumerate(zip(names, workers, strict=True)):
                host, port = network.reach(name, server, about.port)
                update = {
                    "server": f"{host}:{port}", "rank": rank, "cells": files[rank][0],
                    "tested": files[rank][1], "labels": None if rank else labels,
                    "rounds": job.rounds, "asked": _asked("binary:logistic", job.depth, job.bins),
                }  # fmt: skip
                worker.put(about.model_copy(update=update))
            found = [worker.get(PeerTrained) for worker in workers]
        return found, sum(network.bytes_sent().values())


def _names(parties: int) -> list[str]:
    return [f"party{number}" for number in range(1, 1 + parties)]


def train_ours(
    job: TreesJob,
    inputs: list[np.ndarray],
    labels: np.ndarray,
    held: list[np.ndarray],
    truth: np.ndarray,
    **options: Any,
) -> _Trained:
    """Train vfl's trees with all parties in this process, as a session of an experiment."""
    from vfl.datasets import Split
    from vfl.datasets.party import AlignedRows, Inputs
    from vfl.training.specs import checked
    from vfl.training.whole_network import WholeNetworkSession

    names = _names(len(inputs))
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
    split = Split(np.arange(len(labels)), none, none)
    trained = session("train", split, inputs, labels, **options)
    sent = sum(row.payload_bytes for row in trained.ledger.rows())
    weights = trained.weights()

    def answer() -> np.ndarray:
        split = Split(none, none, np.arange(len(truth)))
        margins = session("predict", split, held, truth, weights=weights).outputs().numpy()
        difference: np.ndarray = margins[:, 1] - margins[:, 0]
        return difference

    return answer, sent


def _options(who: str) -> str:
    """Return the options of a protection from the name of the system."""
    return PROTECTIONS[who.removeprefix("vfl, ")]


def train_xgboost(
    job: TreesJob,
    inputs: list[np.ndarray],
    labels: np.ndarray,
    held: list[np.ndarray],
    truth: np.ndarray,
) -> _Trained:
    """Train XGBoost with all columns in one process; no bytes are sent."""
    import xgboost

    (cells,), (tested,) = inputs, held
    train = xgboost.QuantileDMatrix(cells, labels, max_bin=job.bins, nthread=1)
    model = xgboost.train(_asked("binary:logistic", job.depth, job.bins), train, job.rounds)
    return lambda: model.predict(xgboost.DMatrix(tested, nthread=1)), 0


def _asked(objective: str, depth: int, bins: int) -> dict[str, Any]:
    """Return XGBoost's parameters."""
    return {
        "objective": objective, "tree_method": "hist", "max_depth": depth, "max_bin": bins,
        "nthread": 1,
    }  # fmt: skip


# --- real tables ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """Path and format of a real table below VFL_DATA.

    Attributes:
        files: files of the table, whose rows are joined.
        target: column of the label, by name or by index.
        positive: label that becomes 1; None if the labels are numbers.
        read: options of `pandas.read_csv`.
        without: columns that are not used as inputs.
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
    """Return the inputs, with texts as categories, and the labels as codes or numbers."""
    folder = Path(os.environ.get("VFL_DATA", ""))
    if missing := [one for one in source.files if not (folder / one).is_file()]:
        raise MissingDataError(
            "a table does not exist", got=missing[0], fix="set VFL_DATA to the folder of the tables"
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


def _of_tables(
    names: Sequence[str], seeds: int, rounds: int, depth: int, bins: int
) -> Iterator[TableRow]:
    for name in names:
        source = _SOURCES[name]
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
) -> tuple[np.ndarray, ...]:
    """Return predictions for the test rows by vfl, and by three variants of XGBoost."""
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

    def theirs(cells: pd.DataFrame, learned: np.ndarray = train) -> np.ndarray:
        parts = [
            xgboost.DMatrix(cells.iloc[rows], labels[rows], enable_categorical=True, nthread=1)
            for rows in (learned, test)
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
    return answer, theirs(inputs), theirs(binned), theirs(inputs, train[::-1])


def _moved(rows: Sequence[TableRow]) -> list[float]:
    """Return, for each seed, how much a different order of rows changes XGBoost's result."""
    return [row.xgboost_reordered - row.xgboost for row in rows]


def _spread(figures: Iterable[float]) -> float:
    """Return the standard deviation; 0 for a single value."""
    found = list(figures)
    return stdev(found) if len(found) > 1 else 0.0


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
    ("reordered", ">10.5f", lambda rows: mean(row.xgboost_reordered for row in rows)),
    ("ours less", ">10.5f", lambda rows: mean(row.ours - row.xgboost for row in rows)),
    ("+-", ">8.5f", lambda rows: _spread(row.ours - row.xgboost for row in rows)),
    ("reordered less", ">15.5f", lambda rows: mean(_moved(rows))),
    ("+-", ">8.5f", lambda rows: _spread(_moved(rows))),
)


LINES = harness.table(
    ("who", "<20", "who"),
    ("CPU s", ">8.1f", "cpu_s"),
    ("line s", ">8.1f", "line_s"),
    ("a tree s", ">9.2f", "tree_s"),
    ("round trips", ">12", "round_trips"),
    ("MB before", ">10.2f", lambda row: row.first_bytes / 1e6),
    ("MB a tree", ">10.3f", lambda row: row.tree_bytes / 1e6),
    ("AUC", ">8.4f", "auc"),
)


def shown(rows: Sequence[TreesRow | TableRow | LineRow]) -> str:
    """Format the rows of one kind of measurement for people; average each table over its seeds."""
    if isinstance(rows[0], LineRow):
        return LINES(rows)
    tables: dict[str, list[TableRow]] = {}
    for row in rows:
        if isinstance(row, TableRow):
            tables.setdefault(row.table, []).append(row)
    return TABLES(list(tables.values())) if tables else COSTS(rows)


main = harness.command(bench_trees, shown)


if __name__ == "__main__":
    main()
