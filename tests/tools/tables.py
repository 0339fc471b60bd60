"""Tables of two classes below VFL_DATA, whole at one party, and of a share of the rare class."""

import os
from pathlib import Path

import numpy as np
import pandas as pd

from vfl.datasets import split_rows
from vfl.datasets.party import AlignedRows, Inputs

#: The file, how it is read, and the label column with the value of class 1.
TABLES = {
    "bank-marketing": ("bank-full.csv.gz", {"sep": ";"}, "y", "yes"),
    "credit-default": ("UCI_Credit_Card.csv.gz", {"index_col": 0}, -1, 1),
    "adult": ("adult.data.gz", {"header": None, "skipinitialspace": True}, 14, ">50K"),
}
ROWS = 20_000


def table(name, seed, share=None):
    """The first rows, one-hot and standardised; of class 1 only so many that they are `share`."""
    file, options, column, positive = TABLES[name]
    frame = pd.read_csv(Path(os.environ["VFL_DATA"]) / name / file, **options)[:ROWS]
    truth = frame.pop(frame.columns[column] if column == -1 else column)
    labels = (truth.astype(str) == str(positive)).to_numpy().astype(np.int64)
    kept = np.ones(len(labels), dtype=bool)
    if share is not None:
        rare = np.random.default_rng(seed).permutation(np.flatnonzero(labels))
        kept[rare[round(share / (1 - share) * (len(labels) - len(rare))) :]] = False
    cells = pd.get_dummies(frame[kept], dtype=float).to_numpy()
    split = split_rows(len(cells), seed, 0.1, 0.2)
    mean, spread = cells[split.train].mean(0), cells[split.train].std(0)
    inputs = ((cells - mean) / np.where(spread > 0, spread, 1)).astype(np.float32)
    rows = AlignedRows.of(len(cells), split)
    return rows.parties({"bank": Inputs(inputs)}, "lender", labels[kept], (0, 1))
