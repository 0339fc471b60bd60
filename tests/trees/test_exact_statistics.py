"""What parties show of exact statistics over several sessions, and over almost the same rows."""

import pandas as pd
import pytest
from loans import COLUMNS, OTHERS, Session, made_table
from played_session import stand_in

from vfl.config import read_party_file
from vfl.core.errors import PeerFailedError
from vfl.core.storage import read_json
from vfl.session.store.erasure import forget
from vfl.session.store.party_folder import own_ledger

#: `vfl bins` trains a scorecard: its sessions are those of "scorecard".
MODELS = {
    "scorecard": f"{COLUMNS},protect=shared,helper=notary",
    "regression": "regression:helper=notary",
    "trees": "trees:protect=shared,helper=notary,max_depth=2,max_bin=8",
}
ACCEPTS = """\
[consent]
models = ["scorecard:*", "regression:*", "trees:*"]
modes = ["train", "evaluate", "predict", "serve"]
"""
TABLE = made_table(420).fillna({"basket": 0.0})  # a regression needs a value in each cell


class Loans(Session):
    """The loans, of parties that accept all three models; all rows train."""

    def __init__(self, folder):
        super().__init__(folder, MODELS["scorecard"], "notary")
        self._content |= {"data": {"validation": 0.0, "test": 0.0}}
        self.rows_are(TABLE[:400])
        for name in ("lender", *OTHERS):
            self.describe(name, ACCEPTS)
        self.write("notary", f'party = "notary"\nrole = "dealer"\n{ACCEPTS}')

    def rows_are(self, table):
        for name in ("lender", *OTHERS):
            path = self.folder / name / "data.csv"
            table[list(pd.read_csv(path, nrows=0))].to_csv(path, index=False)

    def party(self, name="registry"):
        return read_party_file(self.folder / name / "party.toml")

    def shown(self, name="registry"):
        return own_ledger(self.party(name)).spent_statistics()

    def refused(self, **how):
        """What a feature party refused, which ended the session."""
        self.flower.failures.clear()
        with pytest.raises(PeerFailedError):
            self.play(**how)
        return next(str(error) for error in self.flower.failures if error.code == "V403")


@pytest.fixture
def session(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return Loans(tmp_path)


@pytest.mark.parametrize(
    ("first", "second"),
    [("scorecard", "regression"), ("regression", "trees"), ("trees", "scorecard")],
)
def test_one_budget_holds_over_sessions_of_all_models(session, first, second):
    session.play(run="one", model=MODELS[first])
    shown = session.shown()
    assert shown > 0
    session.describe("registry", f"{ACCEPTS}max_statistics = {shown + 2}\n")
    assert "exact statistics" in session.refused(run="two", model=MODELS[second])
    assert session.shown() <= shown + 2, "what is over the limit was not shown"
    store = session.folder / "lender" / "store" / "runs"
    assert "V403" in read_json(store / "two" / "failure.json")["what"]
    assert (store / "one" / "summary.json").exists(), "the run before is as it was"
    session.describe("registry", f"{ACCEPTS}max_statistics = 100000\n")
    session.play(run="three", model=MODELS[second])
    assert shown < session.shown() <= 100_000


@pytest.mark.parametrize("name", MODELS)
def test_two_trainings_that_differ_in_few_rows_are_refused(session, name):
    model = {"model": MODELS[name]}
    session.play(run="january", **model)
    session.play(run="again", **model)  # the same rows tell nothing new
    shown = session.shown()
    session.rows_are(TABLE[:399])
    refusal = session.refused(run="without", **model)
    assert "fewer than 20 rows differ" in refusal
    assert "min_changed_rows = 1" in refusal
    assert "r00399" not in refusal
    assert session.shown() == shown, "nothing of these rows was shown"
    session.rows_are(TABLE)
    session.play(run="february", **model)
    assert session.shown() > shown


def test_an_erased_row_goes_on_counting_until_its_owner_accepts_what_that_tells(session):
    model = {"model": MODELS["regression"]}
    session.play(run="january", **model)
    (shown,) = (session.folder / "registry/store/sessions").glob("*.shown")
    before = shown.read_bytes()
    for name in OTHERS:
        forget(session.party(name), ["r00007"], rewrite=True)
    assert len(shown.read_bytes()) == len(before)
    assert shown.read_bytes() != before, "the digest of the row is overwritten"
    session.rows_are(TABLE[:400][TABLE.id[:400] != "r00007"])
    assert "fewer than 20 rows differ" in session.refused(run="without", **model)
    for name in OTHERS:
        session.describe(name, f"{ACCEPTS}min_changed_rows = 1\n")
    session.play(run="accepted", **model)
