"""Classifiers of leaked rows against plain computations."""

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from vfl.attacks import make
from vfl.attacks.labels.classifiers import as_scores
from vfl.attacks.labels.composed import Task
from vfl.attacks.labels.self_training import most_confident
from vfl.core.seeds import generator

CLASSES = 3


def rows(count, purpose):
    return torch.randn(count, 4, generator=generator(0, purpose))


def known():
    return rows(12, "known"), torch.arange(12) % CLASSES


def means():
    found, labels = known()
    return np.stack([found[labels == code].double().numpy().mean(0) for code in range(CLASSES)])


def test_the_nearest_mean_by_direction_and_by_place():
    some = rows(20, "some")
    for measure, score in (
        ("cosine", lambda x, m: x @ m / np.linalg.norm(x) / np.linalg.norm(m)),
        ("euclid", lambda x, m: -np.linalg.norm(x - m)),
    ):
        found = make(f"nearest_mean:measure={measure}").learn(Task(*known(), CLASSES))(some)
        expected = [[score(x, mean) for mean in means()] for x in some.double().numpy()]
        assert np.allclose(found.numpy(), expected, atol=1e-5)


def test_neighbours_vote_with_the_inverse_of_their_distance():
    some, (leaked, labels) = rows(20, "some"), known()
    found = make("knn:neighbours=4").learn(Task(leaked, labels, CLASSES))(some).numpy()
    for x, votes in zip(some.double().numpy(), found, strict=True):
        distance = np.linalg.norm(leaked.double().numpy() - x, axis=1)
        near = np.argsort(distance)[:4]
        say = [sum(1 / distance[i] for i in near if labels[i] == c) for c in range(CLASSES)]
        assert np.allclose(votes, np.array(say) / sum(say), atol=1e-4)


def test_scores_stand_in_the_columns_of_their_classes():
    scores = as_scores(np.array([[2.0, 5.0], [4.0, 3.0]]), [0, 2], CLASSES)
    assert scores.argmax(1).tolist() == [2, 0]
    assert scores[:, 1].tolist() == [1.0, 1.0]
    two = as_scores(np.array([3.0, -1.0]), [0, 1], 2)
    assert two.softmax(1)[:, 1].tolist() == pytest.approx([1 / (1 + np.exp(-3)), 1 / (1 + np.e)])


def test_the_most_confident_rows_of_each_guessed_class():
    sure = torch.tensor([0.9, 0.6, 0.8, 0.7, 0.55])
    scores = torch.stack([sure, 1 - sure], 1).log()
    scores = torch.cat([scores, scores[:2].flip(1)])  # rows 5 and 6 are of the other class
    assert most_confident(scores, 0.4, least=1).tolist() == [0, 2, 5]
    assert most_confident(scores, 0.4, least=2).tolist() == [0, 2, 5, 6]
    assert most_confident(scores, 1.0, least=1, every=2).tolist() == [0, 3, 4, 5]


def test_a_discriminant_without_further_rows_is_the_plain_one():
    leaked, labels = rows(60, "leaked"), torch.arange(60) % CLASSES
    leaked[:, 0] += labels
    plain = LinearDiscriminantAnalysis(solver="lsqr").fit(leaked.numpy(), labels.numpy())
    some = rows(200, "some")
    found = make("discriminant:scaler=none").learn(Task(leaked, labels, CLASSES))(some).argmax(1)
    assert np.mean(found.numpy() == plain.predict(some.numpy())) > 0.97


def test_a_shrunken_discriminant_is_that_of_scikit_learn():
    leaked, labels = rows(30, "leaked"), torch.arange(30) % CLASSES
    leaked[:, 0] += labels
    plain = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.4)
    plain.fit(leaked.numpy(), labels.numpy())
    some = rows(200, "some")
    task = Task(leaked, labels, CLASSES, scaled=lambda: some)
    made = make("discriminant:shrink=0.4,weight=0")
    found = made.learn(task)(some).softmax(1)
    assert np.allclose(found, plain.predict_proba(some.numpy()), atol=0.01)


def test_unlabelled_rows_of_less_weight_move_a_discriminant_less():
    """All unlabelled rows lie beside the leaked ones."""
    leaked, labels = rows(60, "leaked"), torch.arange(60) % 2
    leaked[:, 0] += 3 * labels
    task = Task(leaked, labels, 2, scaled=lambda: rows(600, "some") + 1)
    found = {
        weight: make(f"discriminant:weight={weight}").learn(task)(leaked) for weight in (0, 0.01, 1)
    }
    near, far = ((found[one] - found[0]).abs().mean() for one in (0.01, 1))
    assert 0 < near < far / 3


def test_further_rows_show_a_discriminant_where_the_classes_lie_apart():
    """In a direction of little variance, which two leaked rows of each class do not show."""
    some, labels = rows(600, "some") * 5, torch.arange(600) % 2
    some[:, 3] = some[:, 3] / 50 + labels - 0.5
    task = Task(some[:4], labels[:4], 2, scaled=lambda: some[4:])
    found = make("discriminant").learn(task)(some[4:]).argmax(1)
    blind = make("logistic").learn(task)(some[4:]).argmax(1)
    right, less = ((guess == labels[4:]).float().mean() for guess in (found, blind))
    assert right > 0.95 > less + 0.2
