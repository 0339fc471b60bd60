"""Scorecards on shares: the card of one place, what each party sees, and bad input."""

import numpy as np
import pandas as pd
import pytest
from loans import ACCEPTS, COLUMNS, OTHERS, PARTIES, Session, made_table, trained
from played_session import stand_in

from vfl.config import read_party_file
from vfl.core.errors import (
    DataError,
    ExposedCutError,
    PeerFailedError,
    TooFewRowsError,
    VFLError,
)
from vfl.core.storage import read_json
from vfl.session.store.party_folder import own_ledger
from vfl.trees.scorecard.binning import with_floor
from vfl.trees.scorecard.fitting import counts_of
from vfl.trees.scorecard.loaded import LoadedCard, part_of
from vfl.trees.scorecard.page import write_card
from vfl.trees.scorecard.shared import HelperEnd

ORDER, SHARED = (f"scorecard:bad=bad,bins=3,{one}" for one in ("", "protect=shared,helper=notary"))
ORDER = ORDER.rstrip(",")


def agree(one, other):
    """Assert that two cards are the same, up to the fractions that shares are rounded to."""
    for mine, theirs in zip(one.columns, other.columns, strict=True):
        np.testing.assert_array_equal(mine.counts, theirs.counts)
        np.testing.assert_array_equal(mine.weights, theirs.weights)
        np.testing.assert_array_equal(mine.points, theirs.points)
        numbers = [(each.coefficient, each.error, each.p_value) for each in (mine, theirs)]
        np.testing.assert_allclose(*numbers, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(one.correlation, other.correlation, atol=1e-6)
    np.testing.assert_allclose(one.inflation(), other.inflation(), rtol=1e-5)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cards")
    found = []
    for name, model in (("order", ORDER), ("shared", SHARED)):
        (folder / name).mkdir()
        found.append(trained(folder / name, made_table(), model))
    return found


def test_sums_on_shares_make_the_card_of_one_place(both):
    (order, plain), (shared, summary) = both
    agree(order.card, shared.card)
    assert summary["test_auc"] == plain["test_auc"]
    assert [line.bins for line in shared.lines] == [line.bins for line in order.lines]
    assert "train" not in shared.card.scores, "nobody has the score of a training row"
    assert shared.card.scores["test"].auc() == order.card.scores["test"].auc()
    page, text = (path.read_text() for path in write_card(shared.folder.path))
    assert "bin of every training" not in page
    assert "good and bad rows of each cell" in text
    assert "training rows have no scores" in page


def test_who_learns_what_stands_in_the_summary(both):
    _, summary = both[1]
    told = {(one["observer"], one["what"]): one["values"] for one in summary["revealed"]}
    cells = told["lender", "sums over rows, bins"]
    assert cells < 40 * 3, "bads of each cell of three columns"
    assert not any(who == "lender" and "of cells" in what for who, what in told)
    assert told["notary", "permuted margins, training rows"] % 900 == 0
    assert told["notary", "bins of cells, rows permuted"] == 900 * 3
    assert {what for who, what in told if who == "shop"} == {
        "numbers of rows and columns", "weights of evidence, its bins", "coefficients, own columns",
    }  # fmt: skip


@pytest.mark.parametrize("gone", [[], ["income"], ["basket", "city", "age"]])
def test_columns_of_one_value_and_columns_that_are_missing_are_left_out(tmp_path, gone):
    table = made_table()
    table["constant"], table["nothing"] = 7.0, np.nan
    table[gone] = 1.0
    found = []
    for name, model in (("order", ORDER), ("shared", SHARED)):
        (tmp_path / name).mkdir()
        parties = {one: dict(own) for one, own in PARTIES.items()}
        parties["shop"] = {"columns": ["basket", "city", "constant", "nothing"]}
        found.append(trained(tmp_path / name, table, model, parties=parties)[0])
    agree(*(loaded.card for loaded in found))
    on_card = {line.name for line in found[1].lines if line.column.on_card}
    assert on_card == {"income", "basket", "city", "age"} - set(gone)


def test_a_label_party_without_columns_has_a_card(tmp_path):
    parties = {"shop": {"columns": ["basket", "city", "income"]}, "registry": {"columns": ["age"]}}
    found = []
    for name, model in (("order", ORDER), ("shared", SHARED)):
        (tmp_path / name).mkdir()
        found.append(trained(tmp_path / name, made_table(), model, parties=parties)[0].card)
    agree(*found)


def test_a_card_without_columns_says_so(tmp_path):
    loaded, summary = trained(tmp_path, made_table(800), f"{SHARED},min_iv=5")
    assert not any(line.column.on_card for line in loaded.lines)
    assert summary["test_auc"] == 0.5


def test_few_rows_share_a_cell_before_anybody_counts(tmp_path):
    """Eleven rows live in Bern, and five have no basket: nobody else learns of either."""
    table = made_table()
    table["basket"] = table.basket.fillna(0.0)
    table.loc[table.index[:11], "city"] = "bern"
    table.loc[table.index[20:25], "basket"] = np.nan
    loaded, _ = trained(tmp_path, table, SHARED)
    basket, city = (
        next(one for one in loaded.lines if one.name == name) for name in ("basket", "city")
    )
    assert min(rows for rows in city.column.counts.sum(axis=1) if rows) >= 20
    assert basket.column.counts[-1].sum() == 0, "missing cells are counted elsewhere"
    assert sum("or missing" in text for text in basket.bins) == 1
    (bern,) = [text for text in city.bins if "bern" in text]
    assert "," in bern, "with another city"
    page = write_card(tmp_path / "run")[0].read_text()
    assert "or missing" in page


@pytest.mark.parametrize("categorical", [True, False])
def test_a_cell_has_as_many_rows_as_the_floor_or_none(categorical):
    draw = np.random.default_rng(0)
    for _ in range(300):
        rows = draw.integers(0, 30, draw.integers(2, 9)) * (draw.random() < 0.9)
        floor = int(draw.integers(1, 25))
        cells, count = with_floor(rows, floor, categorical=categorical)
        held = np.bincount(cells, rows, count)
        assert held.sum() == rows.sum()
        if rows.sum() >= floor:
            assert held[held > 0].min(initial=floor) >= floor
        if not categorical:
            assert (np.diff(cells[:-1]) >= 0).all(), "neighbours"
        if rows[-1] >= floor and not 0 < rows[:-1].sum() < floor:
            assert cells[-1] == count - 1, "missing cells stay what they are"


def test_too_few_rows_for_a_floor_are_refused(tmp_path):
    with pytest.raises(TooFewRowsError, match="too few training rows") as refusal:
        trained(tmp_path, made_table(300), f"{SHARED},floor=200")
    assert refusal.value.code


@pytest.mark.parametrize("helper", ["shop", "lender"])
def test_a_helper_with_data_is_refused(tmp_path, helper):
    with pytest.raises(ExposedCutError, match="reveal shares"):
        trained(tmp_path, made_table(300), f"scorecard:bad=bad,protect=shared,helper={helper}")


def test_a_class_that_is_absent_and_many_categories_are_refused(tmp_path):
    table = made_table(2000)
    table["city"] = [f"city {row}" for row in range(2000)]
    with pytest.raises(VFLError, match="categories") as refusal:
        trained(tmp_path, table, SHARED)
    assert refusal.value.code == "V200"
    table = made_table(400)
    table["paid"] = "good"
    for name in ("absent", "separated", "small"):
        (tmp_path / name).mkdir()
    with pytest.raises(VFLError):
        trained(tmp_path / "absent", table, SHARED)
    table = made_table()
    table["age"] = (table.paid == "good").astype(float)
    with pytest.raises(DataError, match="separates"):
        trained(tmp_path / "separated", table, SHARED)
    with pytest.raises(DataError, match="too many statistics"):
        trained(tmp_path / "small", made_table(), f"{SHARED},budget=3")


@pytest.fixture
def session(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return Session(tmp_path, f"{COLUMNS},protect=shared,helper=notary", "notary")


def test_a_federation_makes_the_card_of_shares_and_answers_without_the_helper(session, monkeypatch):
    seen = []
    received = HelperEnd.train
    monkeypatch.setattr(
        HelperEnd, "train", lambda end, exchange: (seen.append(end), received(end, exchange))
    )
    session.play()
    assert not session.flower.failures
    assert seen[0]._rows.inputs is None, "the helper has no rows"
    figures = read_json(session.run / "summary.json")
    own = session.folder / "shop" / "store" / "runs" / "run" / "parties" / "shop"
    (basket, bins, column), _ = part_of(own)
    assert basket == "basket"
    assert len(bins) == len(column.points)
    told = (session.run / "summary.json").read_text()
    assert "basket" not in told.replace("rising=basket", "")
    session.flower.parties = OTHERS
    session.play(mode="evaluate")
    again = read_json(session.run / "evaluations/0001.json")
    assert again["test_auc"] == figures["test_auc"]
    session.play(mode="predict")
    scores = pd.read_csv(LoadedCard(session.run).write_scores(1))
    assert set(scores.reason_1.dropna()) <= {"lender income"} | {
        f"{name} column {number}" for name in OTHERS for number in (1, 2)
    }


def shown_by(session, name):
    ledger = own_ledger(read_party_file(session.folder / name / "party.toml"))
    return {entry.run: entry.statistics for entry in ledger.entries()}


def test_a_party_counts_exact_statistics_and_shows_no_more_than_it_allows(session):
    session.play()
    counted = {name: shown_by(session, name)["run"] for name in ("lender", *OTHERS)}
    assert counted["lender"] == 0
    loaded = LoadedCard(session.run)
    cells = sum(len(line.column.groups) for line in loaded.lines if line.party == "registry")
    # Rows and bads of each cell and the stability of one column; 3 + 1 products with the others'
    # columns, with itself and with the intercept; one with labels; five numbers of each step.
    pairs = 1 * 4 + 1
    steps, rest = divmod(counted["registry"] - (2 * cells + 1 + pairs + 1), pairs + 1)
    assert rest == 0
    assert 2 <= steps <= 8
    limit = f"max_statistics = {counted['registry'] + 2 * cells}\n"
    session.describe("registry", ACCEPTS + limit)
    with pytest.raises(PeerFailedError):
        session.play(run="again")
    assert "V403" in {error.code for error in session.flower.failures}
    after = shown_by(session, "registry")
    assert after["run"] == counted["registry"]
    assert after["again"] <= 2 * cells, "the rest was not shown"


def test_two_sets_of_rows_that_differ_in_one_tell_its_cells():
    """What docs/scorecard.md says of two trainings: the floor does not help, the limit may."""
    table = made_table(400)
    basket = table.basket.fillna(0.0).to_numpy()
    edges = np.quantile(basket, np.linspace(0, 1, 9)[1:-1])
    fine, bad = np.searchsorted(edges, basket), (table.paid == "bad").to_numpy()
    left_out = 17
    others = np.arange(400) != left_out

    def counted(rows):
        cells, count = with_floor(np.bincount(fine[rows], minlength=9), 20, categorical=False)
        return counts_of(cells[fine[rows]], bad[rows], count)

    difference = counted(np.ones(400, bool)) - counted(others)
    assert np.argwhere(difference).tolist() == [[fine[left_out], int(bad[left_out])]]
