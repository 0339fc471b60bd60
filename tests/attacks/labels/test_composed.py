"""Attacks composed of parts: the same as what the parts do one after the other."""

import numpy as np
import pytest
import torch
from scipy import stats

from vfl.attacks import ATTACKS, Evidence, Grant, Holdings, RecordedExchange, ThreatModel, View
from vfl.attacks.base import features, scale_by
from vfl.attacks.labels.classifiers import robust_loss
from vfl.attacks.scoring import Case, attempt
from vfl.core.errors import BadOptionError
from vfl.core.seeds import generator

make = ATTACKS.make
CLASSES, ROWS, LEAKED = 3, 400, 15


def case(shift=1.6, cut_shift=1.6):
    """Inputs and cuts are two looks at the class, each with noise of its own."""
    draw = generator(0, "composed")
    labels = torch.arange(ROWS) % CLASSES
    inputs, cuts = (
        by * torch.eye(CLASSES, 6)[labels] + torch.randn(ROWS, 6, generator=draw)
        for by in (shift, cut_shift)
    )
    rest = Evidence(inputs[LEAKED:], cuts[LEAKED:])
    leaked = Evidence(inputs[:LEAKED], cuts[:LEAKED], labels[:LEAKED])
    threat = ThreatModel(
        "feature party", "inference", frozenset(Grant) - {Grant.GRADIENTS, Grant.EPOCHS}
    )
    view = View(threat, CLASSES, Holdings(targets=rest, leaked=leaked, unlabelled=rest))
    return Case(view, labels[LEAKED:])


def guess(spec, view=None):
    attack = make(spec)
    return attack.run((view or case().view).only(attack.needs), generator(0))


def reach(spec, **shifts):
    return attempt(case(**shifts), make(spec), generator(0)).value


@pytest.mark.parametrize("pair", [
    ("self_training:scaler=whiten", "logistic:scaler=whiten,unlabelled=self_training"),
    ("teacher_student:rounds=1", "logistic:teacher=propagation,unlabelled=self_training,rounds=1"),
    ("joined_propagation:share=0.3", "label_propagation:of=cut+inputs,scaler=whiten,mix=0.3"),
    ("label_propagation:at=inputs+inputs", "label_propagation:at=inputs"),
])  # fmt: skip
def test_a_member_is_a_name_for_a_point_of_the_space(pair):
    assert torch.equal(*map(guess, pair))


def test_a_student_learns_what_its_teacher_says_of_unlabelled_rows():
    """A cut that repeats the teacher's guesses without its noise is read as well as they are."""
    whole = case(shift=3.0, cut_shift=3.0)
    taught = attempt(whole, make("mlp:teacher=propagation,steps=100"), generator(0)).value
    alone = attempt(whole, make("label_propagation:at=inputs"), generator(0)).value
    assert taught >= alone - 0.02


def test_a_teacher_asks_for_what_it_needs():
    attack = make("logistic:at=cut,teacher=mlp:at=inputs/recipe=true")
    assert {Grant.INPUTS, Grant.UNLABELLED, Grant.TOP_RECIPE} <= attack.needs
    assert attack.all_layers == ["cut", "inputs"]


def test_two_learners_of_two_layers_reach_more_than_one():
    both = reach("logistic:at=cut+inputs,unlabelled=co_training")
    assert both > max(reach("logistic"), reach("logistic:at=inputs")) + 0.05


@pytest.mark.parametrize(
    "spec",
    [
        "logistic:at=cut+pixels",
        "logistic:unlabelled=co_training",
        "logistic:unlabelled=mixmatch",
        "logistic:teacher=kmeans",
        "logistic:scaler=minmax",
        "mlp:loss=huber",
        "label_propagation:mix=2",
        "label_propagation:spread=1",
        "label_propagation:scaler=minmax",
        "knn:neighbours=0",
        "self_training:share=1.5",
        "model_completion:temperature=0",
        "spectral:most=1",
        "likelihood_ratio:shadows=1",
    ],
)
def test_parts_that_do_not_fit_and_options_out_of_range_are_refused(spec):
    with pytest.raises(BadOptionError):
        make(spec)


def rows():
    draw = torch.randn(300, 4, generator=generator(0, "rows"))
    return draw @ torch.randn(4, 4, generator=generator(1, "rows")) + 2


def test_whitening_with_shrinkage_and_turned_back():
    own = rows().double().numpy()
    centred = own - own.mean(0)
    variance, directions = np.linalg.eigh(np.cov(own.T))
    kept = variance + 0.1 * variance.mean()
    turned = centred @ directions @ np.diag(kept**-0.5) @ directions.T
    assert np.allclose(scale_by("zca", rows())(rows()).numpy(), turned, atol=1e-4)
    shrunk = scale_by("shrink", rows())(rows()).double().numpy()
    assert np.allclose(np.sort(shrunk.var(0, ddof=1)), np.sort(variance / kept), atol=1e-4)


def test_ranks_are_normal_quantiles_whatever_the_scale():
    found = scale_by("rank", rows())(rows()).double().numpy()
    quantile = stats.norm.ppf(stats.rankdata(rows().numpy(), axis=0) / (len(rows()) + 1))
    assert np.allclose(found, quantile, atol=0.02)
    assert np.allclose(found, scale_by("rank", rows().exp())(rows().exp()).numpy(), atol=1e-5)


def test_a_batch_is_scaled_by_itself_unless_it_is_small():
    moved = 3 * rows() + 5
    assert torch.allclose(scale_by("batch", rows())(moved), scale_by("standard", moved)(moved))
    few = moved[:5]
    assert torch.equal(scale_by("batch", rows())(few), scale_by("standard", rows())(few))


def test_gradients_of_an_epoch_are_one_layer():
    exchanges = [
        RecordedExchange(0, 1, torch.tensor([0, 2]), lambda: None, torch.tensor([[1.0], [2.0]])),
        RecordedExchange(1, 1, torch.tensor([1, 0]), lambda: None, torch.tensor([[3.0], [5.0]])),
        RecordedExchange(2, 2, torch.tensor([2]), lambda: None, torch.tensor([[7.0]])),
    ]
    held = Holdings(
        targets=Evidence(torch.zeros(2, 1)),
        leaked=Evidence(torch.zeros(1, 1), labels=torch.zeros(1, dtype=torch.long)),
        exchanges=exchanges,
    )
    grants = frozenset({Grant.GRADIENTS, Grant.EPOCHS, Grant.LEAKED})
    view = View(ThreatModel("feature party", "training", grants), 2, held)
    assert features(view, view.targets, "gradients").tolist() == [[3.0, 0.0], [3.0, 0.0]]
    assert features(view, view.leaked, "gradients").tolist() == [[2.0, 7.0]]


def test_the_robust_loss_is_the_papers():
    logits, labels = torch.randn(5, 3, generator=generator(0)), torch.tensor([0, 1, 2, 0, 1])
    shares = logits.softmax(1)[torch.arange(5), labels]
    expected = ((1 - shares**0.7) / 0.7).mean()
    assert robust_loss(logits, labels).item() == pytest.approx(expected.item(), rel=1e-5)
