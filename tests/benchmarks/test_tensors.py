"""The benchmark of tensors at workers: every place once, small."""

import pytest

from benchmarks.tensor_images import bench_tensor_images
from benchmarks.tensors import EPSILON, bench_tensors
from vfl.core.errors import MissingDataError


def test_every_place_learns_the_same(monkeypatch, tmp_path):
    monkeypatch.setenv("VFL_DATA", str(tmp_path))  # so the diabetes rows stand in
    rows = bench_tensors(["square", "relu"], data=["housing"], steps=2)
    places = ["plain", "pointer", "shares", "mac"]
    assert [row.where for row in rows] == ["plain", "pointer"] * 2 + places * 2 + ["noise"]
    plain, pointer, shares = rows[4:7]
    assert pointer.error == pytest.approx(plain.error)
    assert shares.error == pytest.approx(plain.error, rel=0.01)
    assert 0 < rows[-1].epsilon <= EPSILON
    assert all(row.ms > 0 for row in rows)


@pytest.mark.slow
def test_a_network_of_images_learns_alike_in_plain_and_on_shares():
    try:
        plain, shares = bench_tensor_images(steps=2, batch_size=4, every=2)
    except MissingDataError:
        pytest.skip("MNIST is not here")
    assert plain.where == "plain"
    assert abs(plain.loss - shares.loss) < 0.01
    assert abs(plain.accuracy - shares.accuracy) < 0.02
