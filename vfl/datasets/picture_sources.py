"""Picture sets known by name, alone or joined with a plus."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from vfl.datasets.arrange import first_classes, resized, stacked
from vfl.datasets.cifar import read_cifar
from vfl.datasets.form import SetFormat
from vfl.datasets.images import read_images
from vfl.datasets.party import Classes
from vfl.datasets.picture_set import Part, PictureSet
from vfl.datasets.tiny_imagenet import read_tiny_imagenet

Channels = tuple[float, ...]

# Mean and spread of each channel's training pixels on the scale 0..1; tests compute them again.
PIXELS: dict[str, tuple[Channels, Channels]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "tiny_imagenet": ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
}
FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def read_pictures(
    names: Sequence[str], root: Path | None, download: bool, form: SetFormat
) -> PictureSet:
    """One picture set, or several as one, their classes one after another.

    Args:
        names: keys of `PIXELS`.
        root: folder of the files.
        download: fetch what is not there.
        form: `side` and `classes` are followed.

    Raises:
        BadOptionError: more classes are asked for than there are.
        DataError: see the readers, and `stacked`.
    """
    sets = [_READERS[name](root, download) for name in names]
    if form.side is not None:
        sets = [resized(each, form.side) for each in sets]
    found = stacked(sets)
    return found if form.classes is None else first_classes(found, form.classes)


def mean_and_spread(names: Sequence[str]) -> tuple[Channels, Channels]:
    """What standardises the pictures of some sets alike, one number a channel.

    One pair for all of them, as if each gave as many rows: a pair for each set would need to know a
    picture's set, and that is half of its label. The spread is that of full-size pictures, whatever
    `side` is.

    Args:
        names: keys of `PIXELS`, all of as many channels.

    >>> [round(each[0], 3) for each in mean_and_spread(["mnist", "fashion_mnist"])]
    [0.208, 0.34]
    """
    means, spreads = (np.array([PIXELS[name][n] for name in names]) for n in (0, 1))
    spread = np.sqrt((spreads**2).mean(axis=0) + means.var(axis=0))
    return tuple(means.mean(axis=0).tolist()), tuple(spread.tolist())


def _idx_set(source: str, classes: Classes, root: Path | None, download: bool) -> PictureSet:
    pictures, labels, train_rows = read_images(source, root, download)
    train, test = (
        Part.of(pictures[rows], labels[rows])
        for rows in (slice(train_rows), slice(train_rows, None))
    )
    return PictureSet(train, test, classes)


_READERS: Mapping[str, Callable[[Path | None, bool], PictureSet]] = {
    "mnist": partial(_idx_set, "mnist", tuple(range(10))),
    "fashion_mnist": partial(_idx_set, "fashion_mnist", FASHION),
    "cifar10": partial(read_cifar, "cifar10"),
    "cifar100": partial(read_cifar, "cifar100"),
    "tiny_imagenet": lambda root, download: read_tiny_imagenet(root),
}
