"""Data sets known by name: some come with scikit-learn, the others are read from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from vfl.datasets import dbpedia, digit_pairs, review_polarity, yoochoose
from vfl.datasets.form import SetFormat
from vfl.datasets.party import Classes
from vfl.datasets.picture_set import in_proportion
from vfl.datasets.picture_sources import PIXELS, mean_and_spread, read_pictures
from vfl.datasets.sessions import next_items
from vfl.datasets.texts import Texts
from vfl.errors import BadOptionError, UnknownNameError, nearest


@dataclass(frozen=True, eq=False)
class Bundled:
    """One data set before it is cut into parties.

    Attributes:
        cells: pictures, axes (rows, channels, height, width); a table of number columns; rows of
            whole numbers, axes (rows, steps); or texts.
        labels: int64 codes, axes (rows,).
        classes: what the codes stand for.
        mean, scale: ``(pixel - mean) / scale`` standardises a picture, one of each a channel;
            unused for anything else.
        train_rows: rows before the set's own validation and test rows; None where it has none.
        validation_rows: rows between those of training and test; 0 where they are yet to be drawn.
    """

    cells: np.ndarray | pd.DataFrame | Texts
    labels: np.ndarray
    classes: Classes
    mean: tuple[float, ...] = (0.0,)
    scale: tuple[float, ...] = (1.0,)
    train_rows: int | None = None
    validation_rows: int = 0

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class Request:
    """What is wanted of a data set; see `read_bundled`."""

    source: str
    root: Path | None
    download: bool
    limit: int | None
    form: SetFormat
    seed: int


def read_bundled(
    source: str,
    root: Path | None = None,
    download: bool = False,
    limit: int | None = None,
    form: SetFormat | None = None,
    seed: int = 0,
) -> Bundled:
    """A data set by name.

    Args:
        source: one of `SOURCES`, or picture sets joined with a plus: ``mnist+fashion_mnist``.
        root: folder of the files; see the readers.
        download: fetch the picture files when they are not there.
        limit: at most so many rows, the first ones; a set with parts of its own gives rows of
            each in their proportion.
        form: what is made of the set.
        seed: the run's public seed, for what is drawn.

    Raises:
        UnknownNameError: no such data set.
        BadOptionError: a limit below 1, or something the set cannot do.
        MissingDataError: files that are not there.
        DataError: files that are damaged.
    """
    names = source.split("+")
    for name in names:
        _check_name(name, PIXELS if len(names) > 1 else SOURCES)
    if len(set(names)) < len(names):
        raise BadOptionError(
            "a data set is named twice", where="data.source", got=source, want="different sets"
        )
    if limit is not None and limit < 1:
        raise BadOptionError("a limit of rows is at least 1", got=str(limit))
    form = form or SetFormat()
    read, known = _READERS.get(source, (_pictures, ("side", "classes")))
    form.check(source, *known)
    return read(Request(source, root, download, limit, form, seed))


def _check_name(name: str, known: Sequence[str] | Mapping[str, object]) -> None:
    if name not in known:
        raise UnknownNameError(
            f"no data set is called '{name}'"
            if known is SOURCES
            else f"no set of pictures is called '{name}'",
            where="data.source",
            want=", ".join(known),
            fix=nearest(name, known),
        )


def _digits(asked: Request) -> Bundled:
    from sklearn.datasets import load_digits

    found = load_digits()
    return Bundled(
        cells=found.images[: asked.limit, None],
        labels=found.target[: asked.limit].astype(np.int64),
        classes=tuple(range(10)),
        scale=(16.0,),
    )


def _breast_cancer(asked: Request) -> Bundled:
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer(as_frame=True)
    return Bundled(
        cells=found.data[: asked.limit],
        labels=found.target[: asked.limit].to_numpy(dtype=np.int64, copy=True),
        classes=tuple(map(str, found.target_names)),
    )


def _digit_pairs(asked: Request) -> Bundled:
    pictures, labels = digit_pairs.read_digit_pairs(asked.seed)
    kept, counts = _first_of_parts(digit_pairs.PART_ROWS, asked.limit)
    return Bundled(
        cells=pictures[kept],
        labels=labels[kept],
        classes=tuple(range(100)),
        train_rows=counts[0],
        validation_rows=counts[1],
    )


def _pictures(asked: Request) -> Bundled:
    names = asked.source.split("+")
    found = read_pictures(names, asked.root, asked.download, asked.form)
    pictures, labels, train_rows = found.read(asked.limit)
    mean, scale = mean_and_spread(names)
    return Bundled(
        cells=pictures,
        labels=labels,
        classes=found.classes,
        mean=tuple(255 * channel for channel in mean),
        scale=tuple(255 * channel for channel in scale),
        train_rows=train_rows,
    )


def _sessions(asked: Request) -> Bundled:
    filtered = asked.source == "yoochoose_filtered"
    read = yoochoose.read_filtered if filtered else yoochoose.read_clicks
    parts, items = read(asked.root)
    sizes = [sum(len(session) - 1 for session in part) for part in parts]
    counts = in_proportion(sizes, asked.limit)
    length = asked.form.length or yoochoose.LENGTH
    found = [next_items(part, length, count) for part, count in zip(parts, counts, strict=True)]
    return Bundled(
        cells=np.concatenate([rows for rows, _ in found]),
        labels=np.concatenate([following for _, following in found]),
        classes=tuple(range(items)),
        train_rows=counts[0],
        validation_rows=counts[1],
    )


def _review_polarity(asked: Request) -> Bundled:
    texts, labels = review_polarity.read_review_polarity(asked.root)
    length = asked.form.length or review_polarity.LENGTH
    vocabulary = asked.form.vocabulary or review_polarity.VOCABULARY
    return Bundled(
        cells=Texts.of(texts[: asked.limit], length, vocabulary),
        labels=labels[: asked.limit],
        classes=review_polarity.CLASSES,
    )


def _dbpedia(asked: Request) -> Bundled:
    texts, labels, classes, sizes = dbpedia.read_dbpedia(asked.root)
    kept, counts = _first_of_parts(sizes, asked.limit)
    length = asked.form.length or dbpedia.LENGTH
    vocabulary = asked.form.vocabulary or dbpedia.VOCABULARY
    return Bundled(
        cells=Texts.of([texts[row] for row in kept.tolist()], length, vocabulary),
        labels=labels[kept],
        classes=classes,
        train_rows=counts[0],
        validation_rows=counts[1],
    )


def _first_of_parts(sizes: Sequence[int], limit: int | None) -> tuple[np.ndarray, list[int]]:
    """The first rows of every part, one part after another, and how many of each."""
    counts = in_proportion(sizes, limit)
    starts = np.cumsum([0, *sizes])[:-1]
    kept = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return np.concatenate(kept), counts


#: What reads a data set, and which parts of a `SetFormat` it follows.
_READERS: Mapping[str, tuple[Callable[[Request], Bundled], tuple[str, ...]]] = {
    "digits": (_digits, ()),
    "digit_pairs": (_digit_pairs, ()),
    "breast_cancer": (_breast_cancer, ()),
    "yoochoose": (_sessions, ("length",)),
    "yoochoose_filtered": (_sessions, ("length",)),
    "review_polarity": (_review_polarity, ("length", "vocabulary")),
    "dbpedia": (_dbpedia, ("length", "vocabulary")),
}
SOURCES = (*_READERS, *PIXELS)
