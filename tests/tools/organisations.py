"""Real tables as the files of organisations: ids of other types, dates, gaps.

All but scikit-learn's breast cancer lie below VFL_DATA.
"""

import os
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer

#: The file, how it is read, and the label column.
TABLES = {
    "bank-marketing": ("bank.csv.gz", {"sep": ";"}, "y"),
    "credit-default": (
        "UCI_Credit_Card.csv.gz",
        {"index_col": 0},
        "DEFAULT_PAYMENT_NEXT_MONTH",
    ),
    "adult": ("adult.data.gz", {"header": None, "skipinitialspace": True}, "column_14"),
    "pima-diabetes": ("pima-indians-diabetes.csv.gz", {"header": None}, "column_8"),
    "boston-housing": ("housing.data.gz", {"header": None, "sep": r"\s+"}, "column_13"),
}


def real_table(name, rows=None):
    """The table with names for its columns, and its label column."""
    if name == "breast-cancer":
        return load_breast_cancer(as_frame=True).frame[:rows], "target"
    file, options, label = TABLES[name]
    frame = pd.read_csv(Path(os.environ["VFL_DATA"]) / name / file, **options)[:rows]
    names = {n: f"column_{n}" for n in frame.columns if isinstance(n, int)}
    return frame.rename(columns=names), label


def write_organisations(folder, name, rows=None, seed=0, overlap=0.9, parties=3):
    """Three files of one table, or two; each has a share of the rows, in an order of its own.

    lender.csv has the label, a semicolon, decimal commas, latin-1 and ids with zeros in front;
    bank.csv ids such as 79499.0, dates and gaps; shop.parquet whole numbers and real dates. Of two
    parties the bank has the shop's columns as well.

    Returns:
        The table and its label column.
    """
    frame, label = real_table(name, rows)
    draw = np.random.default_rng(seed)
    keys = draw.permutation(100_000)[: len(frame)]
    days = pd.Timestamp("2019-01-01") + pd.to_timedelta(draw.integers(0, 900, len(frame)), "D")
    features = [column for column in frame.columns if column != label]
    parts = np.array_split(np.array(features, dtype=object), 3)
    if parties == 2:
        parts = [parts[0], np.concatenate(parts[1:]), parts[2]]
    lender, bank, shop = (frame[list(own)].copy() for own in parts)
    lender.insert(0, "Kundennummer", [f"{key:08d}" for key in keys])
    lender["Größe"] = draw.normal(size=len(frame)).round(3)
    lender[label] = frame[label]
    bank.insert(0, "customer_id", keys.astype(float))
    bank["opened"] = days.strftime("%d.%m.%Y")
    gaps = draw.random(len(frame)) < 0.1
    bank["rating"] = np.where(gaps, np.nan, draw.normal(size=len(frame)))
    shop.insert(0, "id", keys)
    shop["since"] = days
    shop["country"] = "XY"
    lender, bank, shop = (
        own.iloc[draw.permutation(len(frame))[: round(overlap * len(frame))]]
        for own in (lender, bank, shop)
    )
    how = {"sep": ";", "decimal": ",", "encoding": "latin-1"}
    lender.to_csv(folder / "lender.csv", index=False, **how)
    bank.to_csv(folder / "bank.csv", index=False)
    if parties == 3:
        shop.to_parquet(folder / "shop.parquet", index=False)
    return frame, label
