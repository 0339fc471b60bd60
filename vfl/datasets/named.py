"""Data sets known by name: some come with scikit-learn, the others are read from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from vfl.core import seeds
from vfl.core.errors import BadOptionError, UnknownNameError, nearest
from vfl.datasets.picture_sources import PIXELS, read_pictures
from vfl.datasets.sessions import read_yoochoose
from vfl.datasets.sources import Bundled, Request, SetFormat, first_rows
from vfl.datasets.texts import read_dbpedia, read_review_polarity

#: Of the digit pairs: rows of each part, digits it draws from, and the noise on a picture.
PART_ROWS = (12_000, 3_000, 3_000)
PART_DIGITS = (1_200, 300, 297)
NOISE = 0.25


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
    known = tuple(PIXELS) if len(names) > 1 else SOURCES
    for name in names:
        if name not in known:
            what = "set of pictures" if len(names) > 1 else "data set"
            raise UnknownNameError(
                f"no {what} is called '{name}'",
                where="data.source",
                want=", ".join(known),
                fix=nearest(name, known),
            )
    if len(set(names)) < len(names):
        raise BadOptionError(
            "a data set is named twice", where="data.source", got=source, want="different sets"
        )
    if limit is not None and limit < 1:
        raise BadOptionError("a limit of rows is at least 1", got=str(limit))
    form = form or SetFormat()
    read, followed, _ = _READERS.get(source, _PICTURES)
    form.check(source, *followed)
    return read(Request(source, root, download, limit, form, seed))


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """The handwritten digits that come with scikit-learn, whose import their file does without.

    Returns:
        pictures, float64 from 0 to 16, axes (1797, 8, 8); digits, int64, axes (1797,).
    """
    package = find_spec("sklearn")
    assert package is not None, "vfl depends on scikit-learn"
    assert package.origin is not None, "it is installed as files"
    table = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


def _digits(asked: Request) -> Bundled:
    pictures, digits = read_digits()
    return Bundled(
        cells=pictures[: asked.limit, None],
        labels=digits[: asked.limit],
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
    pictures, labels = read_digit_pairs(asked.seed)
    kept, counts = first_rows(PART_ROWS, asked.limit)
    return Bundled(
        cells=pictures[kept],
        labels=labels[kept],
        classes=tuple(range(100)),
        train_rows=counts[0],
        validation_rows=counts[1],
    )


def read_digit_pairs(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of two digits, their training, validation and test rows one after another.

    Every part draws from digits of its own, so that no digit is in two parts.

    Args:
        seed: the run's public seed.

    Returns:
        pictures, float32, axes (rows, 1, 8, 16), black 0 and white 1 with normal noise of 0.25;
        labels, int64, axes (rows,): ten times the left digit plus the right one.
    """
    images, values = read_digits()
    order = seeds.permutation(seed, len(values), "digit_pairs")
    draw = np.random.default_rng(seeds.derive(seed, "digit_pairs", "draw"))
    pairs = [
        draw.choice(digits, (rows, 2))
        for rows, digits in zip(PART_ROWS, np.split(order, np.cumsum(PART_DIGITS)), strict=False)
    ]
    left, right = np.concatenate(pairs).T
    pictures = np.concatenate([images[left], images[right]], axis=2) / 16
    pictures += NOISE * draw.standard_normal(pictures.shape)
    labels = 10 * values[left] + values[right]
    return pictures[:, None].astype(np.float32), labels.astype(np.int64)


def own_parts(source: str) -> tuple[str, ...]:
    """The parts of the split that a data set has rows of its own for; none for other sources.

    >>> own_parts("mnist"), own_parts("dbpedia"), own_parts("digits"), own_parts("loans.csv")
    (('test',), ('validation', 'test'), (), ())
    """
    if source in _READERS:
        return _READERS[source][-1]
    return _PICTURES[-1] if set(source.split("+")) <= PIXELS.keys() else ()


_Reader = tuple[Callable[[Request], Bundled], tuple[str, ...], tuple[str, ...]]
_BOTH = ("validation", "test")
#: What reads a data set, which parts of a `SetFormat` it follows, and of which parts of the split
#: it has rows of its own.
_READERS: Mapping[str, _Reader] = {
    "digits": (_digits, (), ()),
    "digit_pairs": (_digit_pairs, (), _BOTH),
    "breast_cancer": (_breast_cancer, (), ()),
    "yoochoose": (read_yoochoose, ("length",), _BOTH),
    "yoochoose_filtered": (read_yoochoose, ("length",), _BOTH),
    "review_polarity": (read_review_polarity, ("length", "vocabulary"), ()),
    "dbpedia": (read_dbpedia, ("length", "vocabulary"), _BOTH),
}
_PICTURES: _Reader = (read_pictures, ("side", "classes"), ("test",))
SOURCES = (*_READERS, *PIXELS)
