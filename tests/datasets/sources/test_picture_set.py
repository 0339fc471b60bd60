from __future__ import annotations

import numpy as np
import pytest

from vfl.core.errors import BadOptionError, DataError, UnknownNameError
from vfl.datasets import SetFormat
from vfl.datasets.sources import make, read_bundled
from vfl.datasets.sources.base import interleaved
from vfl.datasets.sources.picture_set import (
    Part,
    PictureSet,
    first_classes,
    resize,
    stacked,
)
from vfl.datasets.sources.pictures import CIFAR10, MNIST, FashionMNIST, channel_mean_and_std


def test_every_class_comes_in_turn_in_the_order_of_the_file():
    labels = np.random.default_rng(0).integers(0, 5, 100)
    order = interleaved(labels)
    waiting = {label: np.flatnonzero(labels == label).tolist() for label in range(5)}
    want = []
    while any(waiting.values()):
        want += [rows.pop(0) for rows in waiting.values() if rows]
    assert order.tolist() == want


def drawn_set(train: int, test: int, classes: int, side: int = 4, channels: int = 1) -> PictureSet:
    rng = np.random.default_rng(train)
    parts = [
        Part.of(
            rng.integers(0, 256, (rows, channels, side, side), dtype=np.uint8),
            rng.integers(0, classes, rows),
        )
        for rows in (train, test)
    ]
    return PictureSet(*parts, tuple(f"{train}:{n}" for n in range(classes)))


def test_a_box_filter_takes_the_mean_of_what_a_pixel_covers():
    pictures = np.random.default_rng(0).integers(0, 256, (3, 2, 6, 6), dtype=np.uint8)
    got = resize(pictures, 2)
    assert got.dtype == np.uint8
    for row in range(3):
        for channel in range(2):
            for y in range(2):
                for x in range(2):
                    box = pictures[row, channel, 3 * y : 3 * y + 3, 3 * x : 3 * x + 3]
                    assert abs(int(got[row, channel, y, x]) - box.mean()) < 1  # Pillow rounds twice


def test_only_rows_of_the_first_classes_stay():
    found = drawn_set(40, 20, 5)
    pictures, labels, train_rows = first_classes(found, 2).read()
    everything, codes, first = found.read()
    keep = codes < 2
    np.testing.assert_array_equal(pictures, everything[keep])
    np.testing.assert_array_equal(labels, codes[keep])
    assert train_rows == keep[:first].sum()
    assert first_classes(found, 2).classes == ("40:0", "40:1")
    with pytest.raises(BadOptionError, match="fewer classes"):
        first_classes(found, 6)


def test_stacked_sets_take_turns_and_their_classes_follow_each_other():
    one, two = drawn_set(5, 2, 3), drawn_set(9, 4, 2)
    pictures, labels, train_rows = stacked([one, two]).read()
    waiting = [list(range(5)), list(range(9))]
    want_pictures, want_labels = [], []
    while any(waiting):
        for found, rows, offset in zip((one, two), waiting, (0, 3), strict=True):
            if rows:
                row = rows.pop(0)
                want_pictures.append(found.train.take(np.array([row]))[0])
                want_labels.append(found.train.labels[row] + offset)
    assert train_rows == 14
    np.testing.assert_array_equal(pictures[:14], want_pictures)
    assert labels[:14].tolist() == want_labels
    assert sorted(labels[14:]) == sorted([*one.test.labels, *(two.test.labels + 3)])
    assert stacked([one, two]).classes == (*one.classes, *two.classes)
    assert len(stacked([one, two, drawn_set(3, 1, 4)]).read(limit=6)[1]) == 6


@pytest.mark.parametrize("other", [{"side": 6}, {"channels": 3}])
def test_sets_of_other_shapes_are_not_stacked(other):
    with pytest.raises(DataError, match="differ in shape"):
        stacked([drawn_set(5, 2, 3), drawn_set(6, 2, 3, **other)]).read()


def test_sets_of_other_sizes_are_joined_at_one_size(monkeypatch):
    monkeypatch.setattr(MNIST, "pictures", lambda self, asked: drawn_set(5, 2, 3))
    monkeypatch.setattr(FashionMNIST, "pictures", lambda self, asked: drawn_set(6, 2, 3, side=6))
    form = SetFormat(side=2, classes=4)
    data = read_bundled("mnist+fashion_mnist", form=form)
    assert data.cells.shape[1:] == (1, 2, 2)
    assert data.classes == ("5:0", "5:1", "5:2", "6:0")
    assert set(data.labels) <= set(range(4))


def test_one_mean_and_spread_for_stacked_sets_is_that_of_all_their_pixels():
    rng = np.random.default_rng(0)
    pixels = [rng.normal(0.1307, 0.3081, 100_000), rng.normal(0.2860, 0.3530, 100_000)]
    together = np.concatenate(pixels)
    ((mean,), (spread,)) = channel_mean_and_std([MNIST(), FashionMNIST()])
    assert mean == pytest.approx(together.mean(), abs=0.003)
    assert spread == pytest.approx(together.std(), abs=0.003)
    assert channel_mean_and_std([CIFAR10()]) == (
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
    )


@pytest.mark.parametrize(
    ("source", "error", "told"),
    [
        ("mnist+fashion_mnits", UnknownNameError, "did you mean 'fashion_mnist'"),
        ("mnist+digits", BadOptionError, "only sets of pictures"),
        ("mnist+", UnknownNameError, "no data set is called"),
        ("mnist+mnist", BadOptionError, "named twice"),
    ],
)
def test_names_that_cannot_be_joined(source, error, told):
    with pytest.raises(error, match=told):
        make(source)


@pytest.mark.parametrize(
    ("source", "form", "told"),
    [
        ("digits", SetFormat(side=4), "does not support data.side"),
        ("mnist", SetFormat(length=4), "only data.side, data.classes"),
        ("yoochoose", SetFormat(length=4, vocabulary=9), "does not support data.vocabulary"),
    ],
)
def test_what_a_set_cannot_do_is_refused(source, form, told):
    with pytest.raises(BadOptionError, match=told):
        read_bundled(source, form=form)
