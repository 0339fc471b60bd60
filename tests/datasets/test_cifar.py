from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from vfl.datasets import cifar, fetch, load_bundled
from vfl.datasets.bundled import read_bundled
from vfl.datasets.cifar import LAYOUTS, read_cifar
from vfl.datasets.picture_sources import PIXELS
from vfl.errors import DataError, MissingDataError


def write_binary(root, source, train=10, test=4):
    """Random rows in the published layout; pictures and labels, training rows first."""
    layout = LAYOUTS[source]
    folder = root / layout.archive.folder
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = train + test
    labels = rng.integers(0, layout.classes, rows)
    pictures = rng.integers(0, 256, (rows, 3, 32, 32))
    coarse = 255 if source == "cifar100" else None  # never to be mistaken for the fine label
    cells = [
        bytes([coarse, label] if coarse else [label]) + picture.astype(np.uint8).tobytes()
        for label, picture in zip(labels.tolist(), pictures, strict=True)
    ]
    share = train // len(layout.train)
    for number, name in enumerate(layout.train):
        (folder / name).write_bytes(b"".join(cells[number * share : (number + 1) * share]))
    (folder / layout.test[0]).write_bytes(b"".join(cells[train:]))
    names = "\n".join(f"class {number}" for number in range(layout.classes))
    (folder / layout.names).write_text(names + "\n\n")
    return pictures, labels


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
    data = load_bundled("cifar10", parties, 0, "top", root=tmp_path, validation=0.2)
    whole = np.concatenate([data[party].inputs.numpy() for party in parties], axis=-1)
    assert data["left"].inputs.shape == (14, 3, 32, 16)
    mean, spread = (np.array(each)[:, None, None] for each in PIXELS["cifar10"])
    np.testing.assert_allclose(whole, (want / 255 - mean) / spread, rtol=1e-4, atol=1e-5)
    assert data["left"].split.test.tolist() == [10, 11, 12, 13]
    assert data["top"].labels.tolist() == labels.tolist()


def test_flat_pictures_keep_each_pixel_with_its_channels_constants(tmp_path):
    want, _ = write_binary(tmp_path, "cifar10")
    mean, spread = (np.array(each)[:, None, None] for each in PIXELS["cifar10"])
    scaled = (want / 255 - mean) / spread
    for count in (4, 48):  # strips, and more parties than columns of pixels
        parties = [f"p{number}" for number in range(count)]
        data = load_bundled("cifar10", parties, 0, "p0", root=tmp_path, flatten=True)
        parts = [data[party].inputs.numpy() for party in parties]
        if count == 4:
            for part, strip in zip(parts, np.split(scaled, 4, axis=-1), strict=True):
                np.testing.assert_allclose(part, strip.reshape(14, -1), rtol=1e-4, atol=1e-5)
        else:
            flat = scaled.transpose(0, 3, 1, 2).reshape(14, -1)
            np.testing.assert_allclose(np.hstack(parts), flat, rtol=1e-4, atol=1e-5)


def test_a_limit_keeps_the_proportion(tmp_path):
    want, _ = write_binary(tmp_path, "cifar100", train=20, test=10)
    data = read_bundled("cifar100", tmp_path, limit=6)
    assert (data.rows, data.train_rows) == (6, 4)
    np.testing.assert_array_equal(data.cells, want[[0, 1, 2, 3, 20, 21]])


def test_jpegs_stand_in_where_the_binary_files_are_missing(tmp_path, jpegs):
    names = {"names": ["cat", "dog"]}
    folder = tmp_path / "CIFAR10-jpeg"
    jpegs.write(folder / "train.npz", [10, 20, 30, 40], [0, 0, 1, 1], names, side=32)
    jpegs.write(folder / "test.npz", [50, 60], [0, 1], names, side=32)
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
def test_a_damaged_file_is_refused(tmp_path, name, damage):
    write_binary(tmp_path, "cifar10")
    path = tmp_path / "cifar-10-batches-bin" / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError):
        read_cifar("cifar10", tmp_path).read()


def test_missing_files_are_told_with_the_cure(tmp_path):
    with pytest.raises(MissingDataError) as caught:
        read_cifar("cifar100", tmp_path)
    assert "--download" in str(caught.value)
    assert "'cifar-100-binary'" in str(caught.value)
    write_binary(tmp_path, "cifar10")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin").unlink()
    with pytest.raises(MissingDataError, match=r"data_batch_2\.bin"):
        read_cifar("cifar10", tmp_path)


def test_the_network_is_asked_only_when_told(tmp_path, monkeypatch):
    want, _ = write_binary(tmp_path / "published", "cifar10")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(tmp_path / "published" / "cifar-10-batches-bin", "cifar-10-batches-bin")
    asked = []
    monkeypatch.setattr(
        fetch.urllib.request,
        "urlopen",
        lambda url, timeout: asked.append(url) or io.BytesIO(packed.getvalue()),
    )
    layout = LAYOUTS["cifar10"]
    known = replace(layout.archive, sha256=sha256(packed.getvalue()).hexdigest())
    monkeypatch.setitem(cifar.LAYOUTS, "cifar10", replace(layout, archive=known))
    with pytest.raises(MissingDataError):
        read_cifar("cifar10", tmp_path / "here")
    assert not asked
    pictures, _, _ = read_cifar("cifar10", tmp_path / "here", download=True).read()
    np.testing.assert_array_equal(pictures, want)
    read_cifar("cifar10", tmp_path / "here", download=True)
    assert asked == ["https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"]


@pytest.mark.parametrize(
    ("limit", "tolerance"),
    [(3000, 0.015), pytest.param(None, 0.003, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_the_constants_standardise_the_real_training_pixels(data_root, limit, tolerance):
    if not (data_root / "CIFAR10-jpeg").is_dir():
        pytest.skip("there is no CIFAR-10 here")
    data = read_bundled("cifar10", data_root, limit=limit)
    train = data.cells[: data.train_rows]
    assert train.shape == ((limit or 60_000) * 5 // 6, 3, 32, 32)
    assert len(np.unique(np.bincount(data.labels))) == 1  # as many rows of every class
    assert data.classes[:2] == ("airplane", "automobile")
    mean, spread = PIXELS["cifar10"]
    assert mean == pytest.approx(train.mean(axis=(0, 2, 3)) / 255, abs=tolerance)
    assert spread == pytest.approx(train.std(axis=(0, 2, 3)) / 255, abs=tolerance)
