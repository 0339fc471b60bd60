"""What the study of attacks on trees makes of made-up rows whose answer is plain."""

import pytest

from benchmarks import frontier
from benchmarks.trees_attacks import AttackRow, Task, summary_of, table_of, task_of
from vfl.experiments.statistics import Estimate

ATTACKS = {
    ("splits", "auc"): (0.7, 0.5, 0.6),
    ("logistic", "auc"): (0.65, 0.5, 0.6),
    ("bins", "mse"): (0.3, 1.0, 0.9),
    ("bins:rows=false", "mse"): (0.2, 1.0, 0.9),
    ("own_columns", "mse"): (0.9, 1.0, 0.9),
    ("inversion:steps=300", "mse"): (0.5, 1.0, 0.9),
    ("membership", "membership_auc"): (0.52, 0.5, 0.5),
}


def rows(model, utility):
    return [
        AttackRow("bank", model, seed, utility, attack, measure, *reached)
        for (attack, measure), reached in ATTACKS.items()
        for seed in range(3)
    ]


@pytest.fixture
def found() -> Task:
    half = Estimate(0.5, 0.0, 3)
    places = [
        frontier.Place(family, name, half, half, "kmeans", "cut", half, half, "leaks", False, None)
        for family, name in ((frontier.UNDEFENDED, "none"), (frontier.LABEL_FREE, "label_free"))
    ]
    networks = frontier.Frontier("bank", "raw", half, places[1], places, {}, [])
    told = [AttackRow("bank_nodes", "none", 0, 0.8, "nodes", "auc", 0.75, 0.5, 0.6)]
    return task_of([*rows("none", 0.8), *rows("trees:max_bin=4", 0.78)], told, networks)


def test_the_worst_attack_stands_beside_the_best_without_a_model(found):
    plain, fewer = found.places
    assert (plain.worst.attack, plain.worst.reaches.mean) == ("splits", pytest.approx(0.7))
    assert plain.worst.leak.mean == pytest.approx(0.1)
    assert (fewer.model, fewer.loss.mean) == ("max_bin=4", pytest.approx(-0.02))
    assert plain.bins.mean == pytest.approx(0.8), "the better of the two that read bins"
    assert plain.answers.mean == pytest.approx(0.5)
    assert found.own.mean == pytest.approx(0.1)
    assert found.told.leak.mean == pytest.approx(0.15)


def test_trees_and_networks_stand_in_one_table(found):
    said = summary_of([found])
    for model in ("trees", "trees, nodes known", "network", "label-free network: `label_free`"):
        assert f"| {model} " in said
    assert [row[0] for row in table_of(found).rows] == ["as they are", "max_bin=4"]
