"""Randomised response against counts, closed forms and every prior's best answer set."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from vfl.config import Experiment
from vfl.core.errors import SpecError
from vfl.core.seeds import Secret
from vfl.datasets import Dealing, load_bundled
from vfl.defenses import LabelKind, make
from vfl.defenses.label_dp import answers_of, flip_of, respond_with_prior
from vfl.training.local import LocalSession

LENDER, OTHER = (Secret.of_simulation(0, name) for name in ("lender", "other"))
ROWS = 20_000


def flipped(spec, classes, secret=LENDER):
    defense = make(spec)
    defense.prepare(LabelKind(classes))
    labels = torch.arange(ROWS) % classes
    return labels.numpy(), defense.labels(labels, secret).numpy()


@pytest.mark.parametrize(("spec", "share"), [("flip=0.16", 0.16), ("epsilon=1", None)])
@pytest.mark.parametrize("classes", [2, 10])
def test_labels_flip_as_often_as_said_and_to_every_other_alike(spec, share, classes):
    share = share or (classes - 1) / (math.e + classes - 1)
    before, after = flipped(f"label_dp:{spec}", classes)
    turned = (after - before) % classes
    law = np.array([1 - share, *[share / (classes - 1)] * (classes - 1)])
    assert chisquare(np.bincount(turned, minlength=classes), ROWS * law).pvalue > 0.01


@pytest.mark.parametrize(("flip", "epsilon"), [(0.01, 6.79), (0.16, 3.86)])
def test_the_epsilons_of_the_papers_sweep(flip, epsilon):
    """Ten classes; both printed with two decimals."""
    defense = make(f"label_dp:flip={flip}")
    assert defense.privacy()[0].epsilon is None  # the number of classes is not known yet
    defense.prepare(LabelKind(10))
    (promise,) = defense.privacy()
    assert promise.epsilon == pytest.approx(epsilon, abs=0.005)
    assert flip_of(promise.epsilon, 10) == pytest.approx(flip)
    assert (promise.unit, promise.per, promise.delta) == ("label", "training", 0.0)


def test_flips_follow_from_the_label_partys_secret():
    _, after = flipped("label_dp:flip=0.5", 10)
    assert np.array_equal(after, flipped("label_dp:flip=0.5", 10)[1])
    _, other = flipped("label_dp:flip=0.5", 10, OTHER)
    assert (after == other).mean() == pytest.approx(0.5**2 + 0.5**2 / 9, abs=0.02)


def law_of(prior, epsilon, label):
    """The exact law of an answer, from an even grid of draws."""
    side = 400
    ticks = (np.arange(side) + 0.5) / side
    draws = np.stack(np.meshgrid(ticks, ticks), -1).reshape(-1, 2)
    told = respond_with_prior(np.full(len(draws), label), np.array([prior]), epsilon, draws)
    return np.bincount(told, minlength=len(prior)) / len(draws)


@pytest.mark.parametrize("likely", [1, 2, 3, 5])
@pytest.mark.parametrize("epsilon", [1.0, 2.0, 4.0])
def test_a_likely_label_is_kept_as_often_as_among_the_likely_classes_alone(likely, epsilon):
    """Ghazi et al. 2021, algorithm 1: e^eps / (e^eps + k - 1) for k answers, whatever K is."""
    prior = np.array([1 / likely] * likely + [0.0] * (10 - likely))
    kept = math.exp(epsilon) / (math.exp(epsilon) + likely - 1)
    for label in range(likely):
        expected = np.full(10, (1 - kept) / max(likely - 1, 1)) * (np.arange(10) < likely)
        expected[label] = kept
        np.testing.assert_allclose(law_of(prior, epsilon, label), expected, atol=0.005)
    expected = np.where(np.arange(10) < likely, 1 / likely, 0)
    np.testing.assert_allclose(law_of(prior, epsilon, 9), expected, atol=0.005)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0, 3.0, 8.0])
def test_the_answers_keep_most_labels_true(epsilon):
    """Against every set of classes."""
    prior = (0.45, 0.05, 0.3, 0.2)

    def kept(classes):
        return sum(prior[c] for c in classes) / (1 + (len(classes) - 1) * math.exp(-epsilon))

    sets = [s for k in range(1, 5) for s in itertools.combinations(range(4), k)]
    ((order,), (count,)) = answers_of(np.array([prior]), epsilon)
    assert kept(order[:count]) == pytest.approx(max(map(kept, sets)))


def test_every_row_may_have_a_prior_of_its_own():
    draw = np.random.default_rng(0)
    priors, labels = draw.dirichlet(np.ones(4), 50), draw.integers(0, 4, 50)
    draws = draw.random((50, 2))
    together = respond_with_prior(labels, priors, 1.0, draws)
    alone = [
        respond_with_prior(labels[[row]], priors[[row]], 1.0, draws[[row]])[0] for row in range(50)
    ]
    assert together.tolist() == alone


def test_a_prior_that_is_even_changes_nothing_but_the_draws():
    order, counts = answers_of(np.full((1, 4), 0.25), 2.0)
    assert (order.tolist(), counts.tolist()) == ([[0, 1, 2, 3]], [4])
    before, after = flipped("label_dp:epsilon=2,prior=0.5-0.25-0.25", 3)
    assert (before == after).mean() == pytest.approx(1 - flip_of(2.0, 3), abs=0.02)


def test_labels_it_does_not_fit():
    with pytest.raises(SpecError, match="the labels of a regression are numbers"):
        make("label_dp:epsilon=1").prepare(LabelKind(None))
    with pytest.raises(SpecError, match="flips labels more often than a random guess") as caught:
        make("label_dp:flip=0.6").prepare(LabelKind(2))
    assert caught.value.want == "at most 0.5"
    with pytest.raises(SpecError, match="another number of classes") as caught:
        make("label_dp:epsilon=1,prior=0.5-0.5").prepare(LabelKind(3))
    assert caught.value.got == "2 shares"


@pytest.mark.parametrize("changed", ["nothing", "seed", "secret"])
def test_in_a_training_flips_follow_from_the_secret_and_not_from_the_seed(changed):
    data = load_bundled("breast_cancer", ["bank", "shop"], "lender", Dealing(0))
    label = data["lender"]

    def trained_on(seed, secret):
        parties = {"bank": {"width": 4}, "shop": {"width": 4}}
        content = {"seed": seed, "parties": parties, "label": {"party": "lender"}}
        experiment = Experiment.model_validate(content | {"defense": "label_dp:flip=0.3"})
        session = LocalSession(experiment, data, outputs=2, secrets={"lender": secret})
        return session.label._labels.numpy()

    first = trained_on(0, LENDER)
    second = trained_on(int(changed == "seed"), OTHER if changed == "secret" else LENDER)
    assert np.array_equal(first, second) == (changed != "secret")
    moved = first != label.labels.numpy()
    assert moved[label.split.train].mean() == pytest.approx(0.3, abs=0.08)
    assert not moved[label.split.test].any()
