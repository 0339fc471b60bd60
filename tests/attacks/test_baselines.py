"""What an attack takes from the trained bottom, and what it takes without one."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import nn

from vfl.attacks import Evidence, Grant, Holdings, View, make
from vfl.attacks.baselines import Baselines, Comparison, averaged, label_free
from vfl.attacks.case import Case
from vfl.attacks.features import through
from vfl.errors import BadOptionError, NotGrantedError
from vfl.seeds import generator
from vfl.testing import AttackContract

EVERYTHING = frozenset(Grant) - {Grant.GRADIENTS}
WITHOUT_LEAKS = EVERYTHING - {Grant.LEAKED, Grant.LEAKED_INPUTS}


def case(grants=EVERYTHING):
    return AttackContract().case(True, grants)


def one(kind, width=3):
    return label_free(case(), kind, width, generator(0, "free"))


@pytest.mark.parametrize("kind", ["raw", "pca", "random"])
def test_cuts_are_those_of_a_bottom_that_saw_no_label(kind):
    found = one(kind)
    view, before = found.view, case().view
    for rows in (view.targets, view.leaked, view.unlabelled):
        assert torch.equal(rows.cuts, through(view.bottom(), rows.inputs))
    assert torch.equal(view.leaked.labels, before.leaked.labels)
    assert torch.equal(view.targets.inputs, before.targets.inputs)
    assert torch.equal(found.labels, case().labels)
    assert view.targets.cuts.shape[1] == (before.targets.inputs.shape[1] if kind == "raw" else 3)


def test_components_are_the_principal_ones():
    view = one("pca").view
    inputs = view.unlabelled.inputs.double().numpy()
    expected = PCA(3).fit_transform(inputs)
    expected /= np.sqrt((expected**2).mean(0).mean())
    cuts = view.unlabelled.cuts.double().numpy()
    signs = np.sign((expected * cuts).sum(0))
    assert np.allclose(cuts * signs, expected, atol=1e-4)


def test_random_features_follow_the_draw():
    again, other = one("random"), label_free(case(), "random", 3, generator(1, "free"))
    assert torch.equal(one("random").view.targets.cuts, again.view.targets.cuts)
    assert not torch.equal(other.view.targets.cuts, again.view.targets.cuts)


def test_a_case_without_leaks_has_none_behind_another_bottom():
    free = label_free(case(WITHOUT_LEAKS), "raw", 3, generator(0))
    with pytest.raises(NotGrantedError):
        _ = free.view.leaked


def test_an_unknown_bottom_is_refused():
    with pytest.raises(BadOptionError):
        one("umap")


def parity():
    """Labels only a trained bottom shows: the sign of a product of two inputs."""
    draw = generator(0, "parity")
    inputs = torch.randn(150, 8, generator=draw)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()

    class Product(nn.Module):
        def forward(self, rows):
            return (rows[:, 0] * rows[:, 1]).sign()[:, None].expand(-1, 2)

    cuts = Product()(inputs)
    holdings = Holdings(
        Evidence(inputs[10:], cuts[10:]),
        Evidence(inputs[:10], cuts[:10], labels[:10]),
        Evidence(inputs[10:], cuts[10:]),
        new_bottom=lambda: nn.Linear(8, 2),
        new_top=lambda width: nn.Linear(width, 2),
    )
    return Case(View(case().view.threat, 2, holdings), labels[10:])


def compare(case, attack, width):
    draw = generator(0, "compare")
    return Baselines.of(case, width, draw).compare(make(attack), draw)


def test_the_advantage_is_over_the_best_baseline():
    found = compare(parity(), "logistic", 2)
    assert set(found.baselines) == {"raw", "pca", "random", "scratch", "scratch, unlabelled"}
    assert found.value == 1.0
    assert max(found.baselines.values()) < 0.7
    assert found.advantage == 1.0 - max(found.baselines.values())


def test_what_inputs_tell_is_no_advantage():
    found = compare(case(), "logistic", 8)
    assert found.value > 0.9
    assert found.advantage < 0.02


def test_clusters_have_no_baseline_that_uses_labels():
    found = compare(case(WITHOUT_LEAKS), "kmeans:starts=1", 8)
    assert set(found.baselines) == {"raw", "pca", "random"}
    assert found.measure == "matched_accuracy"


def test_the_best_baseline_is_chosen_after_averaging():
    draws = [
        Comparison("accuracy", 0.9, 0.5, {"raw": 0.8, "pca": 0.2}),
        Comparison("accuracy", 0.7, 0.5, {"raw": 0.2, "pca": 0.6}),
    ]
    found = averaged(draws)
    assert found.value == pytest.approx(0.8)
    assert found.baselines == pytest.approx({"raw": 0.5, "pca": 0.4})
    assert found.advantage == pytest.approx(0.3)
