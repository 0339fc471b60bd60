"""The neighbour graph, and what walks on it, against dense computations."""

import numpy as np
import pytest
import torch

from vfl.attacks import Evidence, Grant, Holdings, ThreatModel, View, make
from vfl.attacks.labels import propagation as graph
from vfl.attacks.labels.clusters import clusters
from vfl.attacks.labels.propagation import neighbour_graph, propagate
from vfl.attacks.scoring import Case, attempt
from vfl.core.seeds import generator

ROWS, NEIGHBOURS = 30, 4


def rows():
    return torch.randn(ROWS, 3, generator=generator(0, "graph"))


def dense_graph():
    points = rows().double().numpy()
    distance = np.linalg.norm(points[:, None] - points[None], axis=2)
    order = np.argsort(distance, axis=1)[:, 1 : NEIGHBOURS + 1]
    reach = distance[np.arange(ROWS), order[:, -1]]
    weights = np.zeros((ROWS, ROWS))
    for i in range(ROWS):
        for j in order[i]:
            weights[i, j] = weights[j, i] = np.exp(-(distance[i, j] ** 2) / reach[i] / reach[j])
    degree = weights.sum(1)
    return weights / np.sqrt(np.outer(degree, degree))


def test_the_graph_is_the_one_a_double_loop_draws():
    found = neighbour_graph(rows(), NEIGHBOURS).toarray()
    assert np.allclose(found, dense_graph(), atol=1e-5)


@pytest.mark.parametrize("known", [1, 2, 5, ROWS - 1, ROWS])
def test_a_leak_changes_nothing_but_what_is_searched_again(monkeypatch, known):
    searched = []
    among = graph._among

    def counted(rows, count, *of):
        searched.extend([] if of else [len(rows)])
        return among(rows, count, *of)

    monkeypatch.setattr(graph, "_among", counted)
    monkeypatch.setattr(graph, "_KEPT", {})
    for _ in range(2):
        found = neighbour_graph(rows(), NEIGHBOURS, known).toarray()
        assert np.allclose(found, neighbour_graph(rows(), NEIGHBOURS).toarray(), atol=1e-6)
    assert searched.count(ROWS - known) == (ROWS - known > 0)


def test_labels_spread_as_the_inverse_says():
    labels = torch.tensor([0, 1, 2, 0])
    start = np.zeros((ROWS, 3))
    start[np.arange(4), labels] = 1
    expected = np.linalg.solve(np.eye(ROWS) - 0.9 * dense_graph(), start)
    found = propagate(rows(), labels, classes=3, neighbours=NEIGHBOURS, spread=0.9)
    assert np.allclose(found.numpy(), expected, atol=1e-4)


@pytest.mark.filterwarnings("error")
def test_a_row_beside_twins_stays_alone():
    rows = torch.tensor([[0.0], [0.0], [0.0], [1.0]])
    found = neighbour_graph(rows, 2).toarray()
    assert np.isfinite(found).all()
    assert not found[3].any()
    assert (propagate(rows, torch.tensor([1, 0]), 2, 2, 0.5)[3] == 0).all()


def test_two_rings_are_two_clusters():
    turn = torch.linspace(0, 2 * torch.pi, 101)[:-1]
    ring = torch.stack([turn.cos(), turn.sin()], 1)
    found = clusters(torch.cat([ring, 3 * ring]), 2, 4, generator(0, "rings"))
    assert len(set(found[:100].tolist())) == len(set(found[100:].tolist())) == 1
    assert found[0] != found[100]


CLASSES, ROWS, LEAKED = 3, 600, 60


def two_looks(weak=1.0):
    """Inputs and cuts are two looks at the class, each with noise of its own.

    Args:
        weak: times this are the last three of the six input columns.
    """
    draw = generator(0, "looks")
    labels = torch.arange(ROWS) % CLASSES
    inputs, cuts = (
        1.8 * torch.eye(CLASSES, 6)[labels] + torch.randn(ROWS, 6, generator=draw) for _ in range(2)
    )
    inputs[:, 3:] *= weak
    rest = Evidence(inputs[LEAKED:], cuts[LEAKED:])
    leaked = Evidence(inputs[:LEAKED], cuts[:LEAKED], labels[:LEAKED])
    grants = frozenset({Grant.CUTS, Grant.INPUTS, Grant.LEAKED, Grant.UNLABELLED})
    threat = ThreatModel("feature party", "inference", grants)
    holdings = Holdings(targets=rest, leaked=leaked, unlabelled=rest)
    return Case(View(threat, CLASSES, holdings), labels[LEAKED:])


def guess(spec, **case):
    return make(spec).run(two_looks(**case).view, generator(0)).softmax(1)


@pytest.mark.parametrize(
    ("both", "one"),
    [
        ("share=1", "label_propagation:scaler=whiten"),
        ("share=0,components=0", "label_propagation:at=inputs"),
        ("share=0,components=6", "label_propagation:at=inputs"),  # all of them only turn the inputs
    ],
)
def test_a_share_of_all_or_nothing_is_one_of_the_two(both, one):
    assert torch.allclose(guess(f"joined_propagation:{both}"), guess(one), atol=1e-3)


def test_the_strongest_components_are_taken():
    """Without the weak columns the three others only turn."""
    few = guess("joined_propagation:share=0,components=3", weak=1e-4)
    assert torch.allclose(few, guess("label_propagation:at=inputs", weak=0), atol=1e-3)


def test_both_tell_more_than_either():
    both, cut, inputs = (
        attempt(two_looks(), make(spec), generator(0)).value
        for spec in (
            "joined_propagation:share=0.5,scaler=none",
            "label_propagation",
            "label_propagation:at=inputs",
        )
    )
    assert both > max(cut, inputs) + 0.05
