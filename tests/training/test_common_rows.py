"""Several runs on one set of rows that none of them learned from."""

import numpy as np
import pandas as pd
import pytest

import vfl
from vfl.config.run_folder import RunFolder
from vfl.core.errors import DisagreementError, TrainedRowsError
from vfl.session import PartyFolder
from vfl.training.run import evaluate_together, load_again


def table(rows, seed=0):
    draw = np.random.default_rng(seed)
    values = draw.normal(size=(rows, 4))
    cells = {f"c{at}": values[:, at] for at in range(4)}
    label = (values[:, 0] + draw.normal(size=rows) > 0).astype(int)
    return pd.DataFrame({"id": [f"p{at:04d}" for at in range(rows)], **cells, "label": label})


def trained(folder, path, name, **changes):
    experiment = {
        "data": {"source": str(path), "id": "id", "validation": 0.1, "test": 0.4},
        "parties": {"bank": {"columns": ["c0", "c1"]}, "shop": {"columns": ["c2", "c3"]}},
        "label": {"party": "lender", "column": "label"},
        "train": {"epochs": 2},
    } | changes
    run = vfl.train(experiment, runs=folder / "runs", name=name, progress=False)
    return RunFolder.open(run.path)


@pytest.fixture
def path(tmp_path):
    table(200).to_csv(tmp_path / "table.csv", index=False)
    return tmp_path / "table.csv"


def test_runs_of_two_seeds_are_scored_on_the_test_rows_of_both(tmp_path, path):
    first, second = (trained(tmp_path, path, f"run{seed}", seed=seed) for seed in (1, 2))
    one, two = evaluate_together([first, second])
    own = [set(PartyFolder(each.party("lender")).rows().split.test) for each in (first, second)]
    assert one["common_rows"] == two["common_rows"] == len(own[0] & own[1])
    assert 0 < one["common_rows"] < len(own[0])
    assert one["guess"] == two["guess"]
    for each, found in ((first, one), (second, two)):
        assert each.evaluation()["test_auc"] == found["test_auc"]
        assert each.evaluation()["beside"] == ["run1", "run2"]
        label = load_again(each)["lender"]
        assert PartyFolder(each.party("lender")).may_test(label).sum() == len(own[0])


def test_a_run_beside_itself_has_the_figures_of_its_training(tmp_path, path):
    run = trained(tmp_path, path, "run")
    one, two = evaluate_together([run, run])
    assert one["test_loss"] == two["test_loss"] == pytest.approx(run.summary()["test_loss"])


def test_runs_of_other_tables_have_no_common_rows(tmp_path, path):
    table(150, seed=1).to_csv(tmp_path / "other.csv", index=False)
    runs = trained(tmp_path, path, "one"), trained(tmp_path, tmp_path / "other.csv", "two")
    with pytest.raises(DisagreementError, match="different rows"):
        evaluate_together(runs)


def test_runs_that_learned_from_every_row_together_are_refused(tmp_path, path):
    few = {"source": str(path), "id": "id", "validation": 0.0, "test": 0.02}
    runs = [trained(tmp_path, path, f"run{seed}", seed=seed, data=few) for seed in (1, 2)]
    with pytest.raises(TrainedRowsError, match="of these runs was trained"):
        evaluate_together(runs)
