"""Boosted trees of several parties beside XGBoost in one place: processor time, memory and bytes.

The label depends on some of many normal columns. Both train in processes of their own with one
thread, one after the other, several times; what is reported is the median of the turns, and ratios
within a turn. Rows that no training has seen tell the AUC.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median

import numpy as np
from sklearn.metrics import roc_auc_score

from benchmarks import harness
from benchmarks.worker import BenchmarkWorker, Parent
from vfl.config.toml import Settings

OURS, PEER = "vfl, protect=order", "XGBoost hist"
#: Rows that tell the AUC, as a share of those of the training.
_TESTED = 0.1


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
        memory_ratio: memory beyond the table itself, in times of a byte a cell.
        bytes_ratio: bytes that cross, in times of a byte a cell of the feature parties; None where
            all columns lie in one place.
        auc: of rows that were held out.
    """

    who: str
    cpu_s: float
    cpu_ratio: float | None
    memory_ratio: float
    bytes_ratio: float | None
    auc: float


def bench_trees(
    rows: int = 1_000_000,
    *,
    columns: int = 50,
    parties: int = 2,
    rounds: int = 100,
    depth: int = 6,
    bins: int = 64,
    repeats: int = 3,
) -> list[TreesRow]:
    """Boosted trees of several parties beside XGBoost in one place.

    Args:
        rows: of the training.
        columns: of all parties together.
        parties: feature parties that share the columns; the label party has none.
        rounds: trees.
        depth: of each tree.
        bins: most bins of a column.
        repeats: turns.
    """
    everybody = [OURS, *([PEER] if find_spec("xgboost") else [])]
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
    cells = rows * columns

    def row(who: str) -> TreesRow:
        costs = [turn[who] for turn in turns]
        ratios = [turn[who].cpu_s / turn[PEER].cpu_s for turn in turns if PEER in turn]
        return TreesRow(
            who,
            median(one.cpu_s for one in costs),
            median(ratios) if ratios else None,
            median(one.peak_bytes for one in costs) / cells,
            median(one.sent_bytes for one in costs) / cells if who == OURS else None,
            median(one.auc for one in costs),
        )

    return [row(who) for who in everybody]


def _measured(job: TreesJob) -> TreesCost:
    with BenchmarkWorker("trees") as worker:
        worker.put(job)
        return worker.get(TreesCost)


def work(parent: Parent) -> None:
    """Train once, for a process has one peak."""
    job = parent.get(TreesJob)
    train = train_ours if job.who == OURS else train_xgboost
    few, known = _table(job.model_copy(update={"rows": 1000}))
    train(job.model_copy(update={"rounds": 1}), few, known, few)  # imports, and machine code
    inputs, labels = _table(job)
    before, began = harness.resident_bytes("VmRSS"), time.process_time()
    chances, sent = train(job, inputs[: job.rows], labels[: job.rows], inputs[job.rows :])
    parent.put(
        TreesCost(
            cpu_s=time.process_time() - began,
            peak_bytes=harness.resident_bytes("VmHWM") - before,
            sent_bytes=sent,
            auc=roc_auc_score(labels[job.rows :], chances),
        )
    )


def _table(job: TreesJob) -> tuple[np.ndarray, np.ndarray]:
    """Cells, float32, axes (rows, columns), and labels; the last rows are held out."""
    draw, count = np.random.default_rng(job.seed), job.rows + round(_TESTED * job.rows)
    inputs = draw.standard_normal((count, job.columns), dtype=np.float32)
    score = np.sin(inputs[:, ::3]).sum(axis=1) + inputs[:, 0] * inputs[:, -1]
    return inputs, (score + 2 * draw.standard_normal(count) > 0).astype(np.int64)


def train_ours(
    job: TreesJob, inputs: np.ndarray, labels: np.ndarray, held: np.ndarray
) -> tuple[np.ndarray, int]:
    """Probabilities of held-out rows, and the bytes that crossed in the training."""
    from vfl.trees import VFLBoostingClassifier

    model = VFLBoostingClassifier(
        job.parties,
        n_estimators=job.rounds,
        max_depth=job.depth,
        max_bin=job.bins,
        random_state=job.seed,
    )
    model.fit(inputs, labels)
    sent = sum(row.payload_bytes for row in model.ledger_.rows())
    return model.predict_proba(held)[:, 1], sent


def train_xgboost(
    job: TreesJob, inputs: np.ndarray, labels: np.ndarray, held: np.ndarray
) -> tuple[np.ndarray, int]:
    """The same of XGBoost, with all columns in one place; nothing crosses."""
    import xgboost

    train = xgboost.QuantileDMatrix(inputs, labels, max_bin=job.bins, nthread=1)
    asked = {
        "objective": "binary:logistic",
        "tree_method": "hist",
        "max_depth": job.depth,
        "max_bin": job.bins,
        "nthread": 1,
    }
    model = xgboost.train(asked, train, job.rounds)
    return model.predict(xgboost.DMatrix(held, nthread=1)), 0


TABLE = harness.table(
    ("who", "<20", "who"),
    ("CPU s", ">9.1f", "cpu_s"),
    ("of XGBoost", ">12", lambda row: row.cpu_ratio and harness.times(row.cpu_ratio)),
    ("memory", ">10", lambda row: harness.times(row.memory_ratio)),
    ("bytes", ">9", lambda row: row.bytes_ratio and f"{row.bytes_ratio:.3f}x"),
    ("AUC", ">8.4f", "auc"),
)


main = harness.command(bench_trees, TABLE)


if __name__ == "__main__":
    main()
