"""A whole federated session over real streams; only Flower's part is played by a stand-in."""

import warnings

import numpy as np
import pandas as pd
import pytest
from stand_in_flower import Envelope, Flower

from vfl.config import Experiment, read_party_file
from vfl.config.run_folder import PROGRESS, RunFolder
from vfl.core.errors import PeerFailedError
from vfl.core.storage import read_json
from vfl.session import Terms
from vfl.session.trace import read, store

with warnings.catch_warnings():  # importing Flower uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from vfl.server.session import run_session

PARTIES = ("bank", "shop")
PARTY = """\
party = "{name}"
[data]
source = "data.csv"
id = "id"
{more}
"""
TRACE = '[trace]\nphases = ["train", "validation", "test"]\nsnapshots = 1\n'


@pytest.fixture
def flower():
    return Flower(PARTIES)


@pytest.fixture
def federation(tmp_path, monkeypatch, flower):
    """Plays one training; who records is in each party's own file."""
    monkeypatch.setattr("vfl.server.session._COLLECT_S", 0.0)
    monkeypatch.setattr("vfl.server.federation.Message", Envelope)
    draw = np.random.default_rng(0)
    ids = [f"r{row:03}" for row in range(120)]

    def play(tracing):
        for name in (*PARTIES, "lender"):
            folder = tmp_path / name
            folder.mkdir()
            columns = {"a": draw.normal(size=120), "b": draw.normal(size=120)}
            if name == "lender":
                columns = {"paid": np.arange(120) % 2}
            pd.DataFrame({"id": ids, **columns}).to_csv(folder / "data.csv", index=False)
            more = 'label = "paid"\n' if name == "lender" else ""
            more += TRACE if name in tracing else ""
            (folder / "party.toml").write_text(PARTY.format(name=name, more=more))
            flower.files[name] = read_party_file(folder / "party.toml")
        experiment = Experiment.model_validate(
            {
                "codec": "topk:k=2",
                "parties": {name: {"width": 4} for name in PARTIES},
                "label": {"party": "lender", "top": "linear"},
                "train": {"epochs": 2, "batch_size": 20, "checkpoint_every": 3},
            }
        )
        terms = Terms.of(experiment, "train", "run")
        try:
            run_session(flower, experiment, flower.files["lender"], terms)
        finally:
            for thread in flower.threads:
                thread.join(timeout=20)

    return play


def trace_of(folder, party):
    return folder / party / "store" / "runs" / "run" / "parties" / party / "trace"


def crossed(folder, owner, **chosen):
    frames = read(trace_of(folder, owner)).frames(**chosen)
    return [(one.party, one.step, one.kind, one.payload, one.rows.tolist()) for one in frames]


def test_each_party_records_its_own_end(federation, flower, tmp_path, capsys):
    federation(tracing=("bank", "shop", "lender"))
    for name in PARTIES:
        own = crossed(tmp_path, name)
        assert {frame[0] for frame in own} == {name}
        assert own == crossed(tmp_path, "lender", party=name)
        assert len(own) == 2 * (2 * 5 + 1) + 1
    assert sorted(line[:20] for line in flower.said) == [
        "the trace of bank ta",
        "the trace of shop ta",
    ]
    assert "the trace of lender takes up to" in capsys.readouterr().out
    assert [one.epoch for one in read(trace_of(tmp_path, "shop")).snapshots()] == [0, 1, 2]


def test_a_party_records_without_telling_anybody(federation, tmp_path):
    federation(tracing=("bank",))
    assert len(crossed(tmp_path, "bank")) == 2 * (2 * 5 + 1) + 1
    for name in ("shop", "lender"):
        assert not trace_of(tmp_path, name).exists()
    lenders = [path for path in (tmp_path / "lender" / "store").rglob("*") if path.is_file()]
    assert all(b'"phases"' not in path.read_bytes() for path in lenders)


def test_a_party_without_room_for_its_trace_says_only_that_it_failed(
    federation, flower, monkeypatch
):
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: type("Disk", (), {"free": 10}))
    with pytest.raises(PeerFailedError, match="its own log says why") as caught:
        federation(tracing=("shop",))
    assert "trace" not in str(caught.value)
    assert "the disk has no room for the trace" in [error.what for error in flower.failures]


def test_who_is_waited_for_and_how_far_it_is_stands_in_the_folder(
    federation, flower, tmp_path, monkeypatch
):
    told, everybody, asked = [], flower.get_nodes, []
    monkeypatch.setattr("vfl.session.progress._EVERY_S", 0.0)
    keep = RunFolder.progress

    def note(folder, record):
        keep(folder, record)
        told.append(read_json(folder.path / PROGRESS))

    def late():
        asked.append(1)
        return everybody()[: 1 if len(asked) < 3 else 2]

    monkeypatch.setattr(RunFolder, "progress", note)
    monkeypatch.setattr(flower, "get_nodes", late)
    federation(tracing=())
    assert told[0]["waits_for"] == ["shop"]
    assert told[0]["mode"] == "train"
    counted = [(one["done"], one["epoch"]) for one in told if not one["waits_for"]]
    total = 2 * (5 + 1) + 1  # batches and validation of two epochs, and the test
    assert counted == [(n, 1 if n < 6 else 2) for n in range(total)] + [(total, 2)]
    assert told[-1]["left_s"] == 0
