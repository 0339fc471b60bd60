"""Attacks on gradients against closed forms."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, softmax

from vfl.attacks import (
    Evidence,
    Grant,
    Holdings,
    RecordedExchange,
    SentCuts,
    ThreatModel,
    Transcript,
    View,
    make,
)
from vfl.attacks.labels.surrogate import balanced, gradients_of_classes
from vfl.core.errors import BadOptionError, DataError, NotGrantedError, UserError
from vfl.core.seeds import generator

WIDTH, CLASSES = 4, 3


def heard_of(rows, gradients, epoch=1):
    gradients = torch.tensor(gradients)
    return RecordedExchange.of(
        SentCuts(0, epoch, torch.tensor(rows), torch.zeros_like(gradients)), gradients
    )


def view(*heard, classes=2, leaked=(1, 0), rows=3, prior=(0.5, 0.5)):
    holdings = Holdings(
        targets=Evidence(torch.zeros(rows, 1)),
        leaked=Evidence(labels=torch.tensor(leaked)),
        exchanges=heard,
        prior=torch.tensor(prior),
    )
    grants = frozenset({Grant.GRADIENTS, Grant.LEAKED, Grant.PRIOR})
    return View(ThreatModel("feature party", "training", grants), classes, holdings)


def test_cuts_of_the_training_are_a_grant_of_their_own():
    without = view(heard_of([0], [[1.0, 2.0]]))
    assert without.exchanges[0].gradients.tolist() == [[1.0, 2.0]]
    with pytest.raises(NotGrantedError, match="the cuts of every epoch"):
        without.exchanges[0].cuts()


def test_the_gradients_of_every_class_are_those_of_autograd():
    draw = generator(0, "classes")
    cuts = torch.randn(5, WIDTH, generator=draw)
    top = nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    found = gradients_of_classes(top, cuts, CLASSES)
    for row in range(5):
        for code in range(CLASSES):
            cut = cuts[row : row + 1].clone().requires_grad_()
            cross_entropy(top(cut), torch.tensor([code])).backward()
            assert torch.allclose(found[row, code], cut.grad[0], atol=1e-6)


def test_the_gradient_of_a_linear_top_has_a_closed_form():
    draw = generator(1, "classes")
    cuts, top = torch.randn(5, WIDTH, generator=draw), nn.Linear(WIDTH, CLASSES)
    found = gradients_of_classes(top, cuts, CLASSES)[:, 1]
    surprise = softmax(top(cuts), 1) - torch.tensor([0.0, 1.0, 0.0])
    assert torch.allclose(found, surprise @ top.weight, atol=1e-6)


def test_balanced_labels_come_near_the_prior():
    scores = torch.randn(400, CLASSES, generator=generator(0, "scores"))
    prior = torch.tensor([0.6, 0.3, 0.1])
    before = torch.softmax(scores, 1).mean(0) - prior
    assert (balanced(scores, prior).mean(0) - prior).norm() < 0.15 * before.norm()


def test_a_row_is_told_of_by_the_mean_of_its_exchanges():
    first = heard_of([0, 2], [[1.0], [5.0]])
    second = heard_of([2, 4], [[7.0], [9.0]])
    found = Transcript(3, [first, second]).mean(lambda one: one.gradients)
    assert found.tolist() == [[1.0], [0.0], [6.0]]  # row 1 was not heard, row 4 is not of interest


def test_norms_count_against_their_batch():
    found = make("gradient_norm").run(
        view(heard_of([0, 1], [[3.0, 4.0], [0.0, 1.0]]), heard_of([2], [[0.2, 0.0]])), generator(0)
    )
    assert torch.allclose(found, torch.tensor([5 / 3, 1 / 3, 1.0]))


@pytest.mark.parametrize(
    ("leaked", "prior"), [((1, 0), (0.9, 0.1)), ((0, 1), (0.1, 0.9)), ((1, 0), (0.5, 0.5))]
)
def test_the_direction_is_that_of_the_leaked_row_of_the_rarer_class(leaked, prior):
    """Rows 3 and 4 leaked: 3 is of the rarer class. In epoch 2 the top has turned around."""
    first = heard_of([0, 1, 3, 4], [[2.0, 0.0], [-1.0, 0.0], [9.0, 0.0], [-9.0, 0.0]])
    second = heard_of([0, 2, 3], [[0.0, -1.0], [0.0, 1.0], [0.0, -3.0]], epoch=2)
    seen = view(first, second, leaked=leaked, prior=prior)
    found = make("gradient_direction:epochs=2").run(seen, generator(0))
    assert found.tolist() == [2.0, -1.0, -1.0]
    assert make("gradient_direction").run(seen, generator(0)).tolist() == [1, -1, 0]


def test_signs_are_labels_where_nothing_is_behind_the_cut():
    gradients = [[-0.9, 0.5, 0.4], [0.1, -0.2, 0.1]]
    found = make("direct_label").run(view(heard_of([0, 1], gradients), classes=3), generator(0))
    assert found.argmax(1).tolist()[:2] == [0, 1]
    assert torch.allclose(found[0], -torch.tensor(gradients[0]) / 1.8)


def partial_view(flip, share=0.3, rows=1200, batch=100):
    """Rows of three classes beside each other, gradients of some of them by labels partly wrong."""
    draw = generator(5, "partly")
    labels = torch.arange(rows) % CLASSES
    inputs = 2.0 * torch.eye(CLASSES, 6)[labels] + torch.randn(rows, 6, generator=draw)
    wrong = torch.rand(rows, generator=draw) < flip
    flipped = torch.where(
        wrong, (labels + 1 + torch.randint(2, (rows,), generator=draw)) % 3, labels
    )
    order = torch.randperm(rows, generator=draw)
    exchanges = []
    for step, some in enumerate(order.split(batch)):
        gradients = torch.eye(CLASSES)[flipped[some]] - 1 / 3
        gradients = gradients * (len(exchanges) < share * rows / batch)
        sent = SentCuts(step, 1, some, torch.zeros_like(gradients))
        exchanges.append(RecordedExchange.of(sent, gradients))
    known = 30  # the last rows leaked
    holdings = Holdings(
        targets=Evidence(inputs[:-known]),
        leaked=Evidence(inputs[-known:], labels=labels[-known:]),
        exchanges=exchanges,
        prior=torch.full((CLASSES,), 1 / CLASSES),
    )
    grants = frozenset({Grant.GRADIENTS, Grant.LEAKED, Grant.INPUTS, Grant.PRIOR})
    view = View(ThreatModel("feature party", "training", grants), CLASSES, holdings)
    return view, labels[:-known]


def right_share(spec, view, labels):
    return float((make(spec).run(view, generator(0)).argmax(1) == labels).double().mean())


def test_a_teacher_of_few_gradients_answers_for_the_other_rows():
    """Gradients alone tell of 3 rows in 10, and a third of the rest is right by chance."""
    view, labels = partial_view(flip=0)
    alone = right_share("gradient_similarity", view, labels)
    assert alone == pytest.approx(0.3 + 0.7 / 3, abs=0.03)
    assert right_share("gradient_teacher", view, labels) > 0.8


def test_a_teacher_of_randomised_labels_is_right_more_often_than_they_are():
    view, labels = partial_view(flip=0.5, share=1)
    alone = right_share("gradient_similarity", view, labels)
    assert alone == pytest.approx(0.5, abs=0.05)
    assert right_share("gradient_teacher", view, labels) > alone + 0.15


def test_a_row_with_a_true_gradient_keeps_what_that_says():
    view, labels = partial_view(flip=0, share=1)
    assert right_share("gradient_teacher", view, labels) > 0.98


def test_what_an_attack_cannot_serve_is_refused():
    heard = heard_of([0, 1], [[1.0, 2.0], [1.0, 0.0]])
    with pytest.raises(UserError, match="one column per class"):
        make("direct_label").run(view(heard, classes=3), generator(0))
    for spec in ("gradient_norm", "gradient_direction"):
        with pytest.raises(UserError, match="two classes only"):
            make(spec).run(view(heard, classes=3), generator(0))
    with pytest.raises(DataError, match="no leaked row is positive"):
        make("gradient_direction").run(view(heard, leaked=(0, 0)), generator(0))
    with pytest.raises(BadOptionError, match="option 'epochs'"):
        make("surrogate:epochs=0")
    with pytest.raises(DataError, match="no training exchange was recorded"):
        make("gradient_similarity").run(view(), generator(0))
