"""MNIST, CIFAR and Tiny-ImageNet from files written here, and from the real ones where they are."""

from __future__ import annotations

import gzip
import io
import tarfile
import urllib.request
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from set_files import (
    WNIDS,
    flat_jpeg,
    idx_bytes,
    jpeg_of,
    write_archives,
    write_binary,
    write_jpeg_archive,
    write_published,
    write_set,
)

from vfl.core.errors import DataError, MissingDataError
from vfl.datasets import SOURCES, Dealing, load_bundled
from vfl.datasets.sources import read_bundled
from vfl.datasets.sources.pictures import (
    LAYOUTS,
    decode_jpeg,
    read_cifar,
    read_idx,
    read_jpeg_archive,
    read_mnist,
    read_tiny_imagenet,
)

DIGITS = tuple(range(10))


def constants(source):
    """Mean and spread of each channel, on the scale 0..1."""
    member = SOURCES.member(source)
    return member.mean, member.scale


@pytest.mark.parametrize("zipped", [False, True])
def test_training_rows_come_first(tmp_path, zipped):
    want = write_set(tmp_path, "FashionMNIST", 14, 6, zipped)
    pictures, labels, train_rows = read_mnist("FashionMNIST", DIGITS, tmp_path).read()
    assert train_rows == 14
    assert labels.dtype == np.int64
    np.testing.assert_array_equal(pictures[:, 0], want)


def test_mnist_asks_the_network_only_when_told(tmp_path, monkeypatch):
    from torchvision import datasets

    asked = []

    def fetch(root: str, download: bool) -> None:
        asked.append(download)
        write_set(Path(root), "MNIST", 3, 2, zipped=False)

    monkeypatch.setattr(datasets, "MNIST", fetch)
    with pytest.raises(MissingDataError):
        read_mnist("MNIST", DIGITS, tmp_path)
    assert not asked
    assert len(read_mnist("MNIST", DIGITS, tmp_path, download=True).read()[1]) == 5
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
def test_a_damaged_idx_file_is_refused(tmp_path, damage, zipped):
    cells = damage(idx_bytes(np.zeros((2, 3, 3))))
    path = tmp_path / ("a.gz" if zipped else "a")
    path.write_bytes(gzip.compress(cells) if zipped else cells)
    with pytest.raises(DataError, match=r"not a complete idx file|cannot be read"):
        read_idx(path)


def test_a_damaged_gzip_is_refused(tmp_path):
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
        read_mnist("MNIST", DIGITS, tmp_path)


@pytest.mark.parametrize("source", ["mnist", pytest.param("fashion_mnist", marks=pytest.mark.slow)])
def test_the_constants_standardise_real_mnist(data_root, source):
    found = read_bundled(source, data_root)
    pictures, labels, train_rows = found.cells, found.labels, found.train_rows
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
    (own_mean,), (own_spread,) = constants(source)
    assert (own_mean, own_spread) == pytest.approx((mean, spread), abs=5e-5)


@pytest.mark.parametrize("source", ["cifar10", "cifar100"])
def test_binary_rows_in_order(tmp_path, source):
    want, labels = write_binary(tmp_path, source)
    found = read_cifar(source, tmp_path)
    pictures, codes, train_rows = found.read()
    assert (pictures.dtype, codes.dtype, train_rows) == (np.uint8, np.int64, 10)
    np.testing.assert_array_equal(pictures, want)
    np.testing.assert_array_equal(codes, labels)
    assert found.classes[3] == "class 3"
    assert len(found.classes) == LAYOUTS[source].classes


def test_each_channel_is_standardised_by_its_own_constants(tmp_path):
    want, labels = write_binary(tmp_path, "cifar10")
    parties = ["left", "right"]
    data = load_bundled("cifar10", parties, "top", Dealing(0, validation=0.2), root=tmp_path)
    whole = np.concatenate([data[party].inputs.numpy() for party in parties], axis=-1)
    assert data["left"].inputs.shape == (14, 3, 32, 16)
    mean, spread = (np.array(each)[:, None, None] for each in constants("cifar10"))
    np.testing.assert_allclose(whole, (want / 255 - mean) / spread, rtol=1e-4, atol=1e-5)
    assert data["left"].split.test.tolist() == [10, 11, 12, 13]
    assert data["top"].labels.tolist() == labels.tolist()


def test_jpegs_stand_in_where_the_binary_files_are_missing(tmp_path):
    names = {"names": ["cat", "dog"]}
    folder = tmp_path / "CIFAR10-jpeg"
    write_jpeg_archive(folder / "train.npz", [10, 20, 30, 40], [0, 0, 1, 1], names, side=32)
    write_jpeg_archive(folder / "test.npz", [50, 60], [0, 1], names, side=32)
    found = read_cifar("cifar10", tmp_path, download=True)  # nothing is fetched: the set is there
    pictures, labels, train_rows = found.read()
    assert (found.classes, train_rows) == (("cat", "dog"), 4)
    assert pictures[:, :, 5, 7].tolist() == [[level] * 3 for level in (10, 30, 20, 40, 50, 60)]
    assert labels.tolist() == [0, 1, 0, 1, 0, 1]
    want, _ = write_binary(tmp_path, "cifar10")
    np.testing.assert_array_equal(read_cifar("cifar10", tmp_path).read()[0], want)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("test_batch.bin", lambda cells: cells[:-1]),
        ("data_batch_5.bin", lambda cells: cells + b"x"),
        ("data_batch_1.bin", lambda cells: b""),
        ("data_batch_1.bin", lambda cells: b"\x0a" + cells[1:]),
        ("batches.meta.txt", lambda cells: cells.replace(b"class 3\n", b"")),
    ],
    ids=["short", "long", "empty", "label 10", "a name less"],
)
def test_a_damaged_binary_file_is_refused(tmp_path, name, damage):
    write_binary(tmp_path, "cifar10")
    path = tmp_path / "cifar-10-batches-bin" / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError):
        read_cifar("cifar10", tmp_path).read()


def test_a_missing_file_of_cifar_is_named(tmp_path):
    write_binary(tmp_path, "cifar10")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin").unlink()
    with pytest.raises(MissingDataError, match=r"data_batch_2\.bin"):
        read_cifar("cifar10", tmp_path)


def test_cifar_asks_the_network_only_when_told(tmp_path, monkeypatch):
    want, _ = write_binary(tmp_path / "published", "cifar10")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(tmp_path / "published" / "cifar-10-batches-bin", "cifar-10-batches-bin")
    asked = []
    monkeypatch.setattr(
        urllib.request,
        "urlopen",
        lambda url, timeout: asked.append(url) or io.BytesIO(packed.getvalue()),
    )
    layout = LAYOUTS["cifar10"]
    known = replace(layout.archive, sha256=sha256(packed.getvalue()).hexdigest())
    monkeypatch.setitem(LAYOUTS, "cifar10", replace(layout, archive=known))
    with pytest.raises(MissingDataError):
        read_cifar("cifar10", tmp_path / "here")
    assert not asked
    pictures, _, _ = read_cifar("cifar10", tmp_path / "here", download=True).read()
    np.testing.assert_array_equal(pictures, want)
    read_cifar("cifar10", tmp_path / "here", download=True)
    assert asked == ["https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"]


@pytest.mark.parametrize("write", [write_archives, write_published])
def test_both_layouts_give_the_same_rows(tmp_path, write):
    write(tmp_path)
    found = read_tiny_imagenet(tmp_path)
    pictures, labels, train_rows = found.read()
    assert (pictures.shape, pictures.dtype, train_rows) == ((9, 3, 64, 64), np.uint8, 6)
    assert pictures[:, 2, 9, 9].tolist() == [10, 30, 50, 20, 40, 60, 70, 80, 90]
    assert labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert found.classes == tuple(WNIDS)


def test_parts_of_different_classes_are_refused(tmp_path):
    write_archives(tmp_path, wnids=["n02", "n01", "n04"])
    with pytest.raises(DataError, match="different classes"):
        read_tiny_imagenet(tmp_path)


@pytest.mark.parametrize("line", ["val_0.JPEG\tn99\t0", "val_0.JPEG"])
def test_validation_pictures_of_no_class_are_refused(tmp_path, line):
    write_published(tmp_path)
    (tmp_path / "tiny-imagenet-200" / "val" / "val_annotations.txt").write_text(line)
    with pytest.raises(DataError, match="unknown classes"):
        read_tiny_imagenet(tmp_path)


def read(path):
    return read_jpeg_archive(path, "names", side=8)[0].take(np.arange(2))


def png(side):
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("kind", ["png", "other size", "half", "noise", "empty"])
def test_what_is_no_jpeg_of_that_size_is_refused(tmp_path, kind):
    whole = jpeg_of(np.random.default_rng(0).integers(0, 256, (8, 8, 3)))
    raw = {
        "png": png(8),
        "other size": flat_jpeg(1, 9),
        "half": whole[: len(whole) - 40],
        "noise": b"\xff\xd8" + bytes(range(200)),
        "empty": b"",
    }[kind]
    with pytest.raises(DataError, match="cannot be read") as caught:
        decode_jpeg(raw, 8, tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"offset": np.array([0, 5])},
        {"offset": np.array([0, 9, 5])},
        {"offset": np.array([1, 5, 9])},
        {"label": np.array(["a", "b"])},
        {"jpeg": np.zeros(9)},
        {"names": np.array([{}], dtype=object)},
        {"names": None},
    ],
    ids=[
        "too few offsets",
        "beyond the end",
        "a late start",
        "texts as labels",
        "floats as bytes",
        "pickled objects",
        "no names",
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, change):
    good = {
        "jpeg": np.zeros(9, np.uint8),
        "offset": np.array([0, 5, 9]),
        "label": np.array([0, 1]),
        "names": np.array(["a"]),
    }
    arrays = {key: value for key, value in (good | change).items() if value is not None}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match="not a complete npz"):
        read(tmp_path / "a.npz")


def test_a_damaged_archive_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    write_jpeg_archive(path, [1, 2], [0, 1], {"names": ["a", "b"]}, side=8)
    whole = path.read_bytes()
    assert read(path)[:, 0, 0, 0].tolist() == [1, 2]
    broken = bytearray(whole)
    broken[60:90] = bytes(30)
    for cells in (whole[:100], bytes(broken), b"no archive", b"", b"\x93NUMPY"):
        path.write_bytes(cells)
        with pytest.raises(DataError, match="not a complete npz"):
            read(path)
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(DataError, match="not a complete npz"):
        read(tmp_path / "b.npy")


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    write_jpeg_archive(path, [1, 2], [0, 1], {"names": ["a", "b"]}, side=8)
    monkeypatch.setattr("vfl.datasets.sources.pictures.LIMIT_BYTES", 100)
    with pytest.raises(DataError, match="not a complete npz"):
        read(path)
