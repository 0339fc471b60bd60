"""A whole session in several ranks: the further ones are processes; a stand-in plays Flower."""

import os
import random
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress

import numpy as np
import pandas as pd
import pytest
import torch
from played_session import Noting, PlayedSession, stand_in
from stand_in_flower import Flower

from vfl.core.errors import ConfigError, ConsentError, LostRankError, PeerFailedError
from vfl.core.frame import Kind
from vfl.core.processes import Process
from vfl.core.storage import Seal, load_weights, read_json
from vfl.session.ranks.processes import RankProcesses
from vfl.session.store.session_ledger import SessionLedger

PARTY = """\
party = "{name}"
[data]
source = "data.csv"
id = "id"
{more}
[node]
ranks = {ranks}
"""
ROWS = 240
PARTIES = ("bank", "lender")


@pytest.fixture
def session(tmp_path, monkeypatch, quick_processes):
    stand_in(monkeypatch)
    draw = np.random.default_rng(0)
    ids = [f"r{row:03}" for row in range(ROWS)]
    for name in PARTIES:
        (tmp_path / name).mkdir()
        columns = {"a": draw.normal(size=ROWS), "b": draw.normal(size=ROWS)}
        if name == "lender":
            columns = {"paid": np.arange(ROWS) % 2}
        pd.DataFrame({"id": ids, **columns}).to_csv(tmp_path / name / "data.csv", index=False)
    content = {
        "data": {"validation": 0.1},
        "parties": {"bank": {"width": 4, "bottom": "mlp:hidden=8"}},
        "label": {"party": "lender", "top": "linear"},
        "train": {"epochs": 3, "batch_size": 31, "checkpoint_every": 5, "optimizer": "sgd"},
        # Ranks are processes, whose start takes long on a busy machine.
        "federation": {"rejoin_window_s": 2.0, "join_timeout_s": 600.0},
    }
    played = PlayedSession(tmp_path, Flower(["bank"], tells=True), content)
    forget(played)
    in_ranks(played, 1, 1)
    return played


def in_ranks(session, lender, bank, more=""):
    """How many ranks each party runs."""
    for name, ranks, own in (("bank", bank, ""), ("lender", lender, 'label = "paid"')):
        session.write(name, PARTY.format(name=name, more=own, ranks=ranks) + more)


@pytest.fixture
def no_process(monkeypatch):
    """Further ranks that never begin, where a session is refused before it needs them."""
    monkeypatch.setattr(RankProcesses, "start", lambda ranks, rank, order: None)
    monkeypatch.setattr(RankProcesses, "receive", lambda ranks, rank: {"port": 7})


@pytest.fixture
def machines(session, tmp_path, monkeypatch):
    """Start a party's rank 1 as on a machine of its own: another folder, the table and the key."""
    monkeypatch.setattr("vfl.session.ranks.machines._ARRIVAL_S", 600.0)  # on a busy machine
    started, addresses, key = [], {}, os.urandom(32).hex()

    def keep_key(folder):
        (folder / "ranks.key").write_text(key)
        (folder / "ranks.key").chmod(0o600)

    for name in PARTIES:
        addresses[name] = f"127.0.0.1:{quiet_port()}"
        keep_key(tmp_path / name)

    def start(name, number=0):
        folder = tmp_path / f"{name}-elsewhere-{number}"
        folder.mkdir()
        keep_key(folder)
        shutil.copy(tmp_path / name / "data.csv", folder)
        (folder / "party.toml").write_text(session.flower.files[name].path.read_text())
        command = [sys.executable, "-m", "vfl", "up", folder / "party.toml", "--rank", "1"]
        with (folder / "said").open("w") as output:
            started.append(Process("rank 1", command, os.environ, stderr=output))
        return started[-1], folder / "said"

    for name, own in (("bank", ""), ("lender", 'label = "paid"')):
        at = f'ranks_at = "{addresses[name]}"\n'
        session.write(name, PARTY.format(name=name, more=own, ranks=2) + at)
    yield start
    for process in started:
        process.stop()


def quiet_port():
    """A free port that the system gives to no caller in the meantime, as it does with high ones."""
    for port in random.Random().sample(range(20_000, 30_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("one of a hundred ports is free")


def wait_for(said, text):
    deadline = time.monotonic() + 600
    while text not in said.read_text():
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.05)


def forget(session):
    """Empty stores; what the first weights follow from stays."""
    for name in PARTIES:
        store = session.folder / name / "store"
        shutil.rmtree(store, ignore_errors=True)
        store.mkdir()
        (store / "secret-for-trials").write_bytes(name.encode().ljust(32))


def weights(session, name):
    folder = session.folder / name / "store" / "runs" / "run" / "parties" / name
    return load_weights(folder / "weights.safetensors", Seal("weights", name, "run"))


def of_one_rank(session, **changes):
    """What one rank at each party leaves; the stores are empty again."""
    session.play(**changes)
    found = {name: weights(session, name) for name in PARTIES}
    summary, spent = read_json(session.run / "summary.json"), spent_by(session, "bank")
    forget(session)
    return found, summary, spent


def spent_by(session, name):
    (entry,) = SessionLedger(session.folder / name / "store" / "sessions", name).entries()
    return entry.spent["train"]


def same_as(session, wanted):
    for name, one in wanted.items():
        found = weights(session, name)
        assert found.keys() == one.keys()
        for key, value in one.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5)


#: Numbers to learn, the label party's own columns, and a norm over the rows of all ranks.
REGRESSION = {
    "parties": {name: {"width": 4, "bottom": "mlp:hidden=8,batch_norm=true"} for name in PARTIES},
    "label": {"party": "lender", "top": "linear", "task": "regression"},
}


def test_two_ranks_leave_the_weights_and_accounts_of_one(session):
    path, draw = session.folder / "lender" / "data.csv", np.random.default_rng(1)
    table = pd.read_csv(path)
    table["c"], table["paid"] = draw.normal(size=ROWS), 100 + 20 * draw.normal(size=ROWS)
    table.to_csv(path, index=False)
    wanted, one, spent = of_one_rank(session, **REGRESSION)
    in_ranks(session, 2, 2)
    session.play(**REGRESSION)
    same_as(session, wanted)
    two = read_json(session.run / "summary.json")
    for figure in ("test_loss", "test_rmse"):
        assert two[figure] == pytest.approx(one[figure], rel=1e-5)
    now = spent_by(session, "bank")
    assert (now.rows, now.passes) == (spent.rows, spent.passes)
    for way in ("bytes_up", "bytes_down"):  # every share has a header of its own
        assert 0 < two[way]["bank"] - one[way]["bank"] < 0.2 * one[way]["bank"]
        assert 0 < getattr(now, way) - getattr(spent, way) < 0.2 * getattr(spent, way)
    checkpoints = session.folder / "bank" / "store" / "runs" / "run" / "parties" / "bank"
    assert len(list(checkpoints.glob("checkpoints/*.checkpoint"))) == 3


#: Whose rank is killed; the way is the same at both, so one of them is quick.
VICTIMS = ["bank", pytest.param("lender", marks=pytest.mark.slow)]


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_rank_is_named_and_the_training_goes_on_from_its_checkpoint(
    session, victim, monkeypatch
):
    """With one rank at each party where bank lost one, with two where lender did."""
    wanted, one, _ = of_one_rank(session)
    in_ranks(session, 2, 2)
    killed, start, count = [], RankProcesses.start, Noting.__call__

    def starting(ranks, rank, order):
        start(ranks, rank, order)
        if ranks.party == victim:
            killed.append(ranks._processes[rank].pid)

    def counting(ledger, party, direction, frame):
        count(ledger, party, direction, frame)
        if frame.kind is Kind.CUT and frame.step == 12 and killed:
            os.kill(killed.pop(), signal.SIGKILL)

    monkeypatch.setattr(RankProcesses, "start", starting)
    monkeypatch.setattr(Noting, "__call__", counting)
    told = f"rank 1 of party '{victim}' was lost"
    with pytest.raises(LostRankError if victim == "lender" else PeerFailedError) as caught:
        session.play()
    assert told in str(caught.value)
    assert "signal 9" in str(caught.value)
    (failure,) = session.flower.failures
    assert told in str(failure)
    monkeypatch.undo()
    stand_in(monkeypatch)
    if victim == "bank":
        in_ranks(session, 1, 1)
    session.play(resume=True)
    same_as(session, wanted)
    summary = read_json(session.run / "summary.json")
    for way in ("bytes_up", "bytes_down"):  # those of both ranks before the checkpoint, too
        assert 0 < summary[way]["bank"] - one[way]["bank"] < 0.2 * one[way]["bank"]


def test_a_party_runs_no_more_ranks_than_it_says(session, no_process):
    in_ranks(session, 2, 1)
    with pytest.raises(PeerFailedError, match="runs fewer ranks than the session needs") as caught:
        session.play()
    assert "2 ranks" in str(caught.value)
    assert isinstance(session.flower.failures[0], ConsentError)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"codec": "randtopk:k=2"}, "codec"),
        ({"defense": "gradient_noise"}, "defense"),
        ({"train": {"in_flight": 2, "batch_size": 31}}, "train.in_flight"),
        ({"train": {"batch_size": 1}}, "train.batch_size"),
        ({"dp": {"noise": 1.0, "delta": 1e-5}}, "dp"),
    ],
)
def test_what_ranks_cannot_do_as_one_is_refused_by_name(session, changes, where):
    in_ranks(session, 2, 2)
    with pytest.raises(ConfigError, match="2 ranks would not train like one rank") as caught:
        session.play(**changes)
    assert caught.value.where == where
    assert not session.flower.threads


def test_a_feature_party_refuses_them_itself(session, monkeypatch, no_process):
    monkeypatch.setattr("vfl.server.session.refuse_ranks", lambda terms, split, size: None)
    in_ranks(session, 2, 2)
    with pytest.raises(PeerFailedError, match="2 ranks would not train like one rank"):
        session.play(codec="randtopk:k=2")
    assert isinstance(session.flower.failures[0], ConsentError)


def test_no_rank_records_a_part_of_a_trace(session):
    in_ranks(session, 2, 2, '[trace]\nphases = ["train"]\n')
    with pytest.raises(ConfigError, match="frames of one rank only"):
        session.play()


def test_ranks_on_two_machines_leave_the_weights_of_one(session, request):
    """Once both have the same table: a machine with another one is refused before."""
    wanted, one, _ = of_one_rank(session)
    start = request.getfixturevalue("machines")
    said = [start(name)[1] for name in PARTIES]
    path = session.folder / "bank" / "data.csv"
    whole = path.read_text()
    table = pd.read_csv(path)
    table.assign(a=table["a"].to_numpy()[::-1]).to_csv(path, index=False)
    with pytest.raises(PeerFailedError, match="has different rows or values from rank 0"):
        session.play()
    path.write_text(whole)
    forget(session)
    session.play()
    same_as(session, wanted)
    two = read_json(session.run / "summary.json")
    for figure in ("test_loss", "test_accuracy"):
        assert two[figure] == pytest.approx(one[figure], abs=1e-5)
    for each in said:
        wait_for(each, "rank 1 is done")


@pytest.mark.slow  # a killed rank takes the same way; streams that end are in test_machines
@pytest.mark.parametrize("victim", PARTIES)
def test_a_lost_machine_is_named_and_the_training_goes_on_with_another(
    session, victim, monkeypatch, request
):
    wanted, _, _ = of_one_rank(session)
    start = request.getfixturevalue("machines")
    processes = {name: start(name) for name in PARTIES}
    count, killed = Noting.__call__, []

    def counting(ledger, party, direction, frame):
        count(ledger, party, direction, frame)
        if frame.kind is Kind.CUT and frame.step == 12 and not killed:
            killed.append(victim)
            processes[victim][0].kill()

    monkeypatch.setattr(Noting, "__call__", counting)
    # The other party's rank 1 misses the victim long before the victim's rank 0 gives its own up.
    at_once = {"rejoin_window_s": 0.1, "join_timeout_s": 600.0}
    with pytest.raises(LostRankError if victim == "lender" else PeerFailedError) as caught:
        session.play(federation=at_once)
    assert f"rank 1 of party '{victim}' was lost" in str(caught.value)
    (other,) = set(PARTIES) - {victim}
    wait_for(processes[other][1], "error[V4")
    start(victim, 1)
    session.play(resume=True)
    same_as(session, wanted)


def test_a_machine_that_does_not_come_is_named(session, request, monkeypatch):
    request.getfixturevalue("machines")
    monkeypatch.setattr("vfl.server.session._RANKS_S", 0.5)
    settings = {"rejoin_window_s": 0.3, "step_timeout_s": 0.3, "join_timeout_s": 1.0}
    with pytest.raises(LostRankError, match="rank 1 of party 'lender' was lost") as caught:
        session.play(federation=settings)
    assert "--rank 1" in caught.value.fix
