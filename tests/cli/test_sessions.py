"""``vfl sessions``: names, what was spent, and no nonce."""

import json

import pytest
from typer.testing import CliRunner

from vfl.cli import app
from vfl.config import Experiment, read_party_file
from vfl.core.frame import Frame, Kind
from vfl.session import Terms
from vfl.session.store.identity import Identity
from vfl.session.store.party_folder import own_ledger
from vfl.session.store.session_ledger import SessionLedger

EXPERIMENT = {"parties": {"bank": {}, "shop": {}}, "defense": "clipped_noise:norm=1,sigma=4"}


@pytest.fixture
def party(tmp_path):
    file = tmp_path / "party.toml"
    file.write_text('party = "bank"\n[data]\nsource = "x.csv"\nid = "id"\n')
    return file


def ask(*arguments):
    done = CliRunner().invoke(app, ["sessions", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_party_without_sessions(party):
    assert ask(party) == "no session yet\n"
    assert json.loads(ask(party, "--json")) == []


def test_what_a_name_stands_for_and_what_was_spent(party):
    ledger = own_ledger(read_party_file(party))
    terms = Terms.of(Experiment.model_validate(EXPERIMENT), "train", "loans")
    with ledger.session(terms) as (entry, meter, _):
        meter("bank", "up", Frame(Kind.CUT, payload=bytes(984)))
        meter.rows, meter.passes = 50, 2
    ledger.end("loans", "a" * 64)
    text = ask(party)
    assert "loans  ended, with bank, shop, label" in text
    assert "train     1 begun, 50 rows, 1.00 kB up, 0 B down" in text
    assert f"at most {2 * entry.epsilon:.4g}: 2 times {entry.epsilon:.4g}, delta 2e-05" in text
    total = f"all names: epsilon at most {2 * entry.epsilon:.4g}, delta 2e-05"
    assert text.splitlines()[-1] == total
    (facts,) = json.loads(ask(party, "--json"))
    assert facts["spent"]["train"]["rows"] == 50
    assert facts["spent_epsilon"] == pytest.approx(2 * entry.epsilon)
    assert "nonce" not in facts
    assert entry.nonce not in text + json.dumps(facts)


def test_the_epsilon_of_all_names(party):
    party.write_text(party.read_text() + "[consent]\nmax_epsilon = 50\n")
    ledger = own_ledger(read_party_file(party))
    for name in ("loans", "cards"):
        terms = Terms.of(Experiment.model_validate(EXPERIMENT), "train", name)
        with ledger.session(terms) as (entry, meter, _):
            meter.passes = 3
    unlimited = SessionLedger(ledger.folder, ledger.party)
    unlimited.begin(
        Terms.of(Experiment.model_validate(EXPERIMENT | {"defense": "none"}), "train", "plain")
    )
    spent = f"{6 * entry.epsilon:.4g} of 50 allowed, delta 6e-05"
    assert (
        ask(party).splitlines()[-1]
        == f"all names: epsilon at most {spent}; runs without an epsilon: 1"
    )


def test_a_log_says_what_was_erased_and_verifies_itself(party, tmp_path):
    """The commands as a user types them; tests/session/store attacks the log."""
    (tmp_path / "x.csv").write_text("id,a\ncustomer-17,1\ncustomer-18,2\n")
    (tmp_path / "ids.txt").write_text("customer-17\n")
    Identity.fresh().keep_at(tmp_path / "identity.key")
    asked = ["forget", str(party), "--ids", str(tmp_path / "ids.txt"), "--table"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "1 in the list, 1 of their rows in the table" in done.stdout
    assert "customer-17" not in done.output + (tmp_path / "x.csv").read_text()
    page = tmp_path / "log.html"
    shown = CliRunner().invoke(app, ["log", str(party), "--page", str(page)])
    assert shown.exit_code == 0, shown.output
    assert "forgotten: 1 rows were erased here" in shown.stdout
    assert "Data protection" in page.read_text()
    log = tmp_path / "store" / "sessions" / "log.jsonl"
    log.write_text(log.read_text().replace('"rows": 1', '"rows": 0'))
    assert CliRunner().invoke(app, ["log", str(party)]).exit_code == 1
