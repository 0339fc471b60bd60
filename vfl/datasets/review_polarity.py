"""Two thousand film reviews, for or against (Pang and Lee 2004, polarity dataset 2.0)."""

from __future__ import annotations

import re
import tarfile
import zlib
from pathlib import Path

import numpy as np

from vfl.datasets.picture_set import ENVIRONMENT, data_folder, interleaved
from vfl.errors import DataError, MissingDataError

FILE = "review-polarity/review_polarity.tar.gz"
CLASSES = ("neg", "pos")
LENGTH, VOCABULARY = 400, 20_000
LIMIT_BYTES = 2**20
_REVIEW = re.compile(r"(?:.*/)?(neg|pos)/(cv[^/]*\.txt)", re.ASCII)


def read_review_polarity(root: Path | None) -> tuple[list[str], np.ndarray]:
    """The reviews, one against and one for in turn, in the order of their names.

    Args:
        root: folder that holds ``review-polarity/review_polarity.tar.gz`` as its authors publish
            it.

    Returns:
        the texts, and their labels, int64, axes (rows,): 0 against, 1 for.

    Raises:
        MissingDataError: the file is not there.
        DataError: the file is damaged or of another format.
    """
    path = data_folder(root) / FILE
    if not path.is_file():
        raise MissingDataError(
            f"the file '{path.name}' is not there",
            where=str(path.parent),
            want="the polarity dataset 2.0 of Pang and Lee",
            fix=f"set {ENVIRONMENT} to the folder above '{path.parent.name}'",
        )
    try:
        found = _reviews(path)
    except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as error:
        raise DataError(
            "these reviews cannot be read", where=str(path), got=type(error).__name__
        ) from None
    texts = [found[name] for name in sorted(found)]
    labels = np.array([CLASSES.index(side) for side, _ in sorted(found)], dtype=np.int64)
    if set(labels.tolist()) != {0, 1}:
        raise DataError(
            "these reviews are not of two sides", where=str(path), want="folders neg and pos"
        )
    order = interleaved(labels)
    return [texts[row] for row in order.tolist()], labels[order]


def _reviews(path: Path) -> dict[tuple[str, str], str]:
    """Texts by side and name; nothing is unpacked to disk."""
    found = {}
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            named = _REVIEW.fullmatch(member.name)
            file = archive.extractfile(member) if named and member.isfile() else None
            if named and file:
                if member.size > LIMIT_BYTES:
                    raise ValueError("a review is too large")
                found[named[1], named[2]] = file.read().decode("latin-1")
    return found
