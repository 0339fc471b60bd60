"""A real table cut in three, as organisations would have it: other ids, other rows, other order."""

import numpy as np
import pandas as pd

TABLES = {
    "bank": ("bank-marketing/bank.csv.gz", ";", "infer", "y"),
    "credit": ("credit-default/UCI_Credit_Card.csv.gz", ",", "infer", "DEFAULT_PAYMENT_NEXT_MONTH"),
    "adult": ("adult/adult.data.gz", ",", None, "c14"),
}


def real_table(root, name):
    """A real table, and the name of its label."""
    path, separator, header, label = TABLES[name]
    frame = pd.read_csv(root / path, sep=separator, header=header, skipinitialspace=True)
    return frame.rename(columns=lambda column: f"c{column}" if header is None else column), label


def cut(frame, label, folder, *, overlap, seed=0, rows=None):
    """Three files with the columns of `frame` dealt out, and the numbers of the common rows.

    The bank writes ids with zeros in front, the shop as real numbers, the label party plainly.
    """
    draw = np.random.default_rng(seed)
    frame = frame if rows is None else frame.sample(rows, random_state=seed)
    frame = frame.reset_index(drop=True)
    numbers = 10_000 + draw.permutation(80_000)[: len(frame)]
    features = [name for name in frame.columns if name != label]
    half = len(features) // 2
    parts = {"bank": features[:half], "shop": features[half:], "label": [label]}
    written = {
        "bank": lambda number: f"{number:08d}",
        "shop": lambda number: f"{number}.0",
        "label": str,
    }
    common = set(range(len(frame)))
    for party, columns in parts.items():
        keep = np.flatnonzero(draw.random(len(frame)) < overlap)
        common &= set(keep.tolist())
        own = frame.loc[draw.permutation(keep), columns]
        own.insert(0, "key", [written[party](numbers[row]) for row in own.index])
        own.to_csv(folder / f"{party}.csv", index=False)
    return {int(numbers[row]) for row in common}
