"""`vfl.serving.Client` and `vfl predict --ids`: against a real service, and one that misbehaves."""

import csv
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from served import predicted, same
from typer.testing import CliRunner

from vfl.cli import app
from vfl.core.errors import (
    AuthenticationError,
    ConsentError,
    DataError,
    DisagreementError,
    LostPeerError,
    MissingPartyError,
    ProtocolError,
    UserError,
)
from vfl.serving import Client, clients
from vfl.serving.clients import Clients


@pytest.fixture
def ask(local, trained_run):
    """A client of a service of the trained run."""
    opened = []

    def start(token=None, **more):
        address = local(**more).address
        opened.append(Client(address, token or trained_run / "serve.token", sleep=lambda s: None))
        return opened[-1]

    yield start
    for client in opened:
        client.close()


@pytest.fixture
def answering():
    """A server that gives the answers of a list, the last one for ever; and what it was asked."""
    servers = []

    def start(*answers):
        asked, left = [], list(answers)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                asked.append(self.rfile.read(int(self.headers["Content-Length"])))
                status, body = left.pop(0) if len(left) > 1 else left[0]
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Retry-After", "2")
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                body = b'{"max_ids": 100}'
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.write_text("x" * 43 + "\n")
    return path


GOOD = json.dumps({"version": "run", "predictions": [{"prediction": 1}]}).encode()
AWAY = (503, b'{"error": "party bank: it is not here", "code": "away", "party": "bank"}')


def test_more_rows_than_a_request_takes_come_in_their_order(ask, trained_run):
    expected = predicted(trained_run)
    answers = ask(max_ids=20).predict(list(expected))
    assert len(answers) == len(expected)
    assert all(same(answer, one) for answer, one in zip(answers, expected.values(), strict=True))
    assert {answer["version"] for answer in answers} == {"run"}


def test_refusals_are_coded_errors_without_the_token(ask, trained_run, token):
    client, first = ask(max_rows_per_day=3), next(iter(predicted(trained_run)))
    with pytest.raises(DataError, match="does not know one of the ids"):
        client.predict(["absent"])
    with pytest.raises(ConsentError, match="the daily budget of this token, 3 rows") as caught:
        client.predict([first] * 4)
    assert "code rows" in str(caught.value)
    wrong = Client(client.address, token)
    with pytest.raises(AuthenticationError) as caught, wrong:
        wrong.predict([first])
    assert "xxxx" not in str(caught.value)


def test_a_party_that_is_away_is_waited_for_and_not_for_ever(answering, token):
    address, asked = answering(AWAY, (502, b"<html>"), (200, GOOD))
    waited = []
    with Client(address, token, sleep=waited.append) as client:
        assert client.predict(["7"]) == [{"prediction": 1, "version": "run"}]
    assert len(asked) == 3
    assert waited == [2.0, 2.0]  # as Retry-After says
    address, asked = answering(AWAY)
    with (
        Client(address, token, attempts=4, sleep=waited.append) as client,
        pytest.raises(MissingPartyError, match="party bank"),
    ):
        client.predict(["7"])
    assert len(asked) == 4


@pytest.mark.parametrize(
    "answer",
    [b"[]", b"nonsense", b"{}", b'{"predictions": [1]}', b'{"predictions": []}', b"[" * 10**5],
)
def test_what_is_no_service_of_ours_is_no_answer(answering, token, answer):
    address, asked = answering((200, answer))
    with (
        Client(address, token) as client,
        pytest.raises(ProtocolError, match="does not come from vfl serve"),
    ):
        client.predict(["7"])
    assert len(asked) == 1


def test_nobody_listens(token):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    waited = []
    with pytest.raises(LostPeerError, match="does not answer"):
        Client(f"http://127.0.0.1:{port}", token, attempts=3, sleep=waited.append).model()
    assert waited == [0.5, 1.0]


@pytest.mark.parametrize(
    "address", ["http://10.0.0.7:8080", "ftp://127.0.0.1", "127.0.0.1:80", "http://", "http://h/x"]
)
def test_a_token_never_leaves_the_machine_without_tls(address, token):
    with pytest.raises(UserError):
        Client(address, token)


def test_a_file_of_ids_becomes_a_file_of_answers(local, trained_run, tmp_path, monkeypatch):
    monkeypatch.setattr(clients, "_LOOK_EVERY_S", 0.0)
    client, expected = local(max_ids=50), predicted(trained_run)
    table, out = tmp_path / "ids.csv", tmp_path / "answers.csv"
    table.write_text("customer,other\n" + "".join(f"{each},1\n" for each in expected))
    command = ["predict", str(trained_run), "--ids", str(table), "--id", "customer"]
    done = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert f"{len(expected)} rows in {out}, answered by run" in done.output
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == list(expected)
    assert [row["prediction"] for row in rows] == [each for each, _ in expected.values()]
    with (trained_run / "predictions.csv").open(newline="") as file:
        columns = csv.DictReader(file).fieldnames
    assert [*rows[0]] == [*columns, "missing", "run"]
    few = tmp_path / "few"
    few.write_text(Clients(trained_run / "clients", "label").add("few", rows=60))
    out.unlink()
    command[1:2] = [client.address, "--token", str(few)]
    done = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert isinstance(done.exception, ConsentError)
    assert f"50 of {len(expected)} rows are in {out}" in str(done.exception)
    assert len(out.read_text().splitlines()) == 51


class Switching:
    """A service that answers one row a request, and has another run from the second request on."""

    classes: ClassVar = {"old": ["a", "b"], "new": ["a", "b", "c"]}
    version = "old"

    def __init__(self, *where, **how):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def model(self):
        return {"version": self.version, "classes": self.classes[self.version]}

    def parts(self, asked):
        for _ in asked:
            shares = [1.0 / len(self.classes[self.version])] * len(self.classes[self.version])
            yield [{"prediction": "a", "probabilities": shares, "version": self.version}]
            self.version = "new"


@pytest.mark.parametrize("same_classes", [False, True])
def test_a_run_with_other_classes_fills_no_column(tmp_path, token, monkeypatch, same_classes):
    monkeypatch.setattr("vfl.serving.client.Client", Switching)
    if same_classes:
        monkeypatch.setitem(Switching.classes, "new", ["a", "b"])
    ids, out = tmp_path / "ids.csv", tmp_path / "answers.csv"
    ids.write_text("id\n1\n2\n3\n")
    command = ["predict", "http://127.0.0.1:9", "--ids", str(ids), "--out", str(out)]
    done = CliRunner().invoke(app, [*command, "--token", str(token)])
    with out.open(newline="") as file:
        runs = [row["run"] for row in csv.DictReader(file)]
    if same_classes:
        assert (done.exit_code, runs) == (0, ["old", "new", "new"])
        return
    assert isinstance(done.exception, DisagreementError)
    assert "switched to a run with other classes" in done.exception.what
    assert f"1 of 3 rows are in {out}" in done.exception.fix
    assert runs == ["old"]
