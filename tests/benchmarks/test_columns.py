"""What a label party reads of columns: how they are coded, read, stored and put in a table."""

import numpy as np
import pytest
import torch

from benchmarks.columns import (
    PROTECTIONS,
    TASKS,
    Decoded,
    Known,
    blended,
    experiment_of,
    ranks_of,
    read_category,
    read_number,
)


def rows(count, columns, seed):
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))


def test_ranks_are_those_among_known_rows():
    ranks = ranks_of(np.array([1.0, 2.0, 3.0, 4.0, 100.0]), np.arange(4))
    assert ranks.tolist() == [0.125, 0.375, 0.625, 0.875, 1.0]


@pytest.mark.parametrize(("reads", "least", "most"), [("own", 0.35, 0.65), ("both", 0.95, 1.0)])
def test_a_category_in_the_cut_is_read_there_alone(reads, least, most):
    cuts, own = rows(400, 4, 0), rows(400, 3, 1)
    labels = (cuts[:, 0] > 0).long()
    known, asked = (Known(own[part], cuts[part]) for part in (slice(100), slice(100, 400)))
    found = read_category(known, labels[:100], asked, labels[100:], reads, 0)
    assert least <= found <= most


def test_a_number_is_read_where_it_is_and_not_from_noise():
    cuts = rows(300, 4, 0)
    ranks = ranks_of((cuts[:, 0] + cuts[:, 1]).numpy(), np.arange(100))
    assert read_number(cuts[:100], ranks[:100], cuts[100:], ranks[100:]) > 0.9
    noise = rows(300, 4, 5)
    assert read_number(noise[:100], ranks[:100], noise[100:], ranks[100:]) < 0.1


def test_a_blend_weighs_each_column_of_pixels_by_least_squares():
    """Beside a loop over columns, by normal equations."""
    draw = torch.Generator().manual_seed(0)
    pictures = torch.rand(30, 1, 4, 3, generator=draw)
    held = pictures[torch.arange(30) % 3 == 0]
    asked = [torch.rand(7, 1, 4, 3, generator=draw) for _ in range(2)]
    near = [held + 0.3 * torch.randn(held.shape, generator=draw) for _ in range(2)]
    found = blended([Decoded(*each) for each in zip(near, asked, strict=True)], pictures)
    middle = pictures.mean(0)
    for column in range(3):
        at = (slice(None), 0, slice(None), column)
        seen = np.stack([(each - middle)[at].numpy().ravel() for each in near], 1)
        wanted = (held - middle)[at].numpy().ravel()
        weights = np.linalg.solve(seen.T @ seen, seen.T @ wanted)
        total = sum(w * (each - middle)[at].numpy() for w, each in zip(weights, asked, strict=True))
        assert found[at].numpy() == pytest.approx(middle[0, :, column].numpy() + total, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "protection"),
    [("bank_marketing", each) for each in PROTECTIONS] + [(each, "beaver") for each in TASKS],
)
def test_every_training_is_a_valid_experiment(name, protection, monkeypatch):
    monkeypatch.setenv("VFL_DATA", "data")
    made = experiment_of(name, protection, 3)
    assert made.seed == 3
    assert set(TASKS[name].wanted) <= set(made.feature_parties)
    plain = experiment_of(name, "none", 3)
    assert (made == plain) is (protection == "none")
