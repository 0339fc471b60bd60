"""The benchmark of trainings on shares: every kind once, small."""

import pytest

from benchmarks.emulation import Wan
from benchmarks.secure_dpsgd import bench_secure_dpsgd, pictures


def test_every_kind_trains_and_is_counted(monkeypatch, tmp_path):
    monkeypatch.setenv("VFL_DATA", str(tmp_path))  # so handwritten digits stand in
    rows = bench_secure_dpsgd(
        [2, 3],
        ["permuted"],
        [500.0],
        steps=4,
        seeds=1,
        wan=Wan.parse("80mbps,40ms"),
    )
    assert [(row.holders, row.form) for row in rows] == [
        (0, "in clear"),
        (2, "permuted"),
        (3, "permuted"),
    ]
    clear, two, three = rows
    assert (clear.online, clear.hops) == (0, 0)
    # Each holder sends to every other one; the dealer to one of them.
    assert 2.5 < three.online / two.online < 3.5
    assert three.offline == pytest.approx(two.offline, rel=0.01)
    assert two.line_ms >= 20 * two.hops > 0
    assert all(row.accuracy > 0.15 for row in rows)  # of ten classes


def test_pictures_come_as_means_or_features(monkeypatch, tmp_path):
    monkeypatch.setenv("VFL_DATA", str(tmp_path))
    for features, columns in (("means", 64), ("hog:cell=4,orientations=5", 20)):
        (known, labels), (test, _) = pictures(100, features)
        assert known.shape == (len(labels), columns)
        assert test.shape[1] == columns
