"""Sessions of clicks as rows: all items up to a click, and the next clicked item.

YooChoose: the next click of a visitor of a shop (RecSys Challenge 2015). ``yoochoose`` is the last
64th of the sessions of the published clicks. ``yoochoose_filtered`` is a smaller edition by others,
with items that have a category; metrics of the two are not comparable.
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
SHARE = 64  # Hidasi et al. 2016 and their successors: the last 1/64 of the sessions
MIN_CLICKS = 5
LIMIT_BYTES = 2**28
PUBLISHED = "a file of the RecSys Challenge 2015 (YooChoose)"

Sessions = list[list[int]]


class YooChoose(DataSource):
    """The next click of a visitor of a shop: the last 64th of the published sessions."""

    follows = ("length",)
    own_parts = ("validation", "test")

    def read(self, asked: Request) -> Bundled:
        return _beginnings(*read_clicks(asked.root), asked)


class FilteredYooChoose(DataSource):
    """The next click of a visitor of a shop: a smaller edition, with items that have a category."""

    follows = ("length",)
    own_parts = ("validation", "test")

    def read(self, asked: Request) -> Bundled:
        return _beginnings(*read_filtered(asked.root), asked)


def _beginnings(parts: list[Sessions], items: int, asked: Request) -> Bundled:
    """Every prefix of the sessions with its next item."""
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
    """Every prefix of every session, with its next item.

    Args:
        sessions: items as whole numbers from 0, each session in the order of its clicks.
        length: items of a row; a longer prefix keeps its last items.
        limit: largest number of rows, the first ones.

    Returns:
        Rows, float32, axes (rows, length): items counted from 1, then zeros as padding; next items,
        counted from 0, int64, axes (rows,). A float32 represents whole numbers below 2**24 exactly.

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
    """Read sessions of the training, validation and test parts, and the number of items.

    Args:
        root: folder that contains ``yoochoose1_64`` with ``train.txt.gz``, ``valid.txt.gz`` and
            ``test.txt.gz``: a header, then session, categories and items between tabs.

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
    """Read sessions of the published clicks, split by time, and the number of items.

    Sessions with one click are dropped, then items with fewer than five clicks, then sessions with
    one remaining click. The last 64th of the sessions, by their last click, goes to training,
    validation and test in the proportion 8:1:1, in order of time. The remaining items are numbered.

    Args:
        root: folder that contains ``yoochoose/yoochoose-clicks.dat``: session, time, item and
            category between commas, without a header.

    Raises:
        MissingDataError: the file does not exist.
        DataError: the file has another format, or too few sessions remain.
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
    """The last of `share` equal parts of the sessions, in the order of their last clicks.

    Args:
        clicks: columns session, time and item.
        share: number of parts.
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
