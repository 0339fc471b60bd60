"""Scores against brute force, and leaks against counting."""

from itertools import permutations

import pytest
import torch
from torch import nn

from vfl.attacks import Evidence, Grant, Holdings, ThreatModel, View, make
from vfl.attacks.base import Attack
from vfl.attacks.case import Case, attempt
from vfl.attacks.leak import draw_leak
from vfl.attacks.score import auc, matched_accuracy
from vfl.errors import NonFiniteError, TooFewRowsError
from vfl.seeds import generator


@pytest.mark.parametrize("seed", range(5))
def test_the_best_matching_is_that_of_all_permutations(seed):
    draw = generator(seed, "clusters")
    clusters, labels = torch.randint(4, (2, 40), generator=draw)
    best = max(
        sum(order[c] == y for c, y in zip(clusters.tolist(), labels.tolist(), strict=True))
        for order in permutations(range(4))
    )
    assert matched_accuracy(clusters, labels) == best / 40


def test_clusters_beyond_the_classes_match_nothing():
    assert matched_accuracy(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 0, 1, 1])) == 0.5


def test_auc_is_the_chance_of_the_right_order():
    draw = generator(0, "auc")
    scores, positive = torch.randint(5, (30,), generator=draw), torch.rand(30, generator=draw) < 0.3
    pairs = [
        1.0 if high > low else 0.5 if high == low else 0.0
        for high in scores[positive].tolist()
        for low in scores[~positive].tolist()
    ]
    assert auc(scores.float(), positive) == pytest.approx(sum(pairs) / len(pairs))


class Constant(Attack):
    """Guesses the same for every target."""

    needs = frozenset({Grant.CUTS})

    def __init__(self, goal, guess):
        self.goal = goal
        self.guess = guess

    def run(self, view, draw):
        return self.guess


def case(**truth):
    threat = ThreatModel("feature party", "inference", frozenset({Grant.CUTS}))
    return Case(View(threat, 2, Holdings(Evidence(cuts=torch.zeros(4, 2)))), **truth)


def test_a_constant_guess_is_worth_the_guess():
    labels = torch.tensor([1, 1, 1, 0])
    scores = torch.tensor([[0.0, 1.0]]).expand(4, 2)
    for goal, guess in (("labels", scores), ("clusters", torch.zeros(4, dtype=torch.int64))):
        score = attempt(case(labels=labels), Constant(goal, guess), generator(0))
        assert score.value == score.guess == 0.75
    score = attempt(case(positive=labels == 1), Constant("scores", torch.ones(4)), generator(0))
    assert (score.measure, score.value, score.guess) == ("auc", 0.5, 0.5)
    inputs = torch.tensor([[1.0], [2.0], [3.0], [6.0]])
    score = attempt(case(inputs=inputs), Constant("inputs", torch.full((4, 1), 3.0)), generator(0))
    assert (score.measure, score.value, score.guess) == ("mse", 3.5, 3.5)


def test_a_leak_has_k_of_each_class_and_grows_with_k():
    labels = torch.arange(60) % 3
    small, large = (draw_leak(labels, k, generator(1, "leak")) for k in (2, 5))
    assert labels[large].bincount().tolist() == [5, 5, 5]
    assert set(small.tolist()) < set(large.tolist())
    assert len(set(large.tolist())) == 15
    assert not torch.equal(large, draw_leak(labels, 5, generator(2, "leak")))


def test_a_leak_that_cannot_be_drawn_is_refused():
    with pytest.raises(TooFewRowsError, match="4 labels of each class"):
        draw_leak(torch.tensor([0, 0, 0, 0, 1]), 4, generator(0))


@pytest.mark.parametrize("labels", [[0, 0, 1, 1], []])
def test_a_leak_is_of_every_class_there_is(labels):
    """The highest has no row here, or none has any."""
    rows = torch.tensor(labels, dtype=torch.int64)
    with pytest.raises(TooFewRowsError, match="a class has fewer rows") as refused:
        draw_leak(rows, 1, generator(0), classes=3)
    assert refused.value.got == "0 rows"
    with pytest.raises(TooFewRowsError):
        draw_leak(rows[:0], 1, generator(0))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("goal", ["labels", "scores", "inputs"])
def test_a_guess_that_is_not_finite_is_worth_nothing(goal, value):
    """The largest of NaNs is the first class, so its share would stand for a defense that holds."""
    truth = {"labels": torch.tensor([0, 0, 0, 1]), "inputs": torch.zeros(4, 2)}
    found = torch.zeros(4, 2).index_fill(0, torch.tensor([1]), value)
    told = case(**truth, positive=truth["labels"] == 1)
    with pytest.raises(NonFiniteError, match="the attack Constant holds") as refused:
        attempt(told, Constant(goal, found[:, 0] if goal == "scores" else found), generator(0))
    assert refused.value.got.startswith(("1 of 4", "2 of 8"))


def test_leaked_rows_that_lack_a_class_end_in_no_score():
    cuts, labels = torch.eye(4)[:, :2], torch.tensor([0, 1, 2, 1])
    grants = frozenset({Grant.CUTS, Grant.LEAKED, Grant.TOP_RECIPE})
    holdings = Holdings(
        Evidence(cuts=cuts),
        Evidence(cuts=cuts[:2], labels=labels[:2]),
        new_top=lambda width: nn.Linear(width, 3),
    )
    view = View(ThreatModel("feature party", "inference", grants), 3, holdings)
    with pytest.raises(NonFiniteError, match="the attack FineTuning holds"):
        attempt(Case(view, labels), make("fine_tuning:steps=1"), generator(0))
