"""The neighbour graph, and what walks on it, against dense computations."""

import numpy as np
import pytest
import torch

from vfl.attacks import graph
from vfl.attacks.graph import neighbour_graph
from vfl.attacks.label_propagation import propagate
from vfl.attacks.spectral import clusters
from vfl.seeds import generator

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
    monkeypatch.setattr(
        graph, "_among", lambda *given: searched.append(len(given[0])) or among(*given)
    )
    monkeypatch.setattr(graph, "_KEPT", {})
    for _ in range(2):
        found = neighbour_graph(rows(), NEIGHBOURS, known).toarray()
        assert np.allclose(found, neighbour_graph(rows(), NEIGHBOURS).toarray(), atol=1e-6)
    assert searched.count(ROWS - known) == (ROWS - known > 0)


def test_only_so_many_searches_are_kept(monkeypatch):
    monkeypatch.setattr(graph, "_KEPT", {})
    for shift in range(graph._KEPT_MOST + 3):
        neighbour_graph(rows() + shift, NEIGHBOURS, 2)
    assert len(graph._KEPT) == graph._KEPT_MOST


def test_labels_spread_as_the_inverse_says():
    labels = torch.tensor([0, 1, 2, 0])
    start = np.zeros((ROWS, 3))
    start[np.arange(4), labels] = 1
    expected = np.linalg.solve(np.eye(ROWS) - 0.9 * dense_graph(), start)
    found = propagate(rows(), labels, classes=3, neighbours=NEIGHBOURS, spread=0.9)
    assert np.allclose(found.numpy(), expected, atol=1e-4)


def test_twins_do_no_harm():
    twins = torch.zeros(6, 2)
    assert torch.isfinite(propagate(twins, torch.tensor([0, 1]), 2, 3, 0.5)).all()


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
