"""The experiments of examples/private: what they compute, on rows made up here."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[1] / "examples" / "private"


def program(name):
    spec = importlib.util.spec_from_file_location(f"private_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def digits():
    draw = torch.Generator().manual_seed(0)
    rows, labels = torch.rand(600, 784, generator=draw), torch.arange(600) % 10
    rows[torch.arange(600), labels * 20] += 5
    return [(rows[:500], labels[:500]), (rows[500:], labels[500:])]


@pytest.mark.parametrize("more", [{}, {"median": True}, {"projection": "random"}], ids=str)
def test_mnist_goes_on_where_it_was_and_counts_both_steps(digits, tmp_path, more):
    mnist = program("mnist")
    setting = mnist.Setting(width=8, hidden=16, lot=50, level="medium", **more)
    out = tmp_path / "whole.jsonl"
    mnist.run(setting, 0, 100.0, 4, digits, out, tmp_path / "a")
    for epochs in (2, 4):
        mnist.run(setting, 0, 100.0, epochs, digits, tmp_path / "parts.jsonl", tmp_path / "b")
    assert out.read_text() == (tmp_path / "parts.jsonl").read_text()
    records = [json.loads(line) for line in out.read_text().splitlines()]
    spent = [one["epsilon_moments"] for one in records]
    assert len(spent) == 4
    assert spent == sorted(spent)
    assert all(one["epsilon_rdp"] < one["epsilon_moments"] for one in records)
    mnist.run(setting, 0, spent[1], 4, digits, tmp_path / "less.jsonl", tmp_path / "c")
    assert len((tmp_path / "less.jsonl").read_text().splitlines()) >= 2


def test_without_noise_mnist_is_learned(digits, tmp_path):
    mnist = program("mnist")
    setting = mnist.Setting(width=30, hidden=32, lot=50, level="none", last_rate=0.1)
    mnist.run(setting, 0, 1.0, 20, digits, tmp_path / "out.jsonl", tmp_path / "state")
    last = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[-1])
    assert "epsilon_rdp" not in last
    assert last["test"] > 0.9


@pytest.mark.parametrize("width", [28, 14])
def test_scattering_features_are_of_one_row_alone(width):
    scattering = program("scattering").scattering
    pictures = torch.rand(3, 28, width, generator=torch.Generator().manual_seed(1))
    together = scattering(pictures)
    alone = torch.cat([scattering(one[None]) for one in pictures])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert together.norm(dim=1).sub(1).abs().max() < 0.1
    assert (together[0] - together[1]).norm() > 0.1


def test_figures_of_tables_find_the_group_that_is_worst():
    figures = program("tables").figures
    draw = np.random.default_rng(0)
    labels, groups = draw.integers(0, 2, 4000), np.repeat(["a", "b"], 2000)
    right = np.where(labels == 1, 0.9, 0.1)
    scores = np.where(groups == "a", right, draw.random(4000))
    found = figures(scores, labels, groups)
    assert found["worst_group"] == "b"
    assert found["worst_auc"] == pytest.approx(0.5, abs=0.05)
    assert found["gap"] == pytest.approx(0.5, abs=0.05)
    calibrated = draw.random(20_000)
    drawn = (draw.random(20_000) < calibrated).astype(int)
    assert figures(calibrated, drawn, np.repeat("a", 20_000))["calibration"] < 0.02


def test_cifar_learns_behind_convolutions_of_other_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    cifar = program("cifar")
    draw = torch.Generator().manual_seed(0)

    def pictures(source):
        rows = {"tiny_imagenet": 256, "cifar10": 60_000}[source]
        labels = torch.randint(0, 10, (rows,), generator=draw)
        pixels = torch.randint(0, 50, (rows, 3, 32, 32), generator=draw, dtype=torch.uint8)
        bright = torch.arange(rows), labels % 3, 8 + labels, slice(None)
        pixels[bright] = 255
        return pixels, labels

    monkeypatch.setattr(cifar, "pictures", pictures)
    monkeypatch.setattr(cifar, "CHANNELS", 2)
    monkeypatch.setattr(cifar, "WIDTH", 72)
    out = tmp_path / "out.jsonl"
    common = ["cifar.py", "--public-epochs", "1", "--out", str(out), "--state", str(tmp_path)]
    for epochs in "12":
        monkeypatch.setattr("sys.argv", [*common, "--epochs", epochs, "--epsilon", "8"])
        cifar.main()
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert (first["epoch"], second["epoch"]) == (1, 2)
    assert 0 < first["epsilon_rdp"] < second["epsilon_rdp"] < 8
    assert second["test"] > 0.3
    assert capsys.readouterr().out.count("public pictures") == 1
