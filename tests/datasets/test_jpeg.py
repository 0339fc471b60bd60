from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from vfl.datasets.jpeg import decode_jpeg, read_jpeg_archive
from vfl.errors import DataError


def read(path):
    return read_jpeg_archive(path, "names", side=8).part.take(np.arange(2))


def test_colours_keep_their_axes(tmp_path, jpegs):
    colour = np.zeros((16, 16, 3))
    colour[:, :8] = (200, 0, 0)
    picture = decode_jpeg(jpegs.of(colour), 16, tmp_path)
    assert picture.shape == (3, 16, 16)
    assert picture[0, 4, 2] > 150
    assert picture[1:, 4, 2].max() < 60
    assert picture[:, 4, 13].max() < 60


def png(side):
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("kind", ["png", "other size", "half", "noise", "empty"])
def test_what_is_no_jpeg_of_that_size_is_refused(tmp_path, jpegs, kind):
    whole = jpegs.of(np.random.default_rng(0).integers(0, 256, (8, 8, 3)))
    raw = {
        "png": png(8),
        "other size": jpegs.flat(1, 9),
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
        {"offset": np.array([0, 5, 5])},
        {"offset": np.array([1, 5, 9])},
        {"offset": np.array([0, 5, 10])},
        {"offset": np.array([0.0, 5.0, 9.0])},
        {"label": np.array(["a", "b"])},
        {"label": np.zeros((2, 1), int)},
        {"jpeg": np.zeros(9)},
        {"names": np.array([{}], dtype=object)},
        {"names": None},
    ],
    ids=[
        "too few offsets",
        "beyond the end",
        "an empty picture",
        "a late start",
        "a late end",
        "fractions",
        "texts as labels",
        "labels with two axes",
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
    with pytest.raises(DataError, match="not a whole npz"):
        read(tmp_path / "a.npz")


def test_a_damaged_archive_is_refused(tmp_path, jpegs):
    path = tmp_path / "a.npz"
    jpegs.write(path, [1, 2], [0, 1], {"names": ["a", "b"]}, side=8)
    whole = path.read_bytes()
    assert read(path)[:, 0, 0, 0].tolist() == [1, 2]
    broken = bytearray(whole)
    broken[60:90] = bytes(30)
    for cells in (whole[:100], bytes(broken), b"no archive", b"", b"\x93NUMPY"):
        path.write_bytes(cells)
        with pytest.raises(DataError, match="not a whole npz"):
            read(path)
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(DataError, match="not a whole npz"):
        read(tmp_path / "b.npy")


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path, jpegs, monkeypatch):
    path = tmp_path / "a.npz"
    jpegs.write(path, [1, 2], [0, 1], {"names": ["a", "b"]}, side=8)
    monkeypatch.setattr("vfl.datasets.jpeg.LIMIT_BYTES", 100)
    with pytest.raises(DataError, match="not a whole npz"):
        read(path)
