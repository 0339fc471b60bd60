"""A served row is the predicted row: in one process, and over real streams, through HTTP."""

import errno
import json
import os
import shutil
import ssl
import tempfile
import threading
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd
import pytest
from browser import BROWSER, Browser
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from played_session import run_session
from prometheus_client.parser import text_string_to_metric_families
from served import (
    CONTENT,
    PARTIES,
    ROWS,
    Client,
    Serving,
    consent,
    predicted,
    same,
    settings,
    start,
)
from typer.testing import CliRunner

from vfl.cli import app
from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import ConfigError, RunFolderError, StorageError, UserError, VFLError
from vfl.datasets import PartyData, Split
from vfl.datasets.encode import TableEncoder
from vfl.serving.front import LeadSettings, Rows, settings_file, settings_of
from vfl.serving.local import serve
from vfl.serving.service import Service
from vfl.session.store.party_folder import own_ledger, own_terms
from vfl.training import run
from vfl.training.promotion import promote, promoted_runs, roll_back, running_service
from vfl.training.status import run_status
from vfl.transport import session_certificate

# In one process


def test_a_row_is_answered_as_predicted_whoever_shares_its_batch(local, trained_run):
    expected, client = predicted(trained_run), local()
    ids = list(expected)
    for batch in ([ids[0]], ids[3:5], ids[:100], [ids[7], ids[2], ids[7]]):
        status, told = client.predict(*batch)
        assert status == 200
        assert told["version"] == "run"
        pairs = zip(told["predictions"], batch, strict=True)
        assert all(same(answer, expected[each]) for answer, each in pairs)


def test_calibrated_probabilities_are_answered_as_predicted(tmp_path):
    content = {key: value for key, value in CONTENT.items() if key != "federation"}
    content |= {
        "data": {"source": "breast_cancer", "validation": 0.2},
        "label": {"class_weight": "balanced", "calibration": "isotonic"},
    }
    folder = tmp_path / "runs" / "run"
    run.train(Experiment.model_validate(content), folder.parent, "run")
    run.predict(RunFolder.open(folder))
    expected, table = predicted(folder), pd.read_csv(folder / "predictions.csv")
    with Serving(folder, lambda: serve(folder, settings())) as client:
        status, told = client.predict(*expected)
    assert status == 200
    pairs = zip(told["predictions"], expected, strict=True)
    assert all(same(answer, expected[each]) for answer, each in pairs)
    moved = table.filter(like="probability_") - table.filter(like="uncalibrated_").to_numpy()
    assert moved.abs().max(axis=None) > 0.01


def test_a_network_that_learned_no_vector_answers_without_nobody(trained_run):
    with pytest.raises(ConfigError, match="cannot answer without an absent party"):
        serve(trained_run, settings(partial=True))


def test_answers_to_requests_alike_have_one_length(local, trained_run):
    ids, client = list(predicted(trained_run)), local(explain=True)
    for more, groups in (({}, [[one] for one in ids[:40]]), ({}, [ids[:3], ids[3:6]]),
                         ({"explain": True}, [[one] for one in ids[:5]])):  # fmt: skip
        answers = [client.ask("/predict", {"ids": group, **more}) for group in groups]
        assert {status for status, _ in answers} == {200}
        assert len({len(text.encode()) for _, text in answers}) == 1
        assert len({text.strip() for _, text in answers}) == len(groups)


def test_requests_at_the_same_time_share_batches_and_keep_their_answers(local, trained_run):
    expected, client, wrong = predicted(trained_run), local(wait_ms=20), []

    def ask(each):
        status, told = client.predict(each)
        if status != 200 or not same(told["predictions"][0], expected[each]):
            wrong.append(status)

    threads = [threading.Thread(target=ask, args=(each,)) for each in list(expected)[:40]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    families = text_string_to_metric_families(client.ask("/metrics")[1])
    figures = {each.name: each.value for family in families for each in family.samples}
    assert figures["vfl_rows_total"] == 40
    assert figures["vfl_batches_total"] < 40
    assert figures["vfl_party_up"] == 1
    assert figures["vfl_request_seconds_count"] == 40
    assert 0 < figures["vfl_request_seconds_sum"] < 40 * 20


def test_contributions_add_up_to_what_the_row_moved(local, trained_run):
    client, ids = local(explain=True), list(predicted(trained_run))
    _, first = client.predict(ids[0], explain=True)
    _, other = client.predict(ids[1], explain=True)
    moved = []
    for told in (first, other):
        assert set(told["contributions"]) == set(PARTIES)
        total = np.sum(list(told["contributions"].values()), axis=0)
        logits = np.log(told["predictions"][0]["probabilities"])
        moved.append((logits[1] - logits[0]) - (total[1] - total[0]))
    assert moved[0] == pytest.approx(moved[1], abs=1e-3)  # the reference, the same for both


def test_a_cache_asks_nobody_twice(local, trained_run):
    client, each = local(cache_rows=10), next(iter(predicted(trained_run)))
    answers = [client.predict(each)[1]["predictions"] for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert "vfl_asked_rows_total 1.0\n" in client.ask("/metrics")[1]


@pytest.fixture
def other(trained_run):
    """Another run of one process, of the same rows."""
    content = CONTENT | {"name": "other", "data": {"source": "breast_cancer"}, "seed": 3}
    content = {k: v for k, v in content.items() if k != "federation"}
    content["label"] = {"top": "mlp:hidden=8"}
    other = trained_run.parent / "other"
    if not other.exists():
        run.train(Experiment.model_validate(content), trained_run.parent, "other")
        run.predict(RunFolder.open(other))
    yield other
    (trained_run.parent / "promoted.json").unlink(missing_ok=True)


class Asking:
    """Clients that ask without a pause while the block lasts, and all that they were answered."""

    def __init__(self, client, each, clients=4):
        self.seen, self._stopped = [], threading.Event()
        self._client, self._id = client, each
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self.seen

    def __exit__(self, *error):
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _ask(self):
        while not self._stopped.is_set():
            self.seen.append(self._client.predict(self._id))


def check_answers(seen, expected, each):
    """Every one came, and is that of the run that it names."""
    assert {status for status, _ in seen} == {200}
    for _, told in seen:
        assert same(told["predictions"][0], expected[told["version"]][each])
    assert {told["version"] for _, told in seen} == {*expected}


def test_a_promotion_and_its_rollback_lose_no_request(local, trained_run, other):
    client = local()
    expected = {folder.name: predicted(folder) for folder in (trained_run, other)}
    both = next(each for each in expected["run"] if each in expected["other"])
    with Asking(client, both) as seen:
        for folder in (other, trained_run, other):
            (service,) = promote(folder)
            assert (service.run, service.address) == (folder.name, client.address)
            assert client.predict(both)[1]["version"] == folder.name
        folder, (service,) = roll_back(trained_run.parent)
        assert (folder, service.run) == (trained_run, "run")
    check_answers(seen, expected, both)
    assert promoted_runs(trained_run.parent) == ["other", "run"]
    assert (run_status(trained_run).state, run_status(trained_run).promoted) == ("serving", True)
    assert (run_status(other).state, run_status(other).promoted) == ("ended", False)


@pytest.mark.parametrize("promoted", ["run", "other"])
def test_a_project_is_queried_about_its_promoted_run(local, trained_run, other, tmp_path, promoted):
    """The newest run is `other`, and the token is that of the run with which the service began."""
    local()
    promote(trained_run.parent / promoted)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "experiment.toml").touch()
    table, out = tmp_path / "ids.csv", tmp_path / "answers.csv"
    (tmp_path / "party.toml").write_text(
        f'party = "label"\nstore = "{trained_run.parent.parent}"\n'
        '[data]\nsource = "ids.csv"\nid = "id"\n'
    )
    both = sorted(predicted(trained_run).keys() & predicted(other).keys())
    table.write_text("\n".join(["id", *both[:3]]))
    command = ["predict", str(tmp_path), "--ids", str(table), "--out", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, (done.output, done.exception)
    assert set(pd.read_csv(out)["run"]) == {promoted}


def test_a_promotion_is_reported_once_the_run_answers(local, trained_run, other, monkeypatch):
    local()
    reported, begin = [], Service._open

    def watched(service, serving):
        reported.append(running_service(trained_run).run)
        begin(service, serving)

    monkeypatch.setattr(Service, "_open", watched)
    promote(other)
    assert reported == ["run"]


def test_a_run_that_cannot_be_served_is_not_promoted(local, trained_run, other):
    client = local()
    weights = next((other / "parties").glob("*/weights.safetensors"))
    kept = weights.read_bytes()
    try:
        weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        for _ in range(2):  # the second refusal is not taken for the first
            with pytest.raises(UserError, match="cannot go on with this run") as refusal:
                promote(other)
            assert "V007" in str(refusal.value.got)
    finally:
        weights.write_bytes(kept)
    assert client.ask("/model")[0] == 200
    assert promoted_runs(trained_run.parent) == []
    with pytest.raises(VFLError, match="there is no run here"):
        promote(trained_run.parent / "missing")


def test_a_promotion_on_a_full_disk_changes_no_service(local, trained_run, other, monkeypatch):
    client, create = local(), tempfile.mkstemp

    def full(*, prefix, **options):
        if prefix == ".promoted.json.":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(prefix=prefix, **options)

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", full)
        with pytest.raises(StorageError, match="cannot be written"):
            promote(other)
    assert running_service(trained_run).run == "run"
    assert promoted_runs(trained_run.parent) == []
    (service,) = promote(other)
    assert (service.run, service.address) == ("other", client.address)


def test_without_a_service_a_promotion_is_kept_for_the_next_one(trained_run, other):
    assert promote(other) == []
    with pytest.raises(UserError, match="no run was promoted before"):
        roll_back(trained_run.parent)
    assert promote(trained_run) == promote(trained_run) == []
    assert promoted_runs(trained_run.parent) == ["other", "run"]
    assert roll_back(trained_run.parent) == (other, [])
    promoted = trained_run.parent / "promoted.json"
    promoted.write_text(promoted.read_text().replace("other", "otter"))
    with pytest.raises(RunFolderError):
        promoted_runs(trained_run.parent)


MARK, KNOWN = "Zq8marked", "an id of the table"


@pytest.mark.parametrize(
    ("path", "body", "token", "status"),
    [
        ("/predict", {"ids": [MARK]}, None, 404),
        ("/predict", {"ids": [MARK]}, "wrong" + MARK, 401),
        ("/metrics", None, "", 401),
        ("/openapi.json", None, None, 200),
        ("/predict", {"ids": MARK}, None, 422),
        ("/predict", {MARK: [1]}, None, 422),
        ("/predict", {"ids": []}, None, 422),
        ("/predict", b"{" + MARK.encode(), None, 422),
        ("/predict", {"ids": [KNOWN], "columns": {MARK: [1]}}, None, 422),
        ("/predict", {"ids": ["1"] * 300}, None, 413),
        ("/predict", {"ids": ["1"], "more": "x" * 70_000}, None, 413),
        ("/predict", {"ids": [KNOWN], "explain": True}, None, 403),
        ("/" + MARK, None, None, 404),
        ("/health", None, "", 200),
        ("/", None, "", 200),
    ],
)
def test_what_is_refused_and_that_nothing_is_repeated(
    local, trained_run, capfd, path, body, token, status
):
    client = local(max_body_bytes=65_536)
    if isinstance(body, dict) and body.get("ids") == [KNOWN]:
        body = {**body, "ids": [next(iter(predicted(trained_run)))]}
    got, text = client.ask(path, body, token)
    assert got == status
    seen = [text, client.ask("/metrics")[1], *capfd.readouterr()]
    assert not any(MARK in each for each in seen)


@pytest.mark.parametrize("cell", [10**400, [1], {"a": 1}, "word"])
def test_columns_that_do_not_fit_are_refused_and_raise_nothing(cell):
    encoder = TableEncoder.fit(pd.DataFrame({"a": [1.0, 2.0, 3.0]}))
    split = Split(np.arange(0), np.arange(0), np.arange(3))
    data = PartyData("lender", None, None, None, split, b"", encoder=encoder)
    rows = Rows(data)
    assert rows.inputs({"a": [cell]}, 1) is None
    assert rows.inputs({"a": [2.0]}, 1).shape == (1, 1)


# In a browser


@pytest.fixture
def browser(tmp_path):
    page = Browser(tmp_path)
    yield page
    page.close()


def ask_page(browser, token, each):
    for name, value in (("token", token), ("id", each)):
        browser.value(f"document.getElementById('{name}').value = {json.dumps(value)}")
    browser.value("document.getElementById('explain').checked = true")
    browser.value("document.getElementById('ask').click()")


@pytest.mark.net
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed here")
def test_a_person_asks_on_the_page(local, trained_run, browser):
    client, (each, (prediction, _)) = (
        local(explain=True),
        next(iter(predicted(trained_run).items())),
    )
    browser.call("Page.navigate", url=client.address + "/")
    browser.wait_for("document.readyState == 'complete' && !!document.getElementById('ask')")
    ask_page(browser, "wrong", each)
    browser.wait_for("document.getElementById('error').textContent.includes('token')")
    ask_page(browser, client.token, "<b>nobody</b>")
    browser.wait_for("document.getElementById('error').textContent.includes('does not know')")
    ask_page(browser, client.token, each)
    browser.wait_for("!document.getElementById('answer').hidden")
    assert browser.value("document.getElementById('prediction').textContent") == prediction
    shown = browser.value("document.getElementById('answer').innerText")
    assert all(word in shown for word in (*PARTIES, "Shapley", "ms at the service", "model run"))
    assert browser.value("document.getElementById('error').textContent") == ""


# Over real streams


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"codec": "topk:k=2,values=8", "defense": "layer_norm"},
        {"merge": "sum", "secure": "sum"},
    ],
    ids=["plain", "codec and defense", "secure sum"],
)
def test_streams_answer_as_predicted_and_no_id_is_in_a_log_or_a_metric(session, changes, capfd):
    session.play("train", **changes)
    session.play("predict", **changes)
    expected = predicted(session.run)
    with start(session, **changes) as client:
        for batch in (["Zq8id005"], ["Zq8id089", "Zq8id000"], list(expected)):
            status, told = client.predict(*batch)
            assert status == 200
            pairs = zip(told["predictions"], batch, strict=True)
            assert all(same(answer, expected[each]) for answer, each in pairs)
        assert client.predict("Zq8id001", "Zq8idless")[0] == 404
        metrics = client.ask("/metrics")[1]
    notes = (session.run / "notes.txt").read_text()
    assert not any("Zq8" in text for text in (metrics, notes, *capfd.readouterr()))
    assert session.flower.failures == []
    said = "answered 93 rows, 90 different ones, each at most 2 times; refused 0 requests"
    told = [line.partition("; 0 of 2 inputs") for line in sorted(session.flower.said)]
    assert [line for line, *_ in told] == [f"party {name} {said}" for name in PARTIES]
    assert {rest for *_, rest in told} == {" drifted"}  # the training rows are those asked
    for name in PARTIES:
        (entry,) = own_ledger(session.flower.files[name]).entries()
        spent = entry.spent["serve"]
        assert (spent.sessions, spent.rows, spent.passes) == (1, 93, 2)


SERVE_TABLE = """[serve]
port = 0
token = "clients.token"
probability_decimals = 1
max_rows_per_day = 5
timeout_s = 3.0
trusted_proxy = ["127.0.0.1"]
"""


def test_the_leading_party_serves_as_its_own_file_says_and_options_come_first(trained):
    consent(trained, "lender", SERVE_TABLE)
    file = trained.folder / "lender" / "clients.token"
    file.write_text("x" * 40 + "\n" + "y" * 40 + "\n")
    file.chmod(0o600)
    for options, decimals, status in (({}, 1, 429), ({"max_rows_per_day": "off"}, 1, 200)):
        settings_file(trained.run, LeadSettings(**options))
        serving = Serving(trained.run, lambda: trained.play("serve"), token=file)
        try:
            serving.client.wait_ready()
            _, told = serving.client.predict("Zq8id005")
            for share in told["predictions"][0]["probabilities"]:
                assert share == round(share, decimals)
            assert serving.client.predict(*(f"Zq8id00{n}" for n in range(5)))[0] == status
        finally:
            serving.stop()


@pytest.mark.parametrize("given", [{"certificate": "a.pem"}, {"client_ca": "ca.pem"}])
def test_half_of_what_tls_needs_is_refused(given):
    with pytest.raises(UserError, match=r"both a certificate and its key|needs a certificate"):
        settings_of(None, given)


def test_a_party_that_does_not_serve_refuses_the_session(trained):
    path = trained.folder / "shop" / "party.toml"
    trained.write("shop", path.read_text().replace("modes", "# modes"))  # it says nothing of modes
    serving = start(trained)
    with pytest.raises(VFLError, match="does not consent"):
        serving.stop()
    assert not (trained.run / "serving.json").exists()


def test_a_row_asked_too_often_is_refused_and_nobody_else(trained):
    consent(trained, "shop", "max_queries = 2")
    answers = []
    with start(trained) as client:
        statuses = [client.predict("Zq8id001")[0] for _ in range(3)]
        assert statuses == [200, 200, 403]
        settings_file(trained.run, settings())

        def ask(each):
            answers.append((each, *client.predict(each)))

        threads = [threading.Thread(target=ask, args=(f"Zq8id00{n}",)) for n in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    refused = [(each, told["party"]) for each, status, told in answers if status == 403]
    assert refused == [("Zq8id001", "shop")]
    assert sum(status == 200 for _, status, _ in answers) == 5


@pytest.mark.parametrize(
    ("limit", "statuses"),
    [("max_rows_per_second = 0.001", [200, 429]), ("max_bytes = 20000", [200, 403])],
)
def test_more_than_a_party_allows_is_refused_by_name(trained, limit, statuses):
    consent(trained, "bank", limit)
    with start(trained) as client:
        got, ids = [], [f"Zq8id{row:03}" for row in range(ROWS)]
        for _ in range(14):
            status, told = client.predict(*ids)
            got.append(status)
            if status != 200:
                assert told["party"] == "bank"
                break
    assert sorted(set(got)) == statuses


def test_epsilon_ends_what_may_be_asked(session):
    noisy = {"defense": "clipped_noise:norm=4,sigma=8"}
    session.play("train", **noisy)
    (entry,) = own_ledger(session.flower.files["bank"]).entries()
    left = 2.5 * entry.epsilon
    consent(session, "bank", f"max_epsilon = {entry.spent_epsilon + left}")
    with start(session, **noisy) as client:
        statuses = [client.predict("Zq8id001")[0] for _ in range(4)]
        assert statuses == [200, 200, 403, 403]
        assert client.predict("Zq8id002")[0] == 200  # a first pass of another row
    (entry,) = own_ledger(session.flower.files["bank"]).entries()
    assert entry.spent["serve"].passes == 2


def test_over_streams_a_promotion_loses_no_request_and_one_that_fails_changes_nothing(trained):
    trained.flower.tells = True
    for name in ("other", "broken"):
        for mode in ("train", "predict"):
            trained.play(mode, run=name, seed=3)
    shutil.rmtree(trained.folder / "shop" / "store" / "runs" / "broken")
    runs, each = trained.run.parent, "Zq8id011"
    expected = {name: predicted(runs / name) for name in (trained.run.name, "other")}
    with start(trained, 60.0) as client, Asking(client, each) as seen:
        for asked, served in (("other", "other"), ("broken", "other"), ("run", "run")):
            if asked == served:
                promote(runs / asked)
            else:
                with pytest.raises(UserError, match=f"goes on with {served}"):
                    promote(runs / asked)
            assert client.predict(each)[1]["version"] == served
        experiment, lender = trained.experiment(), trained.flower.files["lender"]
        (trained.run / "predictions.csv").unlink()
        terms = own_terms(experiment, "predict", "run", lender)
        run_session(trained.flower, experiment, lender, terms)  # with the run that answers
    check_answers(seen, expected, each)
    assert predicted(trained.run) == expected["run"]
    assert "; going on with other" in (trained.run / "notes.txt").read_text()
    assert not (runs / "broken" / "failure.json").exists()
    assert json.loads((trained.run / "served.json").read_text())["served"] == [
        "run",
        "other",
        "run",
    ]


def test_a_run_of_a_new_month_is_answered_at_its_new_positions(trained):
    """Rows left and changed places meanwhile: old positions would give other rows' answers."""
    trained.flower.tells = True
    tables = {name: trained.folder / name / "data.csv" for name in (*PARTIES, "lender")}
    with start(trained, 60.0) as client:
        assert client.predict("Zq8id000")[0] == 200
        for name, table in tables.items():
            head, *rows = table.read_text().splitlines(keepends=True)
            table.write_text("".join([head, *(rows[:2:-1] if name == "shop" else rows[3:])]))
            text = (
                (table.parent / "party.toml").read_text().replace('"serve"]', '"serve", "align"]')
            )
            trained.write(name, text + "min_ids = 50\nmin_common = 50\n")
        trained.play("align")
        for mode in ("train", "predict"):
            trained.play(mode, run="month", seed=3)
        promote(trained.run.parent / "month")
        expected = predicted(trained.run.parent / "month")
        assert len(expected) == ROWS - 3
        for each, row in expected.items():
            (answer,) = client.predict(each)[1]["predictions"]
            assert same(answer, row)
        assert client.predict("Zq8id000")[0] == 404


def test_a_shifted_table_is_seen_by_its_owner_and_in_the_scores(trained, tmp_path):
    table = tmp_path / "bank" / "data.csv"
    frame = pd.read_csv(table)
    frame.assign(a=frame.a + 5.0).to_csv(table, index=False)
    with start(trained) as client:
        assert client.predict(*frame.id)[0] == 200
        assert "vfl_served_rows_total{" not in client.ask("/metrics")[1]  # fewer than 100 rows
        assert client.predict(*frame.id)[0] == 200
        metrics = client.ask("/metrics")[1]
    families = {each.name: each.samples for each in text_string_to_metric_families(metrics)}
    served = [each for each in families["vfl_served_rows"] if each.labels["column"] == "score"]
    assert sum(each.value for each in served) == 2 * ROWS
    (index,) = families["vfl_population_stability_index"]
    assert index.labels == {"column": "score"}
    kept = {
        name: tmp_path / name / "store/runs" / trained.run.name / "parties" / name
        for name in (*PARTIES, "lender")
    }
    counted = {
        name: {
            column: (about["population_stability_index"] > 0.25, sum(about["rows"]))
            for column, about in json.loads((kept[name] / "served-rows.json").read_text()).items()
        }
        for name in PARTIES
    }
    assert counted["bank"] == {"a": (True, 2 * ROWS), "b": (False, 2 * ROWS)}
    assert counted["shop"] == {"a": (False, 2 * ROWS), "b": (False, 2 * ROWS)}
    assert not list(tmp_path.glob("lender/**/served-rows.json"))
    said = [line for line in trained.flower.said if "inputs drifted" in line]
    assert any(line.startswith("party bank") and "1 of 2 inputs" in line for line in said)
    assert any(line.startswith("party shop") and "0 of 2 inputs" in line for line in said)


def client_certificate():
    """A key, and the certificate that it signed for itself; PEM."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "caller")])
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return signed.public_bytes(Encoding.PEM), key.private_bytes(*form)


def test_mutual_tls_lets_in_whoever_has_a_certificate(trained_run, tmp_path):
    mine = session_certificate(["127.0.0.1"])
    caller, callers_key = client_certificate()
    files = {"ca.pem": mine.ca_pem, "cert.pem": mine.cert_pem, "key.pem": mine.key_pem}
    files |= {"caller.pem": caller, "caller-key.pem": callers_key}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    at = {name: str(tmp_path / name) for name in files}
    options = settings(certificate=at["cert.pem"], key=at["key.pem"], client_ca=at["caller.pem"])
    known = ssl.create_default_context(cafile=at["ca.pem"])
    stranger = ssl.create_default_context(cafile=at["ca.pem"])
    known.load_cert_chain(at["caller.pem"], at["caller-key.pem"])
    with Serving(trained_run, lambda: serve(trained_run, options), known) as client:
        assert client.ask("/health")[0] == 200
        outsider = Client(client.address, client.token, stranger)
        with pytest.raises(OSError, match=r"certificate|alert|EOF|reset|closed"):
            outsider.ask("/health")


def test_without_tls_it_stays_on_this_machine(trained_run):
    with pytest.raises(VFLError, match="must stay on one machine"):
        serve(trained_run, LeadSettings(host="0.0.0.0", port=0))


def test_a_token_that_others_can_read_is_refused(trained_run, tmp_path):
    token = tmp_path / "token"
    token.write_text("x" * 40)
    token.chmod(0o644)
    with pytest.raises(VFLError, match="other users may read the token"):
        serve(trained_run, settings(token=str(token)))
