"""Attacks where labels are numbers: on one run, in a grid, and what their pages say."""

import pytest
from sklearn.datasets import load_diabetes

import vfl
from vfl.experiments.cells import GridFolder
from vfl.experiments.leaderboard import leaderboard
from vfl.experiments.results import records_of

GRID = {"defenses": ["clipped_noise:sigma=3"], "seeds": [0, 1], "leaks": [40], "draws": 1}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    table = tmp_path_factory.mktemp("numbers") / "diabetes.csv"
    load_diabetes(as_frame=True, scaled=False).frame.to_csv(table, index=False)
    own = {"width": 8, "bottom": "mlp:hidden=16"}
    return {
        "name": "numbers",
        "data": {"source": str(table), "test": 0.4, "validation": 0.2},
        "parties": {
            "clinic": own | {"columns": ["age", "sex", "b*", "s5"]},
            "laboratory": own | {"columns": ["s[1-4]", "s6"]},
        },
        "label": {"party": "lender", "column": "target", "task": "regression"},
        "train": {"epochs": 20, "learning_rate": 5e-3},
    }


def test_a_run_is_attacked_by_the_pack_for_numbers(experiment, tmp_path):
    run = vfl.train(experiment, "trace.phases=train", runs=tmp_path, progress=False)
    attacks = run.attack(leaks=[40], draws=2)
    table = attacks.table
    assert set(table.measure) == {"r2", "mae"}
    assert "regression:at=bottom,learner=kernel" in set(table.subject)
    assert set(table[table.measure == "r2"].guess) == {0.0}
    errors = table[table.measure == "mae"]
    assert all(errors.no_model <= errors.guess)  # the smaller error is the better one
    assert "| r2 " in repr(attacks)
    assert "| mae " in repr(attacks)
    recorded = run.attack("regression:at=gradients", leaks=[40], draws=1).table
    assert recorded[recorded.measure == "r2"].value.item() > 0.5  # the gradient is the error
    assert "points of R² over the guess" in run.glance.sentence
    assert run.page.read_text().count("R²") > 2


def test_a_grid_ranks_defenses_by_what_attacks_explain(experiment, tmp_path):
    found = vfl.grid(experiment, out=tmp_path / "grid", progress=False, **GRID)
    assert found.failed == []
    assert found.content["measure"] == "r2"
    entries = leaderboard(list(records_of(found.path)), 0.5, "r2")
    assert {one.defense for one in entries} == {"none", "clipped_noise:sigma=3"}
    assert {one.judged_by for one in entries} == {"r2"}
    assert "ranked by R², the share of the labels' variance they explain" in found.text
    assert GridFolder(found.path).experiment().grid.attacks == ("light",)  # as it was asked for
    assert "R² of attacks, percent" in found.page.read_text()
