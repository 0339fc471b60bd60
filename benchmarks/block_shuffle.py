"""Quality of models trained with block-wise shuffled rows, compared with a full shuffle.

    python -m benchmarks.block_shuffle --seeds 5

Two feature parties share the columns of a real table in the folder that VFL_DATA names. The rows of
the table are in the order of the file, or sorted by the label. The sorted order is the worst case,
because every block then contains one label only. All result rows use the same split, initial
weights and codec; only the order of the training rows differs. `lag 1` is the correlation between
the table positions of two rows that follow each other in an epoch. `moved` is the mean distance of
a row from its position in the table, as a fraction of the number of rows; it is 1/3 for a random
permutation.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import harness
from vfl.config import Experiment
from vfl.core.errors import MissingDataError
from vfl.core.registry import require_choice
from vfl.core.seeds import use_one_thread
from vfl.session import Terms, rules
from vfl.training.run import load_data, train


@dataclass(frozen=True, slots=True)
class Source:
    """A table: its file, separator, label and omitted columns."""

    file: str
    separator: str
    label: str
    left_out: tuple[str, ...]


SOURCES = {
    "credit default": Source(
        "credit-default/UCI_Credit_Card.csv.gz", ",", "DEFAULT_PAYMENT_NEXT_MONTH", ("ID",)
    ),
    "bank marketing": Source("bank-marketing/bank-additional-full.csv.gz", ";", "y", ("duration",)),
}
#: Rows of a block, and blocks of a window, for each shuffle; 0 means the full shuffle.
SHUFFLES = ((0, 0), (128, 64), (128, 16), (128, 4), (128, 1))
EPOCHS = 5


@dataclass(frozen=True, slots=True)
class ShuffleRow:
    """Means over seeds, and the standard deviation of the difference from the full shuffle.

    Attributes:
        table: name of the table, and the order of its rows.
        block_rows, window_blocks: options of the shuffle; 0 means the full shuffle.
        auc, log_loss: metrics of the test rows after the last epoch.
        auc_apart, deviation: mean difference of the AUC from the full shuffle on the same seed, and
            the standard deviation of this difference.
        lag_1, moved: properties of the order of rows in the first epoch; see the module's
            docstring.
    """

    table: str
    block_rows: int
    window_blocks: int
    auc: float
    log_loss: float
    auc_apart: float
    deviation: float
    lag_1: float
    moved: float


def bench_block_shuffle(
    seeds: int = 5,
    table: Sequence[str] = tuple(SOURCES),
    rows: int | None = None,
    epochs: int = EPOCHS,
) -> list[ShuffleRow]:
    """Compare a block-wise shuffle with a full shuffle, on tables in two orders.

    Args:
        seeds: number of seeds; each seed determines a split, initial weights and row orders.
        table: credit default, bank marketing, or both of them.
        rows: largest number of rows of each table.
        epochs: number of epochs of each training.

    Raises:
        MissingDataError: the folder that VFL_DATA names does not have the tables.
    """
    use_one_thread()
    for name in table:
        require_choice("table", name, tuple(SOURCES))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in table:
            frame = _read(SOURCES[name])[:rows]
            label = SOURCES[name].label
            for order in ("as it stands", "sorted by the label"):
                path = Path(folder) / "table.parquet"
                ordered = frame if order == "as it stands" else frame.sort_values(label)
                ordered.to_parquet(path, index=False)
                harness.say(f"{name}, {order}")
                found += _compared(path, f"{name}, {order}", label, seeds, epochs)
    return found


def _read(source: Source) -> pd.DataFrame:
    folder = os.environ.get("VFL_DATA")
    path = Path(folder or ".") / source.file
    if not path.is_file():
        raise MissingDataError("the table does not exist", where="VFL_DATA", want=source.file)
    return pd.read_csv(path, sep=source.separator).drop(columns=list(source.left_out))


def _compared(path: Path, name: str, label: str, seeds: int, epochs: int) -> list[ShuffleRow]:
    figures = np.array(
        [
            [_trained(path, label, seed, epochs, *shuffle) for shuffle in SHUFFLES]
            for seed in range(seeds)
        ]
    )
    apart = figures[:, :, 0] - figures[:, :1, 0]
    means, deviations = figures.mean(axis=0), apart.std(axis=0, ddof=1 if seeds > 1 else 0)
    return [
        ShuffleRow(name, *shuffle, *map(float, (*mean[:2], change, deviation, *mean[2:])))
        for shuffle, mean, change, deviation in zip(
            SHUFFLES, means, apart.mean(axis=0), deviations, strict=True
        )
    ]


def _trained(
    path: Path, label: str, seed: int, epochs: int, block_rows: int, window_blocks: int
) -> tuple[float, float, float, float]:
    columns = [name for name in pd.read_parquet(path).columns if name != label]
    half = len(columns) // 2
    settings: dict[str, Any] = {
        "seed": seed,
        "data": {"source": str(path)},
        "parties": {
            "bank": {"width": 16, "columns": columns[:half]},
            "shop": {"width": 16, "columns": columns[half:]},
        },
        "label": {"column": label},
        "train": {"epochs": epochs, "batch_size": 128},
    }
    data = load_data(Experiment.model_validate(settings))  # with the split that a full shuffle uses
    if block_rows:
        blocks = {"block_rows": block_rows, "window_blocks": window_blocks}
        settings["train"] |= {"shuffle": "blocks"} | blocks
    experiment = Experiment.model_validate(settings)
    with tempfile.TemporaryDirectory() as runs:
        summary = train(experiment, Path(runs), "trial", data=data)
    split = data["label"].split
    schedule = rules.schedule(Terms.of(experiment, "train", "trial"), split)
    epoch = np.concatenate([one.rows for one in schedule if one.trains and one.epoch == 1])
    at = np.searchsorted(split.train, epoch)
    lag = float(np.corrcoef(at[:-1], at[1:])[0, 1])
    moved = float(np.abs(at - np.arange(len(at))).mean() / len(split.train))
    return summary["test_auc"], summary["test_log_loss"], lag, moved


TABLE = harness.table(
    ("table", "<37", "table"),
    ("block", ">5", lambda row: row.block_rows or "full"),
    ("window", ">7", lambda row: row.window_blocks or ""),
    ("AUC", ">7.3f", "auc"),
    ("log loss", ">10.3f", "log_loss"),
    ("AUC beside full", ">17", lambda row: f"{row.auc_apart:+.3f} ± {row.deviation:.3f}"),
    ("lag 1", ">7.2f", "lag_1"),
    ("moved", ">7.2f", "moved"),
)


main = harness.command(bench_block_shuffle, TABLE)


if __name__ == "__main__":
    main()
