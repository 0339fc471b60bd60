"""A whole federated session over real streams; only Flower's part is played by a stand-in."""

import pandas as pd
import pytest
from played_session import PARTY, PlayedSession, stand_in
from stand_in_flower import Flower

from vfl.config.run_folder import PROGRESS, RunFolder
from vfl.core.errors import PeerFailedError
from vfl.core.storage import read_json
from vfl.session.trace import read, store

PARTIES = ("bank", "shop")
TRACE = '[trace]\nphases = ["train", "validation", "test"]\nsnapshots = 1\n'


EXPERIMENT = {
    "codec": "topk:k=2",
    "parties": {name: {"width": 4} for name in PARTIES},
    "label": {"party": "lender", "top": "linear"},
    "train": {"epochs": 2, "batch_size": 20, "checkpoint_every": 3},
}


class Session(PlayedSession):
    """Two parties and a lender; who records is in each party's own file."""

    def __init__(self, folder):
        super().__init__(folder, Flower(PARTIES), EXPERIMENT)
        self.write_tables(PARTIES)

    def write(self, name, more):
        super().write(name, PARTY.format(name=name, more=more))

    def record(self, *names):
        for name in names:
            self.write(name, ('label = "paid"\n' if name == "lender" else "") + TRACE)


@pytest.fixture
def session(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return Session(tmp_path)


def trace_of(folder, party):
    return folder / party / "store" / "runs" / "run" / "parties" / party / "trace"


def crossed(folder, owner, **chosen):
    frames = read(trace_of(folder, owner)).frames(**chosen)
    return [(one.party, one.step, one.kind, one.payload, one.rows.tolist()) for one in frames]


def test_each_party_records_its_own_end(session, tmp_path, capsys):
    session.record("bank", "shop", "lender")
    session.play()
    for name in PARTIES:
        own = crossed(tmp_path, name)
        assert {frame[0] for frame in own} == {name}
        assert own == crossed(tmp_path, "lender", party=name)
        assert len(own) == 2 * (2 * 5 + 1) + 1
    assert sorted(line[:20] for line in session.flower.said) == [
        "the trace of bank ta",
        "the trace of shop ta",
    ]
    assert "the trace of lender takes up to" in capsys.readouterr().out
    assert [one.epoch for one in read(trace_of(tmp_path, "shop")).snapshots()] == [0, 1, 2]


def test_a_party_records_without_telling_anybody(session, tmp_path):
    session.record("bank")
    session.play()
    assert len(crossed(tmp_path, "bank")) == 2 * (2 * 5 + 1) + 1
    for name in ("shop", "lender"):
        assert not trace_of(tmp_path, name).exists()
    lenders = [path for path in (tmp_path / "lender" / "store").rglob("*") if path.is_file()]
    assert all(b'"phases"' not in path.read_bytes() for path in lenders)


def test_each_owner_alone_is_shown_which_of_its_columns_are_left_out(session, tmp_path, capsys):
    session.write("shop", 'columns = ["a", "b"]')
    for name, column in (("shop", "plan"), ("lender", "note")):
        path = tmp_path / name / "data.csv"
        table = pd.read_csv(path).assign(**{column: [f"text {row}" for row in range(120)]})
        table.to_csv(path, index=False)
    session.play()
    why = "(120 different texts are too many categories)"
    assert session.flower.said == [f"shop leaves out 'plan' {why}"]
    assert capsys.readouterr().out.count(f"lender leaves out 'note' {why}") == 1
    assert (session.run / "notes.txt").read_text().count("leaves out") == 1
    assert "plan" not in (session.run / "notes.txt").read_text()


def test_a_party_without_room_for_its_trace_says_only_that_it_failed(session, monkeypatch):
    session.record("shop")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: type("Disk", (), {"free": 10}))
    with pytest.raises(PeerFailedError, match="its own log says why") as caught:
        session.play()
    assert "trace" not in str(caught.value)
    assert "the disk has too little free space for the trace" in [
        error.what for error in session.flower.failures
    ]


def test_who_is_waited_for_and_how_far_it_is_stands_in_the_folder(session, monkeypatch):
    told, everybody, asked = [], session.flower.get_nodes, []
    monkeypatch.setattr("vfl.session.progress._EVERY_S", 0.0)
    keep = RunFolder.progress

    def note(folder, record):
        keep(folder, record)
        told.append(read_json(folder.path / PROGRESS))

    def late():
        asked.append(1)
        return everybody()[: 1 if len(asked) < 3 else 2]

    monkeypatch.setattr(RunFolder, "progress", note)
    monkeypatch.setattr(session.flower, "get_nodes", late)
    session.play()
    assert told[0]["waits_for"] == ["shop"]
    assert told[0]["mode"] == "train"
    counted = [(one["done"], one["epoch"]) for one in told if not one["waits_for"]]
    total = 2 * (5 + 1) + 1  # batches and validation of two epochs, and the test
    assert counted == [(n, 1 if n < 6 else 2) for n in range(total)] + [(total, 2)]
    assert told[-1]["left_s"] == 0
