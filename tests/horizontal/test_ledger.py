"""What a party keeps of horizontal trainings: beside its sessions, under one limit."""

import shutil

import pytest
from horizontal_party import one_round, refusal, write_party

from vfl.cli.federation import sessions
from vfl.config import Experiment, read_party_file
from vfl.core.errors import ConsentError, PeerFailedError, RolledBackError
from vfl.core.storage import Seal, read_sealed_json, write_sealed_json
from vfl.horizontal.ledger import Rounds, rounds_of
from vfl.session import Terms
from vfl.session.store.party_folder import own_ledger
from vfl.session.store.witness import Witness

pytestmark = pytest.mark.usefixtures("within_a_run")
NOISE = "clipped_noise:norm=1.0,sigma=4.0"


def session_terms(run):
    content = {"parties": {"north": {"width": 4}}, "defense": NOISE, "train": {"epochs": 1}}
    return Terms.of(Experiment.model_validate(content), "train", run)


def spend_in_a_session(party, run):
    ledger = own_ledger(party)
    with ledger.session(session_terms(run)) as (_, meter, _):
        meter.passes += 1
        meter.reserve()
    return ledger


def begin(party, epsilon, run):
    new = Rounds(run=run, settings="0" * 64, epsilon=epsilon)
    rounds_of(party).take(new, 9, own_ledger(party).require_epsilon)


def with_limit(folder, limit):
    write_party(folder)
    path = folder / "party.toml"
    path.write_text(path.read_text().replace("[consent]\n", f"[consent]\nmax_epsilon = {limit}\n"))
    return read_party_file(path)


def test_one_limit_bounds_sessions_and_horizontal_trainings(tmp_path):
    spent = spend_in_a_session(write_party(tmp_path), "any").spent_epsilon()
    shutil.rmtree(tmp_path / "store")
    party = with_limit(tmp_path, 1.5 * spent)
    begin(party, spent, "rows")
    begin(party, spent, "rows")  # a further round of what is counted
    with pytest.raises(ConsentError, match="does not consent to spend more"):
        own_ledger(party).begin(session_terms("columns"))
    with pytest.raises(ConsentError, match="does not consent to spend more"):
        begin(party, spent, "more rows")
    begin(party, spent / 4, "few rows")


def test_a_client_takes_part_in_as_many_rounds_as_its_training_has_for_it(tmp_path):
    party = write_party(tmp_path)
    for _ in range(9):
        begin(party, 0.1, "rows")
    with pytest.raises(ConsentError, match="rounds of this training are used up"):
        begin(party, 0.1, "rows")


def test_a_session_leaves_less_for_horizontal_trainings(tmp_path):
    spent = spend_in_a_session(write_party(tmp_path), "columns").spent_epsilon()
    with pytest.raises(ConsentError, match="spent under all names"):
        begin(with_limit(tmp_path, 1.5 * spent), spent, "rows")


def test_a_store_of_before_is_read_and_written_as_it_was(tmp_path):
    party = write_party(tmp_path)
    seal = Seal("rounds of a horizontal training", "north", "old")
    path = party.store_path / "sessions" / "horizontal" / "old.json"
    path.parent.mkdir(parents=True)
    write_sealed_json(path, {"settings": "a" * 64, "rounds": 2, "epsilon": 3.0}, seal)
    assert rounds_of(party).entries() == [Rounds(run="old", settings="a" * 64, rounds=2, epsilon=3)]
    rounds_of(party).take(Rounds(run="old", settings="a" * 64), 3, pytest.fail)
    kept = read_sealed_json(path, seal)
    assert (kept["settings"], kept["rounds"], kept["epsilon"]) == ("a" * 64, 3, 3.0)


class Office:
    """The server's end, which remembers what it has met."""

    def __init__(self, folder):
        self.counts = Witness(folder / "office", "office")

    def known(self, client):
        return self.counts.read().peers.get("north", 0)

    def admit(self, client, count):
        self.counts.admit("north", count)

    def meets(self, party, asked, run):
        strategy, reply = one_round(party, asked, run=run, known=self.known, admit=self.admit)
        strategy.aggregate_train(1, [reply])


@pytest.fixture
def went_back(tmp_path, asked):
    """A party with one training, whose second one was forgotten, and who has met both."""
    party, office = write_party(tmp_path), Office(tmp_path)
    office.meets(party, asked, "first")
    shutil.copytree(party.store_path, tmp_path / "copy")
    office.meets(party, asked, "second")
    shutil.rmtree(party.store_path)
    shutil.copytree(tmp_path / "copy", party.store_path)
    assert [entry.run for entry in rounds_of(party).entries()] == ["first"]
    return party, office


def test_a_party_whose_store_went_back_refuses_by_itself(went_back, asked):
    party, office = went_back
    with pytest.raises(PeerFailedError, match="restored from an earlier copy"):
        office.meets(party, asked, "third")
    assert [entry.run for entry in rounds_of(party).entries()] == ["first"], "nothing was taken"


def test_a_server_refuses_what_a_store_that_went_back_sends(went_back, asked):
    party, office = went_back
    office.known = lambda client: 0  # and the party is told nothing
    with pytest.raises(RolledBackError):
        office.meets(party, asked, "third")


def test_who_says_that_it_was_put_back_goes_on_with_new_names(went_back, asked, tmp_path):
    party, office = went_back
    sessions(tmp_path / "party.toml", restored=True)
    office.meets(party, asked, "third")
    assert "rounds of this training are used up" in refusal(party, asked, run="first")
