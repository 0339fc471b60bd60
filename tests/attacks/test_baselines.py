"""What an attack takes from the trained bottom, and what it takes without one."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import nn

from vfl.attacks import Evidence, Grant, Holdings, View
from vfl.attacks.base import through
from vfl.attacks.baselines import Kind, label_free
from vfl.attacks.scoring import Case
from vfl.attacks.view import IN_TRAINING
from vfl.core.errors import BadOptionError, NotGrantedError
from vfl.core.seeds import generator, scoped
from vfl.testing import AttackContract

EVERYTHING = frozenset(Grant) - IN_TRAINING
LEAKS = {Grant.LEAKED, Grant.LEAKED_INPUTS, Grant.LEAKED_ATTRIBUTES, Grant.AUXILIARY}
WITHOUT_LEAKS = EVERYTHING - LEAKS


def case(grants=EVERYTHING):
    return AttackContract().case(True, grants)


def one(kind, width=3):
    return label_free(case(), kind, width, generator(0, "free"))


@pytest.mark.parametrize("kind", get_args(Kind))
def test_cuts_are_those_of_a_bottom_that_saw_no_label(kind):
    found = one(kind)
    view, before = found.view, case().view
    for rows in (view.targets, view.leaked, view.unlabelled):
        assert torch.equal(rows.cuts, through(view.bottom(), rows.inputs))
    assert torch.equal(view.leaked.labels, before.leaked.labels)
    assert torch.equal(view.targets.inputs, before.targets.inputs)
    assert torch.equal(found.labels, case().labels)
    widths = {"raw": before.targets.inputs.shape[1], "autoencoder": 6}  # as its last layer has
    assert view.targets.cuts.shape[1] == widths.get(kind, 3)


def test_components_are_the_principal_ones():
    view = one("pca").view
    inputs = view.unlabelled.inputs.double().numpy()
    expected = PCA(3).fit_transform(inputs)
    expected /= np.sqrt((expected**2).mean(0).mean())
    cuts = view.unlabelled.cuts.double().numpy()
    signs = np.sign((expected * cuts).sum(0))
    assert np.allclose(cuts * signs, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["random", "autoencoder"])
def test_what_is_random_follows_the_draw(kind):
    again, other = one(kind), label_free(case(), kind, 3, generator(1, "free"))
    assert torch.equal(one(kind).view.targets.cuts, again.view.targets.cuts)
    assert not torch.equal(other.view.targets.cuts, again.view.targets.cuts)


def test_a_case_without_leaks_has_none_behind_another_bottom():
    free = label_free(case(WITHOUT_LEAKS), "raw", 3, generator(0))
    with pytest.raises(NotGrantedError):
        _ = free.view.leaked


def test_an_unknown_bottom_is_refused():
    with pytest.raises(BadOptionError):
        one("umap")


def test_an_autoencoder_is_the_architecture_in_use_and_keeps_what_rebuilds_the_rows():
    """Of one number a row, a linear reader rebuilds more than of an untrained bottom's."""
    draw = generator(0, "hidden")
    hidden = torch.randn(2000, 3, generator=draw) * torch.tensor([3.0, 2.0, 1.0])
    rows = Evidence(hidden @ torch.randn(3, 10, generator=draw))

    def bottom():
        return nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    holdings = Holdings(rows, unlabelled=rows, new_bottom=bottom)
    threat = replace(case().view.threat, grants=WITHOUT_LEAKS)
    view = label_free(Case(View(threat, 2, holdings)), "autoencoder", 1, draw).view

    def unread(bottom):
        cut = through(bottom, rows.inputs).double().numpy()
        cut = np.c_[cut, np.ones(len(cut))]
        rebuilt = cut @ np.linalg.lstsq(cut, rows.inputs.double().numpy(), rcond=None)[0]
        return ((rows.inputs.numpy() - rebuilt) ** 2).mean()

    with scoped(0):
        assert unread(view.bottom()) < 0.7 * unread(bottom())
    assert [type(part) for part in view.bottom()] == [type(part) for part in bottom()]
