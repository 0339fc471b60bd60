"""A federated party's secret: one of its own for each run."""

from vfl.config import Experiment, PartyFile
from vfl.core.seeds import Secret
from vfl.session import Terms
from vfl.session.store.party_folder import INJECTED_SECRET, own_ledger, own_secret


def party_in(folder):
    content = {"party": "bank", "data": {"source": "x.csv", "id": "id"}, "store": str(folder)}
    return PartyFile.model_validate(content)


def terms_of(run):
    return Terms.of(Experiment.model_validate({"parties": {"bank": {}}}), "train", run)


def entry_of(party, run):
    return own_ledger(party).begin(terms_of(run))


def test_each_run_has_draws_of_its_own_and_can_go_on(tmp_path):
    party = party_in(tmp_path)
    first = own_secret(party, entry_of(party, "one"))
    assert own_secret(party, entry_of(party, "two")) != first
    assert own_secret(party, entry_of(party, "one")) == first
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_a_trial_can_put_its_own_secret(tmp_path):
    Secret.of_simulation(0, "bank").keep_at(tmp_path / INJECTED_SECRET)
    party = party_in(tmp_path)
    for run in ("one", "two"):
        assert own_secret(party, entry_of(party, run)) == Secret.of_simulation(0, "bank")
    assert not (tmp_path / "secret").exists()
