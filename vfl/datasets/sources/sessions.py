"""Sessions of clicks as rows: the items clicked so far are the inputs, the next item the label.

YooChoose: predict the next click of a visitor of an online shop (RecSys Challenge 2015).
``yoochoose`` has the last 64th of the sessions in the published clicks. ``yoochoose_filtered`` is a
smaller edition that others published, only with items that have a category; metrics on the two data
sets cannot be compared.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from vfl.core.errors import DataError
from vfl.datasets.sources.base import Bundled, DataSource, Request, in_proportion
from vfl.datasets.sources.files import data_folder, existing_file

FILTERED = "yoochoose1_64"
CLICKS = "yoochoose/yoochoose-clicks.dat"
LENGTH = 50
# As in Hidasi et al. 2016 and later papers, the data set is the last 1/64 of the sessions.
SHARE = 64
MIN_CLICKS = 5
LIMIT_BYTES = 2**28
PUBLISHED = "a file of the RecSys Challenge 2015 (YooChoose)"

Sessions = list[list[int]]


class YooChoose(DataSource):
    """Next click of a shop's visitor: the last 64th of the published sessions."""

    follows = ("length",)
    own_parts = ("validation", "test")

    def read(self, asked: Request) -> Bundled:
        return _beginnings(*read_clicks(asked.root), asked)


class FilteredYooChoose(DataSource):
    """Next click of a shop's visitor: a smaller edition, only with items that have a category."""

    follows = ("length",)
    own_parts = ("validation", "test")

    def read(self, asked: Request) -> Bundled:
        return _beginnings(*read_filtered(asked.root), asked)


def _beginnings(parts: list[Sessions], items: int, asked: Request) -> Bundled:
    """Make a row of every prefix of the sessions in each part, with the next item as label."""
    sizes = [sum(len(session) - 1 for session in part) for part in parts]
    counts = in_proportion(sizes, asked.limit)
    length = asked.form.length or LENGTH
    found = [next_items(part, length, count) for part, count in zip(parts, counts, strict=True)]
    return Bundled(
        cells=np.concatenate([rows for rows, _ in found]),
        labels=np.concatenate([following for _, following in found]),
        classes=tuple(range(items)),
        train_rows=counts[0],
        validation_rows=counts[1],
    )


def next_items(
    sessions: Sequence[Sequence[int]], length: int, limit: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Make a row of every prefix of every session, with the next item as label.

    Args:
        sessions: the items of each session, as whole numbers from 0, in the order of the clicks.
        length: number of items in a row; a longer prefix keeps only its last items.
        limit: largest number of rows; the first rows are made.

    Returns:
        Rows, float32, axes (rows, length): items counted from 1, then zeros as padding; and next
        items, int64, axes (rows,), counted from 0. A float32 holds whole numbers below 2**24
        exactly.

    >>> rows, following = next_items([[7, 4, 9]], length=2)
    >>> rows.tolist(), following.tolist()
    ([[8.0, 0.0], [8.0, 5.0]], [4, 9])
    """
    every = sum(max(len(items) - 1, 0) for items in sessions)
    count = min(limit if limit is not None else every, every)
    rows, following = np.zeros((count, length), np.float32), np.empty(count, np.int64)
    row = 0
    for items in sessions:
        known = np.array(items, dtype=np.int64) + 1
        for end in range(1, min(len(items), count - row + 1)):
            kept = known[max(0, end - length) : end]
            rows[row, : len(kept)] = kept
            following[row] = items[end]
            row += 1
    return rows, following


def read_filtered(root: Path | None) -> tuple[list[Sessions], int]:
    """Read sessions of the training, validation and test part; also return the number of items.

    Args:
        root: folder that contains ``yoochoose1_64`` with ``train.txt.gz``, ``valid.txt.gz`` and
            ``test.txt.gz``. Each file has a header, then lines with session, categories and items,
            separated by tabs.

    Raises:
        MissingDataError: files are missing.
        DataError: a file has another format.
    """
    folder = data_folder(root) / FILTERED
    files = (folder / f"{part}.txt.gz" for part in ("train", "valid", "test"))
    parts = [_read_part(existing_file(file, PUBLISHED)) for file in files]
    items = (item for sessions in parts for session in sessions for item in session)
    return parts, max(items, default=-1) + 1


def _read_part(path: Path) -> Sessions:
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            text = file.read(LIMIT_BYTES + 1)
        columns = [line.split("\t") for line in text.splitlines()[1:]]
        sessions = [[int(item) for item in items.split(",")] for _, _, items in columns]
    except (OSError, EOFError, ValueError, zlib.error):
        raise _bad_file(path, "session, categories and items between tabs") from None
    if len(text) > LIMIT_BYTES or any(item < 0 for items in sessions for item in items):
        raise _bad_file(path, "items as numbers from 0, in less than 256 MiB")
    return sessions


def read_clicks(root: Path | None) -> tuple[list[Sessions], int]:
    """Read sessions of the published clicks, split by time; also return the number of items.

    First, sessions with one click are dropped; then items with fewer than five clicks; then
    sessions that have one click left. Of the remaining sessions, the 1/64 that ended last is
    divided, in order of time, into training, validation and test sessions in the proportion 8:1:1.
    The items in these sessions are then numbered from 0.

    Args:
        root: folder that contains ``yoochoose/yoochoose-clicks.dat``: lines with session, time,
            item and category, separated by commas, without a header.

    Raises:
        MissingDataError: the file does not exist.
        DataError: the file has another format, or too few sessions are left.
    """
    path = existing_file(data_folder(root) / CLICKS, PUBLISHED)
    try:
        clicks = pd.read_csv(
            path,
            header=None,
            usecols=[0, 1, 2],
            names=["session", "time", "item"],
            dtype={"session": np.int32, "item": np.int32},
            parse_dates=["time"],
            date_format="ISO8601",
        )
        clicks["time"] = clicks["time"].astype("datetime64[ms, UTC]").astype(np.int64)
    except (OSError, ValueError, TypeError, OverflowError):
        raise _bad_file(path, "session, time, item and category between commas") from None
    recent = last_sessions(_without_rare(clicks), SHARE)
    recent["item"], items = pd.factorize(recent["item"], sort=True)
    sessions: Sessions = recent.groupby("session", sort=False)["item"].agg(list).tolist()
    first, second = round(0.8 * len(sessions)), round(0.9 * len(sessions))
    parts = [sessions[:first], sessions[first:second], sessions[second:]]
    if not all(parts):
        raise DataError(
            "too few sessions remain for the three parts",
            where=str(path),
            got=f"{len(sessions)} sessions",
            fix="use the complete file as it was published",
        )
    return parts, len(items)


def last_sessions(clicks: pd.DataFrame, share: int) -> pd.DataFrame:
    """Return clicks of the last 1/`share` of the sessions, ordered by each session's last click.

    Args:
        clicks: all clicks, with the columns session, time and item.
        share: number of equal parts into which the sessions are divided by time.
    """
    ends = clicks.groupby("session")["time"].max().reset_index()
    ends = ends.sort_values(["time", "session"], ignore_index=True)
    kept = ends["session"].tail(-(-len(ends) // share))
    place = clicks["session"].map(pd.Series(np.arange(len(kept)), index=kept))
    chosen = clicks.assign(place=place)[place.notna()]
    return chosen.sort_values(["place", "time"], kind="stable", ignore_index=True)


def _without_rare(clicks: pd.DataFrame) -> pd.DataFrame:
    for column, least in (("session", 2), ("item", MIN_CLICKS), ("session", 2)):
        clicks = clicks[clicks.groupby(column)[column].transform("size") >= least]
    return clicks


def _bad_file(path: Path, want: str) -> DataError:
    return DataError("this file of sessions cannot be read", where=str(path), want=want)
