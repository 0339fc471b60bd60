"""Quality of a block-wise shuffle compared with a full one, on real tables.

    python -m benchmarks.block_shuffle --seeds 5

Two feature parties share the columns of a table below the folder in VFL_DATA. Rows are in the order
of the file, or sorted by the label, where every block has one label: the worst order. Split, first
weights and codec are the same in every row; only the order of the training rows differs. `lag 1` is
the correlation between the table positions of neighbours in an epoch's order. `moved` is the mean
distance of a row from its place in the table, as a share of the rows: 1/3 for a permutation.
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
#: Rows of a block, and blocks of a window; 0 is the full shuffle.
SHUFFLES = ((0, 0), (128, 64), (128, 16), (128, 4), (128, 1))
EPOCHS = 5


@dataclass(frozen=True, slots=True)
class ShuffleRow:
    """Means over seeds, with the spread of the difference from the full shuffle.

    Attributes:
        table: the table, and the order of its rows.
        block_rows, window_blocks: settings of the shuffle; 0 is the full one.
        auc, log_loss: figures of the test rows after the last epoch.
        auc_apart, deviation: mean difference from the full shuffle on the same seed; its spread.
        lag_1, moved: figures of the first epoch's order, see above.
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
    """Compare a shuffle by block with a full one, on tables in two orders.

    Args:
        seeds: number of seeds; each gives a split, initial weights and orders.
        table: credit default, bank marketing, or both.
        rows: most rows of each table.
        epochs: epochs of each training.

    Raises:
        MissingDataError: VFL_DATA names no folder that has the tables.
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
    data = load_data(Experiment.model_validate(settings))  # with the split of a full shuffle
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
