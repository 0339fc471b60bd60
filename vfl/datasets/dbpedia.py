"""DBPedia Classes: 219 classes of articles by their first sentences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from vfl.datasets.picture_set import ENVIRONMENT, data_folder
from vfl.errors import DataError, MissingDataError

FOLDER = "dbpedia-classes"
FILES = ("DBPEDIA_train.csv", "DBPEDIA_val.csv", "DBPEDIA_test.csv")
TEXT, CLASS = "text", "l3"  # l3 is the finest of its three levels
LENGTH, VOCABULARY = 100, 20_000


def read_dbpedia(root: Path | None) -> tuple[list[str], np.ndarray, tuple[str, ...], list[int]]:
    """The articles, training, validation and test rows one after another.

    Args:
        root: folder that holds ``dbpedia-classes`` with the three csv files of the published set.

    Returns:
        texts; labels, int64, axes (rows,); the names of the classes in alphabetical order; and how
        many rows each part has.

    Raises:
        MissingDataError: a file is not there.
        DataError: a file is of another format.
    """
    folder = data_folder(root) / FOLDER
    parts = [_read(folder / name) for name in FILES]
    whole = pd.concat(parts, ignore_index=True)
    classes, labels = np.unique(whole[CLASS].to_numpy(dtype=str), return_inverse=True)
    counts = [len(part) for part in parts]
    return whole[TEXT].tolist(), labels.astype(np.int64), tuple(classes.tolist()), counts


def _read(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise MissingDataError(
            f"the file '{path.name}' is not there",
            where=str(path.parent),
            want=f"{', '.join(FILES)} of the data set 'DBPedia Classes' (Kaggle)",
            fix=f"put them in a folder '{FOLDER}' and set {ENVIRONMENT} to the folder above it",
        )
    try:
        return pd.read_csv(path, usecols=[TEXT, CLASS], dtype=str, keep_default_na=False)
    except (OSError, ValueError):
        raise DataError(
            "this file of articles cannot be read",
            where=str(path),
            want=f"a csv with the columns {TEXT} and {CLASS}",
        ) from None
