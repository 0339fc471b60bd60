"""Tables that trees can make little of: a readable error with a code, or the trees without them."""

import numpy as np
import pandas as pd
import pytest
from played_session import stand_in
from trees_session import CONTENT, ROWS, TreesSession

from vfl.config import Experiment
from vfl.core.errors import DataError, ExposedCutError, MissingPartyError
from vfl.core.storage import read_json
from vfl.training.run import train

PROTECTIONS = {
    "order": "trees:max_depth=3",
    "known": "trees:max_depth=3,protect=shared",
    "hidden": "trees:max_depth=3,protect=shared,nodes=hidden",
}
protections = pytest.mark.parametrize("spec", PROTECTIONS.values(), ids=PROTECTIONS)


@pytest.fixture(scope="module")
def table():
    draw = np.random.default_rng(0)
    found = pd.DataFrame(draw.normal(size=(ROWS, 2)), columns=["income", "basket"])
    found["paid"] = (found.income + found.basket > 0).astype(int)
    found["visits"] = draw.poisson(np.exp(found.income / 2))
    return found


def trained(folder, table, spec, shop, label="paid", **more):
    """What a training says, of a bank with labels and an income, and a shop."""
    folder.mkdir(exist_ok=True)
    table.to_csv(folder / "table.csv", index=False)
    content = {
        "model": spec,
        "data": {"source": str(folder / "table.csv")},
        "parties": {"bank": {"columns": ["income"]}, "shop": {"columns": shop}},
        "label": {"party": "bank", "column": label, **more},
        "train": {"epochs": 3},
    }
    return train(Experiment.model_validate(content), folder, "run")


@protections
@pytest.mark.parametrize("cells", [7.0, "ulm", np.nan], ids=["number", "text", "missing"])
def test_a_column_that_tells_nothing_changes_nothing(tmp_path, table, spec, cells):
    table = table.assign(same=cells)
    found = trained(tmp_path / "with", table, spec, ["same", "basket"])
    expected = trained(tmp_path / "without", table, spec, ["basket"])
    assert found["test_log_loss"] == expected["test_log_loss"]
    assert found["test_auc"] > 0.9


@protections
def test_a_party_whose_cells_are_all_missing_takes_part(tmp_path, table, spec):
    assert trained(tmp_path, table.assign(none=np.nan), spec, ["none"])["test_auc"] > 0.7


@protections
def test_a_hundred_thousand_categories_are_refused(tmp_path, spec):
    draw, rows = np.random.default_rng(0), 100_000
    table = pd.DataFrame({"income": draw.normal(size=rows), "street": np.arange(rows)})
    table["street"] = "s" + table.street.astype(str)
    table["paid"] = (table.income > 0).astype(int)
    with pytest.raises(DataError, match="too many categories") as found:
        trained(tmp_path, table, spec, ["street"])
    assert "group its texts" in str(found.value)
    assert "s99" not in str(found.value), "no cell"


@protections
def test_labels_that_no_objective_takes_are_refused(tmp_path, table, spec):
    shop, poisson = ["basket"], f"{spec},objective=poisson"
    fewer = table.assign(visits=table.visits - 1)
    with pytest.raises(DataError, match="must not be negative") as found:
        trained(tmp_path / "negative", fewer, poisson, shop, "visits", task="regression")
    assert "objective=auto" in str(found.value)
    with pytest.raises(DataError, match="too few classes"):
        trained(tmp_path / "one", table[table.paid == 1], spec, shop)
    rare = pd.concat([table[table.paid == 1], table[table.paid == 0][:1]])
    assert trained(tmp_path / "rare", rare, spec, shop)["test_log_loss"] < 0.2, "a class of one row"


@pytest.mark.parametrize("helper", ["bank", "shop"])
def test_a_helper_that_has_data_is_refused(tmp_path, table, helper):
    with pytest.raises(ExposedCutError, match="could reveal shares"):
        trained(tmp_path, table, f"{PROTECTIONS['known']},helper={helper}", ["basket"])


def test_a_session_that_a_bad_table_ends_loses_nothing(tmp_path, monkeypatch):
    """A party says what is wrong at home, others learn no name, and the next session trains."""
    stand_in(monkeypatch)
    session = TreesSession(tmp_path)
    path = tmp_path / "shop" / "data.csv"
    good = path.read_bytes()
    every = pd.read_csv(path).assign(city=[f"town {row}" for row in range(ROWS)])
    every.to_csv(path, index=False)
    quick = CONTENT["federation"] | {"join_timeout_s": 3.0}
    with pytest.raises(MissingPartyError) as told:
        session.play(federation=quick)
    (said,) = [error for error in session.flower.failures if error.code == "V200"]
    assert "'city' has too many categories" in str(said)
    assert "city" not in str(told.value)
    assert "town" not in str(said) + str(told.value)
    path.write_bytes(good)
    session.play(run="again")
    run = tmp_path / "lender" / "store" / "runs" / "again"
    assert read_json(run / "summary.json")["test_auc"] > 0.85
