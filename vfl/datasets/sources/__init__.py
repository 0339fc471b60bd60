"""Data sets by name: some come with scikit-learn, others are read from files.

>>> read_bundled("digits", limit=100).cells.shape, read_bundled("breast_cancer").cells.shape
((100, 1, 8, 8), (569, 30))

Several picture sets can be joined by plus signs: ``mnist+fashion_mnist``.

To add one: one file with a subclass of `DataSource`, one line below (or, from another package, an
entry point in the group ``vfl.sources``), and `vfl.testing.SourceContract`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vfl.core.errors import BadOptionError, SpecError
from vfl.core.registry import Registry, parse, parts
from vfl.core.sources import is_named_set
from vfl.datasets.sources.base import Bundled, DataSource, Request, SetFormat

if TYPE_CHECKING:
    from vfl.datasets.sources.pictures import PictureSource

_PICTURES = "vfl.datasets.sources.pictures"
SOURCES: Registry[DataSource] = Registry(
    kind="data set",
    contract=DataSource,  # type: ignore[type-abstract]
    members={
        "digits": "vfl.datasets.sources.scikit_learn:Digits",
        "digit_pairs": "vfl.datasets.sources.scikit_learn:DigitPairs",
        "breast_cancer": "vfl.datasets.sources.scikit_learn:BreastCancer",
        "yoochoose": "vfl.datasets.sources.sessions:YooChoose",
        "yoochoose_filtered": "vfl.datasets.sources.sessions:FilteredYooChoose",
        "review_polarity": "vfl.datasets.sources.texts:ReviewPolarity",
        "dbpedia": "vfl.datasets.sources.texts:DBPediaClasses",
        "mnist": f"{_PICTURES}:MNIST",
        "fashion_mnist": f"{_PICTURES}:FashionMNIST",
        "cifar10": f"{_PICTURES}:CIFAR10",
        "cifar100": f"{_PICTURES}:CIFAR100",
        "tiny_imagenet": f"{_PICTURES}:TinyImageNet",
    },
    group="vfl.sources",
)

__all__ = [
    "SOURCES",
    "Bundled",
    "DataSource",
    "Request",
    "SetFormat",
    "make",
    "own_parts",
    "read_bundled",
]


def make(source: str) -> DataSource:
    """Make the data set of a spec, or one data set of several picture sets joined by plus signs.

    Raises:
        SpecError: the name or an option is unknown, or the data sets cannot be joined.
    """
    specs = parts(source)
    made = [SOURCES.make(spec) for spec in specs]
    if len(made) == 1:
        return made[0]
    if len({parse(spec)[0] for spec in specs}) < len(specs):
        raise BadOptionError("a data set is named twice", got=source, want="different sets")
    return _joined(specs, made)


def _joined(specs: list[str], made: list[DataSource]) -> DataSource:
    from vfl.datasets.sources.pictures import JoinedPictures, PictureSource

    pictures: list[PictureSource] = []
    for spec, one in zip(specs, made, strict=True):
        if not isinstance(one, PictureSource):
            raise BadOptionError("only sets of pictures can be joined", got=spec)
        pictures.append(one)
    return JoinedPictures(pictures)


def read_bundled(
    source: str,
    root: Path | None = None,
    download: bool = False,
    limit: int | None = None,
    form: SetFormat | None = None,
    seed: int = 0,
) -> Bundled:
    """Read a data set by its name.

    Args:
        source: spec of a data set in `SOURCES`, or of several picture sets joined by plus signs.
        root: folder of the files; None takes it from the environment.
        download: whether to download missing files.
        limit: largest number of rows; the first rows are read; see `Request`.
        form: requested form of the rows.
        seed: the run's public seed, for data sets that draw rows at random.

    Raises:
        SpecError: see `make`.
        BadOptionError: the limit is below 1, or the data set does not support the requested form.
        MissingDataError: files are missing.
        DataError: files are damaged.
    """
    made = make(source)
    if limit is not None and limit < 1:
        raise BadOptionError("a limit of rows is at least 1", got=str(limit))
    form = form or SetFormat()
    form.check(source, made.follows)
    return made.read(Request(root, download, limit, form, seed))


def own_parts(source: str) -> tuple[str, ...]:
    """Return the parts of the split that a data set fixes; empty for tables and other sources.

    >>> own_parts("mnist"), own_parts("dbpedia"), own_parts("digits"), own_parts("loans.csv")
    (('test',), ('validation', 'test'), (), ())
    """
    if not is_named_set(source):
        return ()
    try:
        return tuple(make(source).own_parts)
    except SpecError:  # reading the source raises the error again
        return ()
