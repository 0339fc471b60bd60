"""A training that goes on from an earlier run: its weights and encoders, at each party alone."""

import numpy as np
import pandas as pd
import pytest
import torch
from played_session import PARTY, PlayedSession, run_session, stand_in
from pydantic import ValidationError
from stand_in_flower import Flower

from vfl.config import Experiment, read_party_file
from vfl.config.run_folder import RunFolder
from vfl.core.errors import DisagreementError, PeerFailedError, RunFolderError
from vfl.session import PartyFolder, Terms
from vfl.session.store.party_folder import own_data, own_terms
from vfl.training import run

PARTIES = ("bank", "shop")
CONTENT = {
    "name": "scored",
    "parties": {name: {"width": 4} for name in PARTIES},
    "label": {"party": "lender", "top": "mlp:hidden=8"},
    "train": {"epochs": 2, "batch_size": 20},
    "federation": {"step_timeout_s": 60.0, "rejoin_window_s": 1.0, "join_timeout_s": 180.0},
}
#: A step that moves no float32 weight: what is left of the earlier run is seen in the later one.
STILL = {"epochs": 1, "batch_size": 20, "optimizer": "sgd", "learning_rate": 1e-30}


class Session(PlayedSession):
    """Its parties' files have what all of them share."""

    def write(self, name, text):
        super().write(name, PARTY.format(name=name, more=text))


@pytest.fixture
def played(tmp_path, monkeypatch):
    """A session of three folders whose training "run" has ended, and then a later month."""
    stand_in(monkeypatch)
    session = Session(tmp_path, Flower(PARTIES), CONTENT)
    session.write_tables(PARTIES)
    session.play("train")
    for name in (*PARTIES, "lender"):
        path = tmp_path / name / "data.csv"
        table = pd.read_csv(path)
        later = table.assign(id=[f"s{row:03}" for row in range(len(table))])
        if name != "lender":
            later["a"] = 100 + 5 * later["a"]
        pd.concat([table.iloc[60:], later]).to_csv(path, index=False)
    return session


def part(session, name, of):
    return PartyFolder(session.folder / name / "store" / "runs" / of / "parties" / name)


def differences(session, of, other="run"):
    """How far each party's weights of two runs are apart, at most."""
    found = {}
    for name in (*PARTIES, "lender"):
        now, then = part(session, name, of).weights(), part(session, name, other).weights()
        assert now.keys() == then.keys()
        found[name] = max(float((now[key] - then[key]).abs().max()) for key in now)
    return found


def test_each_party_goes_on_from_its_own_weights_and_encodes_as_before(played):
    played.play("train", run="warm", train=STILL | {"warm_start": "run"})
    played.play("train", run="fresh", train=STILL)
    assert differences(played, "warm") == dict.fromkeys((*PARTIES, "lender"), 0.0)
    assert all(distance > 0.01 for distance in differences(played, "fresh").values())
    earlier = part(played, "bank", "run").encoder().to_json()
    assert part(played, "bank", "warm").encoder().to_json() == earlier
    assert part(played, "bank", "fresh").encoder().to_json() != earlier
    assert part(played, "bank", "warm").card()["terms"]["train"]["warm_start"] == "run"
    played.play("train", run="on", train=CONTENT["train"] | {"warm_start": "run"})
    assert all(distance > 1e-4 for distance in differences(played, "on").values())


def test_the_rows_of_a_warm_start_are_scaled_by_the_earlier_means(played):
    party = read_party_file(played.folder / "bank" / "party.toml")
    changed = {"train": STILL | {"warm_start": "run"}}
    terms = Terms.of(Experiment.model_validate(CONTENT | changed), "train", "warm")
    table = pd.read_csv(played.folder / "bank" / "data.csv").sort_values("id")
    before = pd.concat([table.iloc[:0], table])
    data = own_data(party, terms)
    column = data.encoder.columns[0]
    expected = (before["a"].to_numpy() - column.mean) / column.scale
    assert np.allclose(data.inputs[:, 0].numpy(), expected, atol=1e-4)
    assert data.inputs[-1, 0] > 10  # so far are the later rows from the earlier means


def test_an_owner_allows_the_runs_that_its_weights_may_go_on_from(played):
    played.write("shop", '[consent]\nwarm_starts = ["january*"]')
    refusal = played.refusal(run="warm", train=STILL | {"warm_start": "run"})
    assert (refusal.got, refusal.want) == ("warm_start run", "warm_start in january*")
    with pytest.raises(RunFolderError):
        part(played, "bank", "warm").weights()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"parties": {name: {"width": 5} for name in PARTIES}}, "a different network"),
        ({"codec": "topk:k=2"}, "a different network"),
        ({"label": {"party": "lender", "top": "mlp:hidden=9"}}, "different label or top"),
    ],
)
def test_another_network_does_not_go_on(played, changes, what):
    with pytest.raises((DisagreementError, PeerFailedError), match=what):
        played.play("train", run="warm", train=STILL | {"warm_start": "run"}, **changes)


def test_a_run_that_a_party_lacks_is_named(played):
    with pytest.raises(RunFolderError, match="'lender' has no part of the run"):
        played.play("train", run="warm", train=STILL | {"warm_start": "nothing"})


@pytest.mark.parametrize(
    "changes",
    [
        {"dp": {"noise": 1.0}, "data": {"validation": 0.0}},
        {"secure": "beaver", "parties": {name: {"width": 4} for name in PARTIES}},
    ],
    ids=["dp", "beaver"],
)
def test_what_no_party_can_go_on_with_alone_is_refused_when_it_is_read(changes):
    with pytest.raises(ValidationError, match="warm_start"):
        Experiment.model_validate(CONTENT | {"train": STILL | {"warm_start": "run"}} | changes)


def test_two_runs_are_evaluated_on_rows_that_neither_has_learned_from(played):
    played.play("train", run="warm", train=STILL | {"warm_start": "run"})
    lender, figures = played.flower.files["lender"], {}
    for name, other, train in (("run", "warm", {}), ("warm", "run", STILL | {"warm_start": "run"})):
        experiment = played.experiment(**({"train": train} if train else {}))
        terms = own_terms(experiment, "evaluate", name, lender)
        terms = Terms.model_validate({**terms.model_dump(), "beside": (other,)})
        run_session(played.flower, experiment, lender, terms)
        runs = lender.run_path(name)
        figures[name] = RunFolder.open(runs).evaluation()
    now = sorted(pd.read_csv(played.folder / "lender" / "data.csv")["id"])
    first = [f"r{row:03}" for row in range(120)]
    learned = set()
    for ids, of in ((first, "run"), (now, "warm")):
        split = Terms.of(played.experiment(), "train", of).split_of(len(ids))
        learned |= {ids[at] for at in (*split.train, *split.validation)}
    assert figures["run"]["common_rows"] == len(set(now) - learned) > 0
    assert figures["run"]["test_loss"] == figures["warm"]["test_loss"]  # the same weights
    assert figures["run"]["beside"] == figures["warm"]["beside"] == ["run", "warm"]
    with pytest.raises(ValidationError, match="only an evaluation"):
        Terms.model_validate({**terms.model_dump(), "mode": "predict"})


def test_one_process_goes_on_from_a_run_beside(tmp_path):
    content = {key: value for key, value in CONTENT.items() if key != "federation"}
    content |= {"data": {"source": "breast_cancer"}, "train": CONTENT["train"]}
    run.train(Experiment.model_validate(content), tmp_path, "run")
    still = Experiment.model_validate(content | {"train": STILL | {"warm_start": "run"}})
    run.train(still, tmp_path, "warm")
    for name in ("bank", "shop", "lender"):
        now, then = (
            PartyFolder(tmp_path / of / "parties" / name).weights() for of in ("warm", "run")
        )
        assert all(torch.equal(now[key], then[key]) for key in then)
    figures = [RunFolder.open(tmp_path / of).summary()["test_loss"] for of in ("warm", "run")]
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)
