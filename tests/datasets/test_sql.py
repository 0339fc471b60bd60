"""Tables that a database answers with: the same rows as a file's, and no word of the database."""

import sqlite3

import numpy as np
import pandas as pd
import pytest

from vfl.core.errors import DataError, MissingDataError
from vfl.core.sources import database_beside
from vfl.datasets import Dealing, OwnTable, TableFormat, load_own
from vfl.datasets.describe import describe
from vfl.datasets.files import Spill, column_names, read_table

ROWS = 20_000


@pytest.fixture(scope="module")
def loans():
    draw = np.random.default_rng(0)
    town = pd.Series(draw.choice(["Ulm", "Bonn"], ROWS)).mask(draw.random(ROWS) < 0.1)
    day = pd.Timestamp("2020-01-01") + pd.to_timedelta(draw.integers(0, 900, ROWS), "D")
    keys = draw.permutation(ROWS)
    return pd.DataFrame({"id": keys, "x": draw.normal(size=ROWS), "town": town, "day": day})


@pytest.fixture(scope="module", params=["sqlite", "duckdb", "adbc"])
def database(request, loans, tmp_path_factory):
    folder = tmp_path_factory.mktemp("database")
    if request.param == "duckdb":
        duckdb = pytest.importorskip("duckdb")
        with duckdb.connect(str(folder / "loans.db")) as connection:
            connection.register("frame", loans)
            connection.execute("CREATE TABLE loans AS SELECT * FROM frame")
        return f"duckdb:{folder / 'loans.db'}"
    pytest.importorskip({"sqlite": "sqlalchemy", "adbc": "adbc_driver_sqlite"}[request.param])
    connection = sqlite3.connect(folder / "loans.db")
    dated = loans.assign(day=loans["day"].dt.strftime("%Y-%m-%d"))
    dated.to_sql("loans", connection, index=False)
    connection.close()
    return f"{'adbc+' * (request.param == 'adbc')}sqlite:///{folder / 'loans.db'}"


QUERY = "SELECT * FROM loans WHERE x > -5 ORDER BY id"


def test_the_rows_of_a_query(database, loans):
    form = TableFormat(query=QUERY)
    assert column_names(database, form) == ["id", "x", "town", "day"]
    table = read_table(database, form, columns=["x", "id", "town"])
    assert isinstance(table, Spill)  # by column, and not in memory as a whole
    want = loans.sort_values("id", ignore_index=True)
    for name in ("x", "id", "town"):
        found, same = (one[name].astype(object) for one in (table, want))
        pd.testing.assert_series_equal(
            found.where(found.notna(), None), same.where(same.notna(), None), check_names=False
        )
    small = read_table(database, TableFormat(query=f"{QUERY} LIMIT 5"))
    assert small["id"].tolist() == [0, 1, 2, 3, 4]
    none = TableFormat(query="SELECT * FROM loans WHERE x > 500")
    assert len(read_table(database, none)) == 0
    assert column_names(database, none) == ["id", "x", "town", "day"]


def test_a_party_describes_and_loads_it(database):
    report = describe(database, query=QUERY)
    kinds = {one.name: one.kind for one in report.columns}
    assert kinds == {"id": "id", "x": "number", "town": "category", "day": "date"}
    data = load_own(
        "bank", OwnTable(database, report.id, report.features, form=report.form), None, Dealing(0)
    )
    assert data.inputs.shape == (ROWS, 1 + 3 + 5)


@pytest.mark.parametrize("query", ["SELECT nothing_zq8 FROM loans", "zq8", None])
def test_a_wrong_query_is_told_without_its_words(database, query):
    with pytest.raises(DataError) as caught:
        read_table(database, TableFormat(query=query))
    assert caught.value.where == "data.query"
    assert "zq8" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["duckdb:", "sqlite:///", "adbc+sqlite:///"])
def test_no_database_is_made_where_none_is(tmp_path, scheme):
    pytest.importorskip({"d": "duckdb", "s": "sqlalchemy", "a": "adbc_driver_sqlite"}[scheme[0]])
    missing = tmp_path / "none.db"
    with pytest.raises(MissingDataError):
        read_table(f"{scheme}{missing}", TableFormat(query="SELECT 1"))
    assert not missing.exists()


def test_a_database_is_only_read(database):
    with pytest.raises(DataError):
        read_table(database, TableFormat(query="DELETE FROM loans WHERE x > 0"))
    assert len(read_table(database, TableFormat(query=QUERY))) == ROWS


def test_an_address_may_take_a_password_from_the_environment(monkeypatch, database):
    scheme, _, place = database.partition(":")
    monkeypatch.setenv("PLACE", place.removeprefix("///"))
    slashes = "///" if scheme.endswith("sqlite") else ""
    table = read_table(f"{scheme}:{slashes}${{PLACE}}", TableFormat(query=QUERY))
    assert len(table) == ROWS


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sqlalchemy", None)
    with pytest.raises(MissingDataError, match="sqlalchemy") as caught:
        read_table("postgresql://me:secret@host/loans", TableFormat(query="SELECT 1"))
    assert "secret" not in str(caught.value)
    assert "vfl[sql]" in caught.value.fix


def test_an_address_without_a_driver_of_adbc_is_told_which_have_one():
    with pytest.raises(DataError, match="no ADBC driver") as caught:
        read_table("adbc+oracle://me:secret@host/loans", TableFormat(query="SELECT 1"))
    assert "secret" not in str(caught.value)
    assert "adbc+postgresql://" in caught.value.want


def test_a_file_lies_beside_the_party_file(tmp_path):
    assert database_beside("sqlite:///a.db", tmp_path) == f"sqlite:///{tmp_path}/a.db"
    assert database_beside("sqlite:////x/a.db", tmp_path) == "sqlite:////x/a.db"
    assert database_beside("adbc+sqlite:///a.db", tmp_path) == f"adbc+sqlite:///{tmp_path}/a.db"
    for source in ("duckdb:", "duckdb:${PLACE}/a.db", "sqlite:///:memory:", "postgresql://host/a"):
        assert database_beside(source, tmp_path) == source
