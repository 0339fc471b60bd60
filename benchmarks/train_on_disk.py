"""A training on a table that stays on disk, compared with a training on a sample of the table.

    python -m benchmarks.train_on_disk --rows 10000000 --memory 128MiB

Two feature parties share eight numeric columns. The label is random, with a probability that is a
nonlinear function of all eight columns. So more rows keep improving the model, and the label is
never certain: the AUC of that probability itself is the best possible. Each training runs in its
own process, with one thread and all parties. The measured memory is the peak of this process minus
its memory right after the imports.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.metrics import roc_auc_score

from benchmarks import harness
from benchmarks.worker import BenchmarkWorker, Parent
from vfl.config import Experiment
from vfl.config.toml import Settings
from vfl.core.errors import BadOptionError
from vfl.training.run import train

COLUMNS, TEST_ROWS, SAMPLE_ROWS = 8, 100_000, 100_000
_BLOCK_ROWS = 50_000


class TrainingJob(Settings):
    """One training.

    Attributes:
        table: Parquet file of the table; its first `TEST_ROWS` rows are test rows.
        rows: number of rows of the table.
        memory: value of `data.memory`; None keeps the rows in memory.
        batch_size: batch size of the training.
    """

    table: str
    rows: int
    memory: str | None
    batch_size: int


class TrainingRow(Settings):
    """Result of one training.

    Attributes:
        train_rows: number of training rows, each of which is used once.
        memory: see `TrainingJob`.
        peak_mb: peak resident memory minus the memory after the imports, in units of 10^6 bytes.
        cpu_s: CPU seconds of the whole process, including reading, encoding and evaluation.
        rows_per_cpu_s: training rows per CPU second.
        auc, log_loss: metrics on the test rows.
        best_auc: AUC of the probability with which the labels were drawn.
    """

    train_rows: int
    memory: str | None
    peak_mb: float
    cpu_s: float
    rows_per_cpu_s: float
    auc: float
    log_loss: float
    best_auc: float = 0.0


def bench_train_on_disk(
    rows: int = 1_000_000,
    memory: str = "128MiB",
    batch_size: int = 1024,
) -> list[TrainingRow]:
    """Train for one epoch on a table that stays on disk, and for one epoch on a sample of it.

    Args:
        rows: number of rows of the large table, including test rows.
        memory: value of `data.memory` for the large table.
        batch_size: batch size of both trainings.

    Raises:
        BadOptionError: the table does not have more rows than the sample.
        LostPeerError: a training ended early; its standard error says why.
    """
    small = SAMPLE_ROWS + TEST_ROWS
    if rows <= small:
        raise BadOptionError("the table is no larger than its sample", want=f"more than {small}")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for count, setting in ((small, None), (rows, memory)):
            path = Path(folder) / f"table-{count}.parquet"
            harness.say(f"{count} rows, {setting or 'in memory'}")
            best = write_table(path, count)
            job = TrainingJob(table=str(path), rows=count, memory=setting, batch_size=batch_size)
            with BenchmarkWorker("train_on_disk") as worker:
                worker.put(job)
                found.append(worker.get(TrainingRow).model_copy(update={"best_auc": best}))
    return found


def write_table(path: Path, rows: int) -> float:
    """Write the table, block by block.

    Return the AUC of the labels' probability on the first rows.
    """
    draw, first = np.random.default_rng(0), list[np.ndarray]()
    names = [f"x{n}" for n in range(COLUMNS)]
    schema = pa.schema([(name, pa.float32()) for name in names] + [("paid", pa.int8())])
    with pq.ParquetWriter(path, schema, use_dictionary=["paid"]) as writer:
        for start in range(0, rows, _BLOCK_ROWS):
            x = draw.standard_normal((min(_BLOCK_ROWS, rows - start), COLUMNS), np.float32)
            logit = 2 * np.sin(2 * x[:, 0] * x[:, 4]) + x[:, 1] * x[:, 5] + np.cos(3 * x[:, 2])
            logit += np.abs(x[:, 6]) * x[:, 3] - 0.5 * x[:, 7]
            paid = draw.random(len(x)) < 1 / (1 + np.exp(-logit))
            if start < 4 * _BLOCK_ROWS:
                first.append(np.stack([logit, paid]))
            writer.write_table(pa.table([*x.T, paid.astype(np.int8)], schema=schema))
    logits, labels = np.concatenate(first, axis=1)
    return float(roc_auc_score(labels, logits))


def measure(job: TrainingJob) -> TrainingRow:
    """Train once in this process."""
    half = COLUMNS // 2
    columns = [[f"x{n}" for n in range(start, start + half)] for start in (0, half)]
    settings = {
        "data": {
            "source": job.table,
            "memory": job.memory,
            "validation": 0.0,
            "test": TEST_ROWS / job.rows,
        },
        "parties": {
            name: {"width": 16, "columns": own}
            for name, own in zip(("bank", "shop"), columns, strict=True)
        },
        "label": {"column": "paid"},
        "train": {
            "epochs": 1,
            "batch_size": job.batch_size,
            "shuffle": "full" if job.memory is None else "blocks",
        },
    }
    with harness.measured() as cost, tempfile.TemporaryDirectory() as folder:
        summary = train(Experiment.model_validate(settings), Path(folder), "trial")
    trained = job.rows - TEST_ROWS
    return TrainingRow(
        train_rows=trained,
        memory=job.memory,
        peak_mb=cost.peak_bytes / 1e6,
        cpu_s=cost.cpu_s,
        rows_per_cpu_s=trained / cost.cpu_s,
        auc=summary["test_auc"],
        log_loss=summary["test_log_loss"],
    )


def work(parent: Parent) -> None:
    """Train once and end, because only a new process has its own memory peak."""
    parent.put(measure(parent.get(TrainingJob)))


TABLE = harness.table(
    ("training rows", ">13", "train_rows"),
    ("setting", ">10", lambda row: row.memory or "memory"),
    ("peak MB", ">9.0f", "peak_mb"),
    ("CPU s", ">8.1f", "cpu_s"),
    ("rows / CPU s", ">14.0f", "rows_per_cpu_s"),
    ("AUC", ">8.4f", "auc"),
    ("best", ">8.4f", "best_auc"),
    ("log loss", ">10.4f", "log_loss"),
)


main = harness.command(bench_train_on_disk, TABLE)


if __name__ == "__main__":
    main()
