"""Scores against brute force, and leaks against counting."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    roc_auc_score,
)
from torch import nn
from torch.nn.functional import one_hot

from vfl.attacks import Evidence, Grant, Holdings, ThreatModel, View, make
from vfl.attacks.base import Attack
from vfl.attacks.cases import draw_leak
from vfl.attacks.scoring import (
    Case,
    Score,
    attempt,
    attempt_all,
    auc,
    matched_accuracy,
    peak_ratio,
    rate_at,
    scores_of,
    scores_of_labels,
    structural_similarity,
)
from vfl.core.errors import NonFiniteError, TooFewRowsError
from vfl.core.seeds import generator


@pytest.mark.parametrize("seed", range(2))
def test_the_best_matching_is_that_of_all_permutations(seed):
    draw = generator(seed, "clusters")
    clusters, labels = torch.randint(4, (2, 40), generator=draw)
    best = max(
        sum(order[c] == y for c, y in zip(clusters.tolist(), labels.tolist(), strict=True))
        for order in permutations(range(4))
    )
    assert matched_accuracy(clusters, labels) == best / 40


@pytest.mark.parametrize("classes", [2, 4])
def test_measures_of_labels_are_those_of_scikit_learn(classes):
    draw = generator(classes, "labels")
    labels = torch.multinomial(torch.arange(1.0, classes + 1), 200, True, generator=draw)
    scores = torch.randn(200, classes, generator=draw) + 2 * one_hot(labels, classes)
    found = {one.measure: one for one in scores_of_labels(scores, labels)}
    assert found["accuracy"].value == pytest.approx(accuracy_score(labels, scores.argmax(1)))
    assert found["accuracy"].guess == pytest.approx(labels.bincount().max() / 200)
    assert found["balanced_accuracy"].value == pytest.approx(
        balanced_accuracy_score(labels, scores.argmax(1))
    )
    assert found["balanced_accuracy"].guess == pytest.approx(1 / classes)
    sought = [0] if classes == 2 else range(classes)  # the rarer one is looked for
    chances = scores.double().softmax(1)
    if classes == 2:
        areas = roc_auc_score(labels == 0, chances[:, 0])
    else:
        areas = roc_auc_score(labels, chances, multi_class="ovr")
    assert found["auc"] == Score("auc", pytest.approx(areas), 0.5)
    precision = [average_precision_score(labels == one, chances[:, one]) for one in sought]
    assert found["average_precision"].value == pytest.approx(np.mean(precision))
    shares = [float((labels == one).double().mean()) for one in sought]
    assert found["average_precision"].guess == pytest.approx(np.mean(shares))


def test_labels_of_a_single_class_cannot_be_ranked():
    found = scores_of_labels(torch.tensor([[0.1, 0.9], [0.2, 0.8]]), torch.tensor([1, 1]))
    assert [one.measure for one in found] == ["accuracy", "balanced_accuracy"]


def test_clusters_have_every_measure_of_labels():
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    threat = ThreatModel("feature party", "inference", frozenset({Grant.CUTS}))
    case = Case(View(threat, 2, Holdings(Evidence(cuts=torch.zeros(6, 1)))), labels)
    found = scores_of(case, "clusters", torch.tensor([1, 1, 2, 0, 0, 0]))
    values = {one.measure: one.value for one in found}
    assert values["matched_accuracy"] == pytest.approx(5 / 6)
    assert values["matched_balanced_accuracy"] == pytest.approx(5 / 6)
    assert values["matched_auc"] == 1  # the class that is looked for has a cluster of its own


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


def pictures(*shape):
    draw = generator(0, "pictures")
    true = torch.randn(shape, generator=draw)
    return true + 0.5 * torch.randn(shape, generator=draw), true


def ssim_by_loops(one, other, spread, side):
    """Wang et al. 2004, eq 13, one window after the other."""
    line = [math.exp(-((i - (side - 1) / 2) ** 2) / (2 * 1.5**2)) for i in range(side)]
    weights = np.outer(line, line) / sum(line) ** 2
    c1, c2 = (0.01 * spread) ** 2, (0.03 * spread) ** 2
    found = []
    for top in range(one.shape[0] - side + 1):
        for left in range(one.shape[1] - side + 1):
            x, y = (each[top : top + side, left : left + side] for each in (one, other))
            mean_x, mean_y = (weights * x).sum(), (weights * y).sum()
            var_x = (weights * (x - mean_x) ** 2).sum()
            var_y = (weights * (y - mean_y) ** 2).sum()
            cov = (weights * (x - mean_x) * (y - mean_y)).sum()
            found.append(
                (2 * mean_x * mean_y + c1) * (2 * cov + c2)
                / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
            )  # fmt: skip
    return np.mean(found)


@pytest.mark.parametrize(("height", "side"), [(13, 11), (8, 8)])
def test_similarity_is_that_of_all_windows(height, side):
    guess, true = pictures(2, 3, height, 14)
    spread = float(true.max() - true.min())
    expected = np.mean(
        [
            ssim_by_loops(guess[row, channel].double().numpy(), true[row, channel].double().numpy(),
                          spread, side)
            for row in range(2)
            for channel in range(3)
        ]
    )  # fmt: skip
    assert structural_similarity(guess, true) == pytest.approx(expected, rel=1e-9)
    assert structural_similarity(true, true) == pytest.approx(1)


def test_the_peak_ratio_is_a_mean_over_pictures():
    guess, true = pictures(3, 1, 4, 5)
    spread = float(true.max() - true.min())
    expected = [
        10 * math.log10(spread**2 / np.mean((one.numpy() - other.numpy()) ** 2))
        for one, other in zip(guess.double(), true.double(), strict=True)
    ]
    assert peak_ratio(guess, true) == pytest.approx(np.mean(expected))
    assert peak_ratio(true, true) == 100


def test_the_rate_at_one_percent_is_found_by_counting():
    draw = generator(0, "rate")
    scores, positive = torch.rand(500, generator=draw), torch.rand(500, generator=draw) < 0.3
    scores[positive] += 0.4
    best = max(
        float((scores[positive] > threshold).double().mean())
        for threshold in [*scores.tolist(), -1.0]
        if float((scores[~positive] > threshold).double().mean()) <= 0.01
    )
    assert rate_at(scores, positive) == best


@pytest.mark.parametrize(
    ("shape", "measures"), [((6, 1, 4, 4), ["mse", "psnr", "ssim"]), ((6, 3), ["mse"])]
)
def test_the_mean_row_is_worth_the_guess(shape, measures):
    _, true = pictures(*shape)
    mean = true.mean(0, keepdim=True).expand_as(true)
    found = attempt_all(case(inputs=true), Constant("inputs", mean), generator(0))
    assert [score.measure for score in found] == measures
    assert all(score.value == score.guess for score in found)
