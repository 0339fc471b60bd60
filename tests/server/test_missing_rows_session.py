"""Rows that some party lacks, over real streams: aligned, trained on, predicted and served."""

import json
import shutil
import threading
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import tomli_w
from played_session import PlayedSession, stand_in
from served import Serving, predicted, same, settings
from stand_in_flower import Flower

from vfl.clients.serving import ServedParty
from vfl.config import Experiment
from vfl.core.errors import (
    ConfigError,
    ConsentError,
    MisalignedError,
    MissingPartyError,
    ProtocolError,
    VFLError,
)
from vfl.core.frame import Kind
from vfl.core.seeds import Secret
from vfl.core.storage import read_json
from vfl.datasets.alignment.gaps import role_of
from vfl.datasets.alignment.positions import Alignment
from vfl.datasets.alignment.protocols import PROTOCOLS, Bounds, Own, Send, run_roles
from vfl.federation.members import _drop_positions
from vfl.server.session import parties_of_today
from vfl.serving.front import settings_file
from vfl.session.store.party_folder import INJECTED_SECRET, PartyFolder
from vfl.training.run import load_data, session_of

PARTIES, ROWS = ("bank", "shop"), 240
SHARES = {"bank": 0.7, "shop": 0.8}
DATA = {"alignment": "alignment", "missing_rows": "token", "validation": 0.1, "test": 0.3}
CONTENT = {
    "name": "gaps",
    "codec": "error_feedback:k=2",
    "data": DATA,
    "parties": {name: {"width": 4, "bottom": "mlp:hidden=8"} for name in PARTIES},
    "label": {"party": "lender", "top": "mlp:hidden=8"},
    "train": {"epochs": 2, "batch_size": 32, "checkpoint_every": 5},
    "federation": {"step_timeout_s": 60.0, "rejoin_window_s": 1.0, "join_timeout_s": 90.0},
}
#: The same of boosted trees, whose splits take a row that a party lacks for one of missing cells.
TREES = {
    **{name: CONTENT[name] for name in ("name", "data", "federation")},
    "model": "trees:max_depth=3",
    "parties": {name: {} for name in PARTIES},
    "label": {"party": "lender"},
    "train": {"epochs": 3},
}
of_any_model = pytest.mark.parametrize(
    "session", [CONTENT, TREES], ids=["network", "trees"], indirect=True
)
CONSENT = """\
models = ["network", "trees*"]
modes = ["train", "evaluate", "predict", "serve", "align"]
missing_rows = ["intersection", "token"]
"""


def write_tables(folder):
    """Each party's table, in an order of its own, with rows that nobody else has; who has whom."""
    draw, owned = np.random.default_rng(0), {}
    ids = [f"Zq8id{row:03}" for row in range(ROWS)]
    hidden = draw.normal(size=(ROWS, 4))
    label = (hidden.sum(axis=1) > 0).astype(int)
    for index, (name, share) in enumerate(SHARES.items()):
        (folder / name).mkdir()
        rows = draw.permutation(ROWS)[: round(share * ROWS)]
        owned[name] = {ids[row] for row in rows}
        own = {"a": hidden[rows, 2 * index], "b": hidden[rows, 2 * index + 1]}
        table = pd.DataFrame({"id": [ids[row] for row in rows], **own})
        stranger = table.head(20).assign(id=[f"{name}{row}" for row in range(20)])
        pd.concat([table, stranger]).to_csv(folder / name / "data.csv", index=False)
    (folder / "lender").mkdir()
    order = draw.permutation(ROWS)
    table = pd.DataFrame({"id": [ids[row] for row in order], "paid": label[order]})
    table.to_csv(folder / "lender" / "data.csv", index=False)
    return owned


def write_party(session, name, consent=CONSENT, more=""):
    label = 'label = "paid"\n' if name == "lender" else ""
    consent = "" if name == "lender" else f"[consent]\n{consent}"
    text = f'party = "{name}"\n[data]\nsource = "data.csv"\nid = "id"\n{label}{consent}{more}'
    session.write(name, text)


@pytest.fixture
def session(tmp_path, monkeypatch, request):
    stand_in(monkeypatch)
    content = getattr(request, "param", CONTENT)
    played = PlayedSession(tmp_path, Flower(PARTIES, tells=True), content)
    played.content, played.owned = content, write_tables(tmp_path)
    for name in (*PARTIES, "lender"):
        write_party(played, name)
        store = tmp_path / name / "store"
        Secret.of_simulation(0, name).keep_at(store / INJECTED_SECRET)
    played.introduce(*PARTIES)
    return played


def kept(session, name):
    folder = session.flower.files[name].alignment_path("alignment")
    return Alignment.newest(folder, name)


def order(session, name):
    """The ids of the session's rows, as this party's positions name them; None for a gap."""
    ids = pd.read_csv(session.folder / name / "data.csv")["id"]
    return [None if at < 0 else ids[at] for at in kept(session, name).positions]


def test_each_party_learns_where_its_rows_stand(session):
    session.play("align")
    rows, complete = order(session, "lender"), kept(session, "lender").complete
    owned = session.owned
    assert set(rows) == owned["bank"] | owned["shop"]
    assert set(rows[:complete]) == owned["bank"] & owned["shop"]
    for name in PARTIES:
        assert order(session, name) == [one if one in owned[name] else None for one in rows]
        held = [one in owned[name] for one in rows]
        assert kept(session, "lender").held[name].tolist() == held
        assert list(kept(session, name).held) == [name]  # what the other has is not told
    facts = read_json(session.run.parent / "aligned-1" / "alignment.json")
    assert facts["common"] == complete
    assert facts["lacking"] == {n: len(rows) - len(owned[n] & set(rows)) for n in PARTIES}


@of_any_model
def test_a_federation_trains_what_one_process_trains(session):
    session.play("align")
    session.play("train")
    summary = read_json(session.run / "summary.json")
    folder = session.folder / "together"
    for name in (*PARTIES, "lender"):
        shutil.copytree(kept_folder(session, name), folder / name)
    content = session.content | {
        "data": DATA | {"source": str(session.folder / "lender/party.toml")},
        "label": session.content["label"] | {"column": "paid"},
    }
    content["data"]["alignment"] = str(folder)
    content["parties"] = {
        name: own | {"source": str(session.folder / name / "party.toml")}
        for name, own in session.content["parties"].items()
    }
    experiment = Experiment.model_validate(content)
    alone = session_of(experiment, load_data(experiment), "train").run()
    assert alone.weights_digest() == summary["weights_sha256"]
    assert summary["test_missing_rows"] > 0
    assert {"test_complete_accuracy", "test_missing_accuracy"} <= set(summary)

    session.play("evaluate")
    evaluated = read_json(session.run / "evaluations/0001.json")
    assert evaluated["test_loss"] == summary["test_loss"]
    session.play("predict")
    predicted = pd.read_csv(session.run / "predictions.csv")["id"]
    assert set(predicted) == session.owned["bank"] | session.owned["shop"]


def test_a_prediction_says_what_each_row_was_to_the_run(session):
    for mode in ("align", "train", "predict"):
        session.play(mode)
    split = PartyFolder(session.run / "parties" / "lender").rows().split
    ids, table = np.array(order(session, "lender")), pd.read_csv(session.run / "predictions.csv")
    said = {"yes": split.train, "validation": split.validation, "no": split.test}
    for word, rows in said.items():
        assert len(rows)
        assert set(table["id"][table["trained"] == word]) == set(ids[rows])


def kept_folder(session, name):
    return session.flower.files[name].alignment_path("alignment")


def test_no_cut_of_a_row_that_a_party_lacks_crosses(session):
    session.play("align")
    seen = session.play("train")
    held = kept(session, "lender").held
    sizes = {name: [] for name in PARTIES}
    for party, way, kind, _, payload in seen:
        if way == "up" and kind in (Kind.CUT, Kind.QUERY):
            sizes[party].append(len(payload) // (4 * 4))
    for name in PARTIES:  # every row once an epoch, but single ones, and the test rows
        assert sum(sizes[name]) <= 2 * held[name].sum()
    assert sum(sizes["bank"]) < sum(sizes["shop"])
    ids = [one.encode() for one in order(session, "lender")]
    assert not any(one in payload for *_, payload in seen for one in ids[:50])


def test_who_does_not_consent_takes_no_part(session):
    write_party(session, "shop", consent='modes = ["train", "align"]\n')
    with pytest.raises(VFLError, match="stopped with V403"):
        session.play("align")
    assert "missing_rows token" in str(session.flower.failures[0])
    write_party(session, "shop")
    session.play("align")
    write_party(session, "shop", consent='modes = ["train", "align"]\n')
    with pytest.raises(VFLError, match="stopped with V403"):
        session.play("train")


def test_positions_are_of_the_rows_they_were_made_for(session):
    session.play("align")
    with pytest.raises(MisalignedError, match="another treatment of rows"):
        session.play("train", data=DATA | {"missing_rows": "intersection"})


def test_a_trace_has_no_place_beside_gaps(session):
    session.play("align")
    write_party(session, "lender", more='[trace]\nphases = ["train"]\n')
    with pytest.raises(ConfigError, match="a trace requires that every party has every row"):
        session.play("train")


# Serving: the client and the thread are those of the tests of the service


@pytest.fixture
def serving(session):
    """A service that answers with a trained run, and what `vfl predict` says of every row."""
    begun = []

    def start(*, tells=True):
        session.play("align")
        session.play("train")
        session.play("predict")
        session.flower.tells = tells
        settings_file(session.run, settings(timeout_s=8.0))
        begun.append(Serving(session.run, lambda: session.play("serve")))
        return begun[-1].client, predicted(session.run)

    yield start
    for one in begun:
        one.stop()


def lacking(session, row):
    return [name for name in PARTIES if row not in session.owned[name]]


@of_any_model
def test_a_row_that_a_party_lacks_is_answered_as_predicted_and_marked(session, serving, capfd):
    client, expected = serving()
    client.wait_ready()
    rows = list(expected)
    incomplete = [row for row in rows if lacking(session, row)]
    for batch in ([incomplete[0]], incomplete[:3], rows[:60], rows[5:6]):
        status, told = client.predict(*batch)
        assert status == 200
        for answer, row in zip(told["predictions"], batch, strict=True):
            assert same(answer, expected[row])
            assert answer["missing"] == lacking(session, row)
    metrics = client.ask("/metrics")[1]
    asked = {*incomplete[:3], *rows[:60]}
    for party in {name for row in asked for name in lacking(session, row)}:
        assert f'vfl_missing_cuts_total{{party="{party}"}}' in metrics
    assert 'vfl_party_up{party="bank"} 1' in metrics
    notes = (session.run / "notes.txt").read_text()
    assert not any("Zq8" in text for text in (metrics, notes, *capfd.readouterr()))
    assert not any("Zq8" in text for text in session.flower.said)


@of_any_model
def test_a_party_that_dies_is_replaced_until_it_is_back(session, serving, monkeypatch):
    dying, real = threading.Event(), ServedParty.answer

    def answer(self):
        if dying.is_set() and self._feature.name == "shop":
            raise SystemExit
        return real(self)

    monkeypatch.setattr(ServedParty, "answer", answer)
    # It is told again a while after its reply, which nobody who dies gives.
    monkeypatch.setattr("vfl.server.federation._RETURN_S", 0.2)
    client, expected = serving(tells=False)
    client.wait_ready()
    row = next(row for row in expected if not lacking(session, row))
    assert client.predict(row)[1]["predictions"][0]["missing"] == []
    nodes = session.flower.get_nodes()
    monkeypatch.setattr(session.flower, "get_nodes", lambda: nodes[:1])  # its node is gone, too
    dying.set()
    replaced = wait_for(client, row, ["shop"])
    assert not same(replaced, expected[row])  # the vector has learned something else
    assert client.predict(row)[1]["predictions"][0] == replaced
    assert json.loads(client.ask("/ready")[1]) == {"ready": True, "without": ["shop"]}
    assert 'vfl_party_up{party="shop"} 0' in client.ask("/metrics")[1]
    dying.clear()
    monkeypatch.setattr(session.flower, "get_nodes", lambda: nodes)
    back = wait_for(client, row, [])
    assert same(back, expected[row])
    assert json.loads(client.ask("/ready")[1]) == {"ready": True}


@pytest.mark.parametrize("session", [TREES], indirect=True)
def test_trees_do_not_go_on_without_a_party_that_left_the_project(session):
    session.play("align")
    session.play("train")
    for mode in ("evaluate", "predict", "serve"):
        with pytest.raises(MissingPartyError, match="'shop' has left this project") as refused:
            session.play(mode, today=["bank"])
        assert "a network that was trained with data.missing_rows" in str(refused.value)


def test_a_network_goes_on_without_a_party_that_left_the_project(session):
    session.play("align")
    session.play("train")
    session.play("predict")
    before = predicted(session.run)
    lender = session.flower.files["lender"]
    assert _drop_positions(lender, "shop") == (0, 1)
    messages = len(session.flower.threads)
    with pytest.raises(MissingPartyError, match="party 'shop' has left this project"):
        session.play("evaluate", today=["bank"])
    assert len(session.flower.threads) == messages  # nobody was asked for it
    session.play("predict", today=["bank"])
    after = predicted(session.run)
    owned = session.owned
    assert after.keys() == owned["bank"] | owned["shop"]
    for row, answer in after.items():
        assert (answer == before[row]) is (row not in owned["shop"])
    assert len(session.flower.threads) == messages + 1

    settings_file(session.run, settings(timeout_s=8.0))
    service = Serving(session.run, lambda: session.play("serve", today=["bank"]))
    try:
        service.client.wait_ready()
        for row in (min(owned["bank"]), min(owned["shop"] - owned["bank"])):
            told = service.client.predict(row)[1]["predictions"][0]
            assert same(told, after[row])
            assert told["missing"] == [n for n in PARTIES if n == "shop" or row not in owned[n]]
    finally:
        service.stop()


def test_a_service_knows_parties_that_entered_since_it_began(session):
    lender, before = session.flower.files["lender"], ["bank"]
    assert parties_of_today(lender, before) == before
    app = session.folder / "lender" / "app"
    app.mkdir()
    (app / "experiment.toml").write_text(tomli_w.dumps(CONTENT))
    assert list(parties_of_today(lender, before)) == ["bank", "shop"]
    assert parties_of_today(lender, None) is None


def wait_for(client, row, missing):
    """The answer once these parties are missing; until then it is a 503 of theirs, or another's."""
    deadline = time.monotonic() + 30
    while True:
        status, told = client.predict(row)
        if status == 200 and told["predictions"][0]["missing"] == missing:
            return told["predictions"][0]
        assert status == 200 or (status, told["party"]) == (503, "shop")
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_who_refuses_rows_is_not_replaced(session, serving):
    write_party(session, "shop", consent=CONSENT + "max_queries = 1\n")
    client, expected = serving()
    client.wait_ready()
    row = next(row for row in expected if not lacking(session, row))
    assert [client.predict(row)[0] for _ in range(2)] == [200, 403]


# The roles


def owns(bounds=None, **ids):
    sets = {name: [text.encode() for text in own] for name, own in ids.items()}
    return {name: Own(name, own, bounds or Bounds()) for name, own in sets.items()}


def roles(owns, spec="ecdh"):
    return {
        name: role_of(PROTOCOLS.make(spec), own, tuple(owns), "label", "token")
        for name, own in owns.items()
    }


def test_too_few_rows_that_everybody_has_end_it_for_all():
    few = owns(Bounds(min_common=3), bank="abcdef", shop="efghij", label="abcdefghij")
    with pytest.raises(ConsentError, match="so small an intersection"):
        run_roles(roles(few))
    found, _ = run_roles(roles(owns(bank="abcdef", shop="efghij", label="abcdefghijk")))
    assert found["label"].complete == 2
    assert len(found["label"].positions) == 10


def test_two_by_two_every_set_is_counted_before_anything_is_told():
    counted, told = [], []
    sets = owns(bank="abcdef", shop="efghij", label="abcdefghij")
    sets["label"] = replace(sets["label"], count=lambda *pair: counted.append(pair))
    run_roles(roles(sets))
    assert sorted(counted) == [("bank", 6), ("shop", 6)]
    sets["shop"] = replace(sets["shop"], bounds=Bounds(max_asked=9))
    with pytest.raises(ConsentError, match="so large a set"):
        run_roles(roles(sets), lambda *message: told.append(message))
    assert [len(payload) // 32 for sender, _, payload in told if sender == "shop"] == [6]


@pytest.mark.parametrize("lie", ["twice", "beyond", "counts", "short"])
def test_places_that_no_session_has_are_refused(lie):
    honest = roles(owns(bank="abcd", shop="cdef", label="abcdef"))
    slots = np.array([0, 1, 2, 3], "<u4")

    def lying(role):
        """The label party, but for what it tells the bank in the end."""
        got, last = None, 0
        while True:
            try:
                step = role.send(got)
            except StopIteration:
                return None
            if isinstance(step, Send) and step.to == "bank" and len(step.payload) == 8:
                last = 1
                if lie == "counts":  # of rows that everybody has, more than the bank has
                    step = Send("bank", np.array([6, 5], "<u4").tobytes())
            elif isinstance(step, Send) and step.to == "bank" and last:
                wrong = {"twice": slots % 3, "beyond": slots + 9, "short": slots[:3]}
                if lie != "counts":
                    step = Send("bank", b"\x01" + wrong[lie].astype("<u4").tobytes())
            got = yield step

    honest["label"] = lying(honest["label"])
    with pytest.raises(ProtocolError, match=r"no session can have|not have the agreed form"):
        run_roles(honest)


def test_a_protocol_with_a_helper_is_refused():
    with pytest.raises(VFLError, match="without a helper"):
        run_roles(roles(owns(bank="ab", label="ab"), "server_aided"))
