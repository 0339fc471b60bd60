"""A party loads its own columns, or its labels, and nothing of another party's."""

import pandas as pd
import pytest
import torch

from vfl.config import Experiment
from vfl.core.errors import ConfigError, MissingColumnError, SharedColumnError
from vfl.datasets import load as own
from vfl.mpc.rules import Rules
from vfl.training.run import load_data, load_party
from vfl.triple import own_rows
from vfl.triple.kept import Kept
from vfl.triple.plan import Terms

COLUMNS = {"bank": ("a", "b*"), "shop": ("c",)}


@pytest.fixture
def table(tmp_path):
    draw = torch.Generator().manual_seed(0)
    cells = torch.randn(60, 4, generator=draw, dtype=torch.float64).numpy()
    frame = pd.DataFrame(cells, columns=["a", "b1", "b2", "c"])
    frame["paid"] = ["yes" if value > 0 else "no" for value in cells.sum(1)]
    frame["id"] = [f"{7 * row % 60:03d}" for row in range(60)]
    frame.to_csv(tmp_path / "all.csv", index=False)
    return frame


def dealt(folder, label="lender", ids="id", sources=None, **data):
    settings = {
        "data": {"source": str(folder / "all.csv")} | ({"id": ids} if ids else {}) | data,
        "parties": {
            name: {"columns": columns} | ({"source": sources[name]} if sources else {})
            for name, columns in COLUMNS.items()
        },
        "label": {"party": label, "column": "paid"},
    }
    return Experiment.model_validate(settings)


def assert_same(found, wanted):
    assert found.row_digest("s") == wanted.row_digest("s")
    assert found.classes == wanted.classes
    for name in ("train", "validation", "test"):
        assert (getattr(found.split, name) == getattr(wanted.split, name)).all()
    for one, two in ((found.inputs, wanted.inputs), (found.labels, wanted.labels)):
        assert (one is None) == (two is None)
        assert one is None or torch.equal(one, two)


@pytest.mark.parametrize("label", ["lender", "bank"])
@pytest.mark.parametrize("ids", ["id", None])
def test_what_a_party_loads_of_one_table_is_its_part_of_it(tmp_path, table, label, ids):
    if ids is None:
        table.drop(columns="id").to_csv(tmp_path / "all.csv", index=False)
    asked = dealt(tmp_path, label, ids)
    whole = load_data(asked)
    for name in whole:
        assert_same(load_party(asked, name), whole[name])


def test_of_a_data_set_by_name_it_keeps_its_part(experiment):
    asked = experiment("digits", rows=200)
    whole = load_data(asked)
    for name in whole:
        assert_same(load_party(asked, name), whole[name])


@pytest.mark.parametrize(
    ("name", "kept"),
    [("bank", {"id", "a", "b1", "b2"}), ("shop", {"id", "c"}), ("lender", {"id", "paid"})],
)
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_no_other_column_of_the_table_is_kept(tmp_path, table, monkeypatch, name, kept, ending):
    table.to_parquet(tmp_path / "all.parquet")
    seen = []

    def reading(*arguments, **more):
        frame, ids = read(*arguments, **more)
        seen.append(set(frame.columns))
        return frame, ids

    read = own.read_sorted
    monkeypatch.setattr(own, "read_sorted", reading)
    load_party(dealt(tmp_path, source=str(tmp_path / f"all.{ending}")), name)
    assert seen == [kept]


def test_tables_of_the_others_need_not_be_there(tmp_path, table):
    sources = {name: str(tmp_path / f"{name}.csv") for name in COLUMNS}
    asked = dealt(tmp_path, sources=sources)
    for name, columns in {"bank": ["a", "b1", "b2"], "shop": ["c"], "lender": ["paid"]}.items():
        path = tmp_path / ("all.csv" if name == "lender" else f"{name}.csv")
        table[["id", *columns]].to_csv(path, index=False)
    whole = load_data(asked)
    for name in whole:
        for other in tmp_path.glob("*.csv"):
            if other.stem != name and not (name == "lender" and other.stem == "all"):
                other.rename(other.with_suffix(".away"))
        assert_same(load_party(asked, name), whole[name])
        for other in tmp_path.glob("*.away"):
            other.rename(other.with_suffix(".csv"))


def test_a_process_asks_for_one_party_and_a_helper_for_none(tmp_path, table, monkeypatch):
    asked = []
    monkeypatch.setattr(own_rows, "load_party", lambda experiment, name: asked.append(name))
    for label in ("lender", "bank"):
        found = dealt(tmp_path, label)
        for role in range(3):
            own_rows.own_rows(found, Kept(Terms.of(found, Rules()), {}), role)
    assert asked == ["bank", "shop", "lender", "bank", "shop"]


def test_mistakes_are_found_by_names_alone(tmp_path, table):
    both = dealt(tmp_path)
    parties = {**both.parties, "shop": both.parties["bank"]}
    with pytest.raises(SharedColumnError):
        load_party(both.model_copy(update={"parties": parties}), "bank")
    with pytest.raises(MissingColumnError, match="id column"):
        load_party(dealt(tmp_path, ids="number"), "bank")
    with pytest.raises(ConfigError, match="folds"):
        load_party(dealt(tmp_path, folds=3), "bank")
