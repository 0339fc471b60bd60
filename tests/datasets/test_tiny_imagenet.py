from __future__ import annotations

import numpy as np
import pytest

from vfl.datasets import load_bundled
from vfl.datasets.bundled import read_bundled
from vfl.datasets.picture_sources import PIXELS
from vfl.datasets.tiny_imagenet import read_tiny_imagenet
from vfl.errors import DataError, MissingDataError

WNIDS = ["n02", "n01", "n03"]


def write_archives(root, jpegs, wnids=WNIDS):
    folder = root / "tiny-imagenet-200"
    levels, labels = [10, 20, 30, 40, 50, 60], [0, 0, 1, 1, 2, 2]
    jpegs.write(folder / "train_000_099.npz", levels, labels, {"wnid": WNIDS}, side=64)
    jpegs.write(folder / "val.npz", [70, 80, 90], [0, 1, 2], {"wnid": wnids}, side=64)


def write_published(root, jpegs):
    """The folder its authors publish: levels 10, 20, ... by class, and 70, 80, 90 to validate."""
    folder = root / "tiny-imagenet-200"
    for code, name in enumerate(WNIDS):
        images = folder / "train" / name / "images"
        images.mkdir(parents=True)
        for place, number in enumerate((2, 10)):  # sorted as texts, 10 would come first
            level = 10 + 20 * code + 10 * place
            (images / f"{name}_{number}.JPEG").write_bytes(jpegs.flat(level, 64))
    images = folder / "val" / "images"
    images.mkdir(parents=True)
    for place, level in enumerate((70, 80, 90)):
        (images / f"val_{place}.JPEG").write_bytes(jpegs.flat(level, 64))
    lines = [f"val_{place}.JPEG\t{name}\t0\t0\t62\t62" for place, name in enumerate(WNIDS)]
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")


@pytest.mark.parametrize("write", [write_archives, write_published])
def test_both_layouts_give_the_same_rows(tmp_path, jpegs, write):
    write(tmp_path, jpegs)
    found = read_tiny_imagenet(tmp_path)
    pictures, labels, train_rows = found.read()
    assert (pictures.shape, pictures.dtype, train_rows) == ((9, 3, 64, 64), np.uint8, 6)
    assert pictures[:, 2, 9, 9].tolist() == [10, 30, 50, 20, 40, 60, 70, 80, 90]
    assert labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert found.classes == tuple(WNIDS)


def test_strips_for_parties(tmp_path, jpegs):
    write_archives(tmp_path, jpegs)
    data = load_bundled("tiny_imagenet", ["a", "b"], 0, "b", root=tmp_path, limit=9, validation=0.2)
    assert data["a"].inputs.shape == data["b"].inputs.shape == (9, 3, 64, 32)
    mean, spread = (np.array(each) for each in PIXELS["tiny_imagenet"])
    np.testing.assert_allclose(
        data["b"].inputs[1, :, 0, 0].numpy(), (30 / 255 - mean) / spread, rtol=1e-5
    )
    assert data["b"].classes == tuple(WNIDS)


def test_only_the_rows_that_are_wanted_are_decoded(tmp_path, jpegs, monkeypatch):
    from vfl.datasets import jpeg

    write_archives(tmp_path, jpegs)
    decoded = []
    real = jpeg.decode_jpeg
    monkeypatch.setattr(jpeg, "decode_jpeg", lambda *given: decoded.append(1) or real(*given))
    assert read_bundled("tiny_imagenet", tmp_path, limit=3).rows == 3
    assert len(decoded) == 3


def test_parts_of_different_classes_are_refused(tmp_path, jpegs):
    write_archives(tmp_path, jpegs, wnids=["n02", "n01", "n04"])
    with pytest.raises(DataError, match="other classes"):
        read_tiny_imagenet(tmp_path)


@pytest.mark.parametrize("line", ["val_0.JPEG\tn99\t0", "val_0.JPEG"])
def test_validation_pictures_of_no_class_are_refused(tmp_path, jpegs, line):
    write_published(tmp_path, jpegs)
    (tmp_path / "tiny-imagenet-200" / "val" / "val_annotations.txt").write_text(line)
    with pytest.raises(DataError, match="classes that are not there"):
        read_tiny_imagenet(tmp_path)


def test_missing_files_are_told_with_the_cure(tmp_path):
    for download in (False, True):  # there is nothing to check a download against
        with pytest.raises(MissingDataError) as caught:
            read_bundled("tiny_imagenet", tmp_path, download=download)
        assert "http://cs231n.stanford.edu/tiny-imagenet-200.zip" in str(caught.value)
        assert "VFL_DATA" in str(caught.value)


@pytest.mark.parametrize(
    ("limit", "tolerance"),
    [(1500, 0.02), pytest.param(None, 0.003, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_the_constants_standardise_the_real_training_pixels(data_root, limit, tolerance):
    if not (data_root / "tiny-imagenet-200").is_dir():
        pytest.skip("there is no Tiny-ImageNet here")
    data = read_bundled("tiny_imagenet", data_root, limit=limit)
    train = data.cells[: data.train_rows]
    assert data.cells.shape == (limit or 30_000, 3, 64, 64)
    assert len(data.classes) == 200
    assert len(np.unique(np.bincount(data.labels[: data.train_rows]))) == 1
    mean, spread = PIXELS["tiny_imagenet"]
    sums = [train[:, channel].mean(dtype=np.float64) / 255 for channel in range(3)]
    spreads = [train[:, channel].std(dtype=np.float64) / 255 for channel in range(3)]
    assert mean == pytest.approx(sums, abs=tolerance)
    assert spread == pytest.approx(spreads, abs=tolerance)
