from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from vfl.datasets.bundled import read_bundled
from vfl.datasets.images import read_idx, read_images
from vfl.datasets.picture_sources import PIXELS
from vfl.errors import DataError, MissingDataError


def idx_bytes(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_set(root: Path, folder: str, train: int, test: int, zipped: bool) -> np.ndarray:
    rng = np.random.default_rng(0)
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    pictures = rng.integers(0, 256, (train + test, 28, 28))
    labels = rng.integers(0, 10, train + test)
    for part, rows in (("train", slice(0, train)), ("t10k", slice(train, None))):
        for kind, array in (("images-idx3", pictures[rows]), ("labels-idx1", labels[rows])):
            cells = idx_bytes(array)
            path = raw / f"{part}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(cells) if zipped else cells)
    return pictures


@pytest.mark.parametrize("zipped", [False, True])
def test_training_rows_come_first(tmp_path, zipped):
    want = write_set(tmp_path, "FashionMNIST", 14, 6, zipped)
    pictures, labels, train_rows = read_images("fashion_mnist", tmp_path)
    assert train_rows == 14
    assert labels.dtype == np.int64
    np.testing.assert_array_equal(pictures[:, 0], want)


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    write_set(tmp_path, "MNIST", 3, 2, zipped=True)
    monkeypatch.setenv("VFL_DATA", str(tmp_path))
    assert len(read_images("mnist")[1]) == 5


def test_missing_files_are_told_with_the_cure(tmp_path):
    with pytest.raises(MissingDataError) as caught:
        read_images("mnist", tmp_path)
    assert "--download" in str(caught.value)
    assert "VFL_DATA" in str(caught.value)


def test_the_network_is_asked_only_when_told(tmp_path, monkeypatch):
    from torchvision import datasets

    asked = []

    def fetch(root: str, download: bool) -> None:
        asked.append(download)
        write_set(Path(root), "MNIST", 3, 2, zipped=False)

    monkeypatch.setattr(datasets, "MNIST", fetch)
    with pytest.raises(MissingDataError):
        read_images("mnist", tmp_path)
    assert not asked
    assert len(read_images("mnist", tmp_path, download=True)[1]) == 5
    assert asked == [True]


@pytest.mark.parametrize(
    "damage",
    [
        lambda cells: cells[:-1],
        lambda cells: cells + b"x",
        lambda cells: cells[:6],
        lambda cells: b"",
        lambda cells: b"\0\0\x0d" + cells[3:],
        lambda cells: cells[:4] + b"\xff" * 12 + cells[16:],
    ],
    ids=["short", "long", "in the header", "empty", "floats", "huge axes"],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_damaged_file_is_refused(tmp_path, damage, zipped):
    cells = damage(idx_bytes(np.zeros((2, 3, 3))))
    path = tmp_path / ("a.gz" if zipped else "a")
    path.write_bytes(gzip.compress(cells) if zipped else cells)
    with pytest.raises(DataError, match=r"not a whole idx file|cannot be read"):
        read_idx(path)


def test_a_damaged_archive_is_refused(tmp_path):
    path = tmp_path / "a.gz"
    whole = gzip.compress(idx_bytes(np.arange(250)))
    for cells in (whole[:40], b"no archive", whole[:30] + b"\xff" * 20 + whole[50:]):
        path.write_bytes(cells)
        with pytest.raises(DataError):
            read_idx(path)


def test_pictures_and_labels_of_different_number_are_refused(tmp_path):
    write_set(tmp_path, "MNIST", 3, 2, zipped=False)
    labels = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.zeros(4)))
    with pytest.raises(DataError, match="differ in number"):
        read_images("mnist", tmp_path)


def test_a_limit_keeps_the_proportion_of_training_and_test_rows(tmp_path):
    pictures = write_set(tmp_path, "MNIST", 60, 10, zipped=False)
    data = read_bundled("mnist", tmp_path, limit=14)
    assert (data.rows, data.train_rows) == (14, 12)
    np.testing.assert_array_equal(data.cells[:12, 0], pictures[:12])
    np.testing.assert_array_equal(data.cells[12:, 0], pictures[60:62])


@pytest.mark.parametrize("source", ["mnist", "fashion_mnist"])
def test_the_constants_standardise_the_real_training_pixels(data_root, source):
    pictures, labels, train_rows = read_images(source, data_root)
    assert (pictures.shape, train_rows) == ((70_000, 1, 28, 28), 60_000)
    counts = np.bincount(labels[train_rows:])
    assert counts.tolist() == (
        [1000] * 10
        if source == "fashion_mnist"
        else [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    )
    seen = np.bincount(pictures[:train_rows].reshape(-1), minlength=256)
    scale = np.arange(256) / 255
    mean = (seen * scale).sum() / seen.sum()
    spread = np.sqrt((seen * (scale - mean) ** 2).sum() / seen.sum())
    (own_mean,), (own_spread,) = PIXELS[source]
    assert (own_mean, own_spread) == pytest.approx((mean, spread), abs=5e-5)
