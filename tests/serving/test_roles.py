"""Runs with a party in the middle, or with several label parties, answer rows as predicted."""

import json
import socket
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from played_session import Noting, run_session, stand_in
from served import Serving, client_of, consent, passes_of, predicted, same, settings, start
from taken_session import FEATURES, IDS, ROWS, with_insurer, with_middle

from vfl.clients.serving import ServedMiddle, ServedParty
from vfl.config.run_folder import RunFolder
from vfl.core.errors import ProtocolError, StorageError, UserError, VFLError
from vfl.core.frame import Frame, Kind
from vfl.serving.front import settings_file
from vfl.serving.local import serve
from vfl.session.relay import Askers, Switchboard
from vfl.session.store.party_folder import own_ledger, own_terms
from vfl.training import run
from vfl.training.promotion import promote


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory):
    """Sessions of each kind after a training and a prediction, which every test copies."""
    made = {}

    def ask(kind):
        if kind not in made:
            with pytest.MonkeyPatch.context() as patched:
                stand_in(patched)
                made[kind] = trained(kind(tmp_path_factory.mktemp(kind.__name__)))
        return made[kind]

    return ask


def trained(session):
    if session.third == "compute":
        consent(session, "compute", "[consent]")
    for name in FEATURES if session.third == "insurer" else (*FEATURES, "compute"):
        consent(session, name, 'modes = ["train", "predict", "serve"]')
    session.play("train")
    session.play("predict")
    return session


@pytest.fixture(params=[with_middle, with_insurer], ids=["middle", "tasks"])
def session(request, tmp_path, monkeypatch, trained_once):
    """A trained run over streams, and what `vfl predict` says of its rows."""
    stand_in(monkeypatch)
    return trained_once(request.param).copied_to(tmp_path)


@pytest.fixture
def middle(tmp_path, monkeypatch, trained_once):
    stand_in(monkeypatch)
    return trained_once(with_middle).copied_to(tmp_path)


def numbers(folder):
    """What `vfl predict` wrote of a regression, by id."""
    table = pd.read_csv(folder / "predictions.csv", dtype={"id": str})
    return dict(zip(table["id"], table["prediction"], strict=True))


def right(run, told, ids):
    """Whether the answers are what `vfl predict` wrote, bit for bit."""
    pairs = list(zip(told["predictions"], ids, strict=True))
    if "probabilities" not in told["predictions"][0]:
        expected = numbers(run)
        return all(answer["prediction"] == expected[each] for answer, each in pairs)
    expected = predicted(run)
    return all(same(answer, expected[each]) for answer, each in pairs)


def test_streams_answer_as_predicted(session):
    with start(session) as client:
        for batch in ([IDS[5]], [IDS[89], IDS[0]], IDS):
            status, told = client.predict(*batch)
            assert status == 200
            assert right(session.run, told, batch)
        figures = client.ask("/metrics")[1]
    assert session.flower.failures == []
    asked = FEATURES if session.third == "insurer" else (*FEATURES, "compute")
    for name in asked:
        assert f'vfl_party_up{{party="{name}"}} 1' in figures
        (entry,) = own_ledger(session.flower.files[name]).entries()
        spent = entry.spent["serve"]
        assert (spent.sessions, spent.rows, spent.passes) == (1, ROWS + 3, 2)
    if session.third == "insurer":  # it takes no cut meanwhile, and is not asked
        (entry,) = own_ledger(session.flower.files["insurer"]).entries()
        assert "serve" not in entry.spent
        return
    # Cuts are sealed for the middle, and the label party gets its output alone.
    seen = {(party, way, kind) for party, way, kind, *_ in Noting.seen}
    assert ("compute", "up", Kind.QUERY) in seen
    sealed = [payload for party, _, kind, _, payload in Noting.seen if kind is Kind.QUERY]
    sizes = {len(payload) for payload in sealed}
    assert {4 * 4 + 16, 6 * 4} <= sizes  # one row of a cut with its seal, and of the output


def test_one_process_answers_as_predicted(session, tmp_path):
    run.train(session.joined(), tmp_path / "runs", "one")
    path = tmp_path / "runs" / "one"
    run.predict(RunFolder.open(path))
    with Serving(path, lambda: serve(path, settings())) as client:
        ids = list(numbers(path))[:7]
        status, told = client.predict(*ids)
        assert status == 200
        assert right(path, told, ids)


@pytest.fixture
def insurer(tmp_path, monkeypatch, trained_once):
    """A run of two label parties, both of which consent to serve, trained and predicted."""
    stand_in(monkeypatch)
    session = trained_once(with_insurer).copied_to(tmp_path)
    path = session.folder / "insurer" / "party.toml"
    port = "[serve]\nport = 0\ntimeout_s = 3.0\nprobability_decimals = 'off'\n"
    session.write(
        "insurer", path.read_text() + f'{port}[consent]\nmodes = ["train", "predict", "serve"]\n'
    )
    return session


def start_both(session, **changes):
    """Both label parties' services: the first one's session, and a client of the second."""
    settings_file(session.run, settings(timeout_s=3.0, tasks=("insurer",)))
    serving = Serving(session.run, lambda: session.play("serve", **changes))
    return serving, client_of(own_part(session))


def own_part(session):
    return session.folder / "insurer/store/runs/run/parties/insurer"


def test_every_label_party_answers_its_own_clients(insurer, capfd):
    """At the same time, each its own task, bit for bit; a row counts for whoever asks."""
    serving, second = start_both(insurer)
    try:
        serving.client.wait_ready()
        second.wait_ready()
        seen = []

        def ask(client, run, first):
            for each in IDS[first:100:4]:
                seen.append((run, each, *client.predict(each, IDS[199])))

        both = [(serving.client, insurer.run), (second, own_part(insurer))]
        askers = [threading.Thread(target=ask, args=(*both[n % 2], n)) for n in range(4)]
        for thread in askers:
            thread.start()
        for thread in askers:
            thread.join()
        assert second.predict("nobody")[0] == 404
        assert serving.client.ask("/model", token=second.token)[0] == 401
        about, figures = (second.ask(page)[1] for page in ("/model", "/metrics"))
    finally:
        serving.stop()
    assert insurer.flower.failures == []
    assert len(seen) == 100
    for folder, each, status, told in seen:
        assert status == 200, told
        assert right(folder, told, [each, IDS[199]])
    assert json.loads(about)["parties"] == list(FEATURES)
    assert 'vfl_party_up{party="shop"} 1' in figures
    for name in FEATURES:
        rows, passes = passes_of(insurer, name)
        assert rows > 150
        assert 50 <= passes <= 100  # of the row that all asked for; two that came together ask once
    log = capfd.readouterr()
    assert IDS[199] not in log.out + log.err + figures


def test_what_one_label_party_asks_the_other_does_not_read(insurer, monkeypatch):
    carried, real = [], Switchboard.take

    def take(self, sender, frame):
        carried.append((frame.kind, bytes(frame.payload)))
        real(self, sender, frame)

    monkeypatch.setattr(Switchboard, "take", take)
    serving, second = start_both(insurer)
    try:
        second.wait_ready()
        assert second.predict(*IDS[:3])[0] == 200
    finally:
        serving.stop()
    positions = np.arange(3, dtype="<u4").tobytes()
    asked = [payload for kind, payload in carried if kind is Kind.ASK]
    assert len(positions) + 16 in {len(payload) for payload in asked}  # sealed
    assert not [payload for payload in asked if positions in payload]


@pytest.mark.parametrize(
    ("sender", "frame"),
    [
        ("insurer", Frame(Kind.ASK, 2)),  # a step of the label party that leads
        (None, Frame(Kind.ASK, 3)),
        ("insurer", Frame(Kind.DONE, 1)),  # a second one
        ("insurer", Frame(Kind.ASK, 3)),  # after it has said that it is done
    ],
)
def test_no_label_party_takes_a_step_of_another(sender, frame):
    """Or two requests would share a draw of noise, and their difference would show a cut."""
    came = [(None, Frame(Kind.ASK, 0)), ("insurer", Frame(Kind.ASK, 1))]
    came += [("insurer", Frame(Kind.DONE))] if frame.step % 2 else []
    came.append((sender, frame))
    sent = {None: [], "insurer": []}
    ends = {name: SimpleNamespace(send=sent[name].append) for name in sent}
    links = SimpleNamespace(direct=ends[None], others=ends, receive_any=lambda: came.pop(0))
    askers = Askers(links, ["insurer"])
    for answer in ("first", "second"):
        askers.receive()
        askers.send(answer)
    assert sent == {None: ["first"], "insurer": ["second"]}
    with pytest.raises(ProtocolError):
        askers.receive()


def test_a_party_that_does_not_answer_is_named_by_both(insurer, monkeypatch):
    dying, real = threading.Event(), ServedParty.answer

    def answer(self):
        if dying.is_set() and self._name == "shop":
            dying.clear()
            raise SystemExit
        return real(self)

    monkeypatch.setattr(ServedParty, "answer", answer)
    serving, second = start_both(insurer)
    try:
        second.wait_ready()
        dying.set()
        deadline, seen = time.monotonic() + 120, []
        while not (seen and seen[-1][0] == 200 and any(status == 503 for status, _ in seen)):
            assert time.monotonic() < deadline, seen
            try:
                seen.append(second.predict(IDS[7]))
            except OSError:  # its service begins anew with the session
                second = client_of(own_part(insurer))
        for status, told in seen:
            assert right(own_part(insurer), told, [IDS[7]]) if status == 200 else status == 503
        serving.client.wait_ready()
        assert serving.client.predict(IDS[7])[0] == 200
    finally:
        serving.stop()


def test_both_switch_to_another_run_together(insurer):
    """The same weights under another name; a run without the task leaves what was served."""
    for run_name, tasks in (("other", insurer.experiment().tasks), ("alone", None)):
        experiment = insurer.experiment()
        if tasks is None:
            experiment = experiment.model_copy(update={"tasks": None})
        lender = insurer.flower.files["lender"]
        for mode in ("train", "predict"):
            terms = own_terms(experiment, mode, run_name, lender)
            run_session(insurer.flower, experiment, lender, terms)
    other = insurer.run.parent / "other"
    serving, second = start_both(insurer)
    try:
        second.wait_ready()
        for run_name, served in (("alone", "run"), ("other", "other")):
            with nullcontext() if run_name == served else pytest.raises(UserError):
                promote(insurer.run.parent / run_name)
            deadline, told = time.monotonic() + 120, {}
            while told.get("version") != served or (insurer.run / "serving.next").exists():
                assert time.monotonic() < deadline, told
                told = serving.client.predict(IDS[3])[1]
                time.sleep(0.05)
            folder = insurer.folder / f"insurer/store/runs/{served}/parties/insurer"
            second = client_of(folder)
            second.wait_ready()
            assert right(folder, second.predict(IDS[3])[1], [IDS[3]])
            assert second.predict(IDS[3])[1]["version"] == served
        assert right(other, serving.client.predict(IDS[3])[1], [IDS[3]])
    finally:
        serving.stop()
    assert (
        "party 'insurer' has no task of its own in this run; going on with run"
        in (insurer.run / "notes.txt").read_text()
    )


def test_a_label_party_that_does_not_serve_refuses(insurer):
    path = insurer.folder / "insurer" / "party.toml"
    insurer.write("insurer", path.read_text().replace(', "serve"', ""))
    settings_file(insurer.run, settings(tasks=("insurer",)))
    with pytest.raises(VFLError, match="stopped with V403"):
        insurer.play("serve")
    settings_file(insurer.run, settings(tasks=("shop",)))
    with pytest.raises(VFLError, match="'shop' has no task of its own"):
        insurer.play("serve")


def test_one_process_answers_either_task(insurer, tmp_path):
    run.train(insurer.joined(), tmp_path / "runs", "one")
    path = tmp_path / "runs" / "one"
    run.predict(RunFolder.open(path))
    own = path / "parties" / "insurer"
    with Serving(own, lambda: serve(path, settings(tasks=("insurer",)))) as client:
        expected = pd.read_csv(path / "predictions-insurer.csv", dtype={"id": str})
        wanted = dict(zip(expected["id"], expected["prediction"], strict=True))
        ids = list(wanted)[:7]
        status, told = client.predict(*ids)
        assert status == 200
        assert [one["prediction"] for one in told["predictions"]] == [wanted[each] for each in ids]


@pytest.mark.parametrize(
    ("name", "limit", "status"),
    [
        ("shop", "max_queries = 1", 403),
        ("compute", "max_queries = 1", 403),
        ("bank", "max_rows_per_second = 1", 429),
    ],
)
def test_who_refuses_a_row_behind_or_in_the_middle_is_named(middle, name, limit, status):
    consent(middle, name, limit)
    with start(middle) as client:
        for _ in range(2 if status == 403 else 6):
            got, told = client.predict(*(IDS if status == 429 else IDS[:1]))
        assert (got, told["party"]) == (status, name)
        if status == 403:  # nobody else pays for it
            assert client.predict(IDS[3])[0] == 200


@pytest.mark.parametrize("dies", ["shop", "compute"])
def test_who_dies_is_named_until_it_is_back(middle, monkeypatch, dies):
    dying, kind = threading.Event(), ServedMiddle if dies == "compute" else ServedParty
    real = kind.answer

    def answer(self):
        if dying.is_set() and self._name == dies:
            dying.clear()
            raise SystemExit
        return real(self)

    monkeypatch.setattr(kind, "answer", answer)
    with start(middle) as client:
        dying.set()
        client.predict(IDS[0])
        seen, deadline = [], time.monotonic() + 120
        while not (seen and seen[-1][0] == 200 and any(one[0] == 503 for one in seen)):
            assert time.monotonic() < deadline, seen
            seen.append(client.predict(IDS[7]))
        for status, told in seen:
            if status == 200:
                assert right(middle.run, told, [IDS[7]])
            else:
                assert (status, told["party"]) == (503, dies)


def test_a_stream_cut_behind_or_before_the_middle_is_mended(middle, streams):
    streams.clear()
    waits = {"step_timeout_s": 30.0, "rejoin_window_s": 20.0, "join_timeout_s": 90.0}
    serving = start(middle, 30.0, federation=waits)
    client, seen = serving.client, []

    def ask(first):
        for each in IDS[first:120:4]:
            seen.append((each, *client.predict(each)))

    try:
        client.wait_ready()
        assert len(streams) == 3
        askers = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
        for thread in askers:
            thread.start()
        for count in range(6):
            link = streams[count % 3]
            while len(seen) < 15 * (count + 1) or link._stream is None:
                assert any(thread.is_alive() for thread in askers)
                time.sleep(0.01)
            socket.socket.shutdown(link._stream._socket, socket.SHUT_RDWR)
        for thread in askers:
            thread.join()
        assert "vfl_sessions_lost_total" not in client.ask("/metrics")[1]
    finally:
        serving.stop()
    assert sorted(each for each, *_ in seen) == IDS[:120]
    for each, status, told in seen:
        assert status == 200
        assert right(middle.run, told, [each])
    asked = {passes_of(middle, name) for name in (*FEATURES, "compute")}
    assert asked == {(120, 1)}  # nothing counted twice


@pytest.mark.parametrize("disk", ["compute"], indirect=True)
def test_whose_disk_is_full_is_named_through_the_middle(disk, middle, monkeypatch):
    monkeypatch.setattr("vfl.session.serving._BLOCK_PASSES", 1)  # every pass is written
    owner = disk.folder.parent.name
    serving = start(middle, 30.0)
    client = serving.client
    try:
        client.wait_ready()
        assert client.predict(IDS[0])[0] == 200
        disk.fill()
        seen = [client.predict(IDS[0]) for _ in range(3)]
        assert {(status, told["party"]) for status, told in seen} == {(503, owner)}
        before = passes_of(middle, owner)[1]
        disk.free()
        client.wait_ready()
        for each in (IDS[0], IDS[7]):
            status, told = client.predict(each)
            assert status == 200
            assert right(middle.run, told, [each])
        assert passes_of(middle, owner)[1] > before >= 1
    finally:
        disk.free()
        serving.stop()
    assert StorageError.code in [error.code for error in middle.flower.failures]


def test_no_contribution_is_told_behind_a_middle(middle):
    settings_file(middle.run, settings(explain=True, timeout_s=3.0))
    with Serving(middle.run, lambda: middle.play("serve")) as client:
        status, told = client.predict(IDS[0], explain=True)
        assert status == 200
        assert not told.get("contributions")
