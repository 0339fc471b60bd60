"""What clients and strangers may ask of `vfl serve`: tokens, sources, rows a day, decimals."""

import http.client
import json
import secrets
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from served import Client, predicted

from vfl.config import ServeSettings
from vfl.core.errors import RunFolderError, VFLError
from vfl.core.storage import Seal
from vfl.serving import front
from vfl.serving.front import LeadSettings, scores, tokens_in
from vfl.serving.service import RowBudget
from vfl.transport import FrontLimits, RateLimiter


def ask(client, token=None, path="/model", **headers):
    """Status, headers and body of one request on a connection of its own."""
    connection = http.client.HTTPConnection(urlsplit(client.address).netloc, timeout=10)
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request(
            "GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


# Tokens and strangers


@pytest.fixture
def slow_refill(monkeypatch):
    """A source without a token has twenty requests, however long they take."""
    monkeypatch.setattr(
        front, "_STRANGERS", FrontLimits(per_second=1e-3, burst=20.0, longest_wait_s=3600)
    )


def test_requests_without_a_token_take_nothing_from_those_with_one(local, slow_refill):
    client = local(max_requests_per_second=50.0)
    statuses = Counter(ask(client, "wrong" * 8)[0] for _ in range(80))
    assert statuses[429]
    assert 0 < statuses[401] < 30
    assert [ask(client, client.token)[0] for _ in range(20)] == [200] * 20


def test_tokens_have_buckets_of_their_own(local, tmp_path, monkeypatch):
    slow = partial(RateLimiter, 1e-6, 150.0)  # so many requests, however long they take
    monkeypatch.setattr(front, "RateLimiter", lambda rate, burst, keys: slow(keys=keys))
    both, file = [secrets.token_urlsafe(32) for _ in range(2)], tmp_path / "tokens"
    file.write_text("\n".join(both) + "\n")
    file.chmod(0o600)
    client = local(token=str(file))
    while ask(client, both[0])[0] == 200:
        pass
    status, headers, body = ask(client, both[0])
    assert (status, json.loads(body)["code"], headers["Retry-After"]) == (429, "rate", "1")
    assert ask(client, both[1])[0] == 200


def test_only_a_named_proxy_says_who_asks(local, slow_refill):
    client = local(trusted_proxy=["127.0.0.1"])
    spent = [ask(client, path="/metrics", X_Forwarded_For="6.6.6.6, 10.0.0.1") for _ in range(40)]
    assert 429 in {status for status, *_ in spent}
    assert ask(client, path="/metrics", X_Forwarded_For="10.0.0.1, 10.0.0.2")[0] == 401


@pytest.mark.parametrize("content", ["", "short", "x" * 40 + "\nshort\n"])
def test_a_file_without_good_tokens_is_refused(tmp_path, content):
    file = tmp_path / "tokens"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(VFLError, match="no token, or one that is too short"):
        tokens_in(file)


def test_without_a_token_no_large_body_is_read(local):
    client = local()
    connection = http.client.HTTPConnection(urlsplit(client.address).netloc, timeout=5)
    connection.putrequest("GET", "/health")
    connection.putheader("Content-Length", str(17 * 1024))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


# Rows of a day

SEAL = Seal("served rows", "bank", "run")


class Day:
    def __init__(self):
        self.now = 20_000 * 86_400.0 - 3600

    def __call__(self):
        return self.now


@pytest.fixture
def day():
    return Day()


def test_a_token_has_so_many_rows_a_day(tmp_path, day):
    budget = RowBudget(1000, tmp_path / "rows", SEAL, day)
    assert [budget.take("a", 400) for _ in range(4)] == [True, True, False, False]
    assert budget.take("a", 200)
    assert budget.take("b", 1000)
    assert not budget.take("a", 1)
    assert budget.resets_in_s == 3600
    day.now += 3600
    assert budget.take("a", 1000)


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(0, 60))
def test_a_kill_gives_no_row_back(tmp_path_factory, asked, killed_at):
    path, day = tmp_path_factory.mktemp("rows") / "rows", Day()
    budget, answered = RowBudget(500, path, SEAL, day), 0
    for number, rows in enumerate(asked):
        if number == killed_at:
            budget = RowBudget(500, path, SEAL, day)
        answered += rows * budget.take("a", rows)
    assert answered <= 500


@pytest.mark.parametrize("content", ["[]", "{}", '{"day": 20000, "rows": {"a": 7}}', "nonsense"])
def test_a_count_that_cannot_be_read_opens_nothing(tmp_path, content):
    path = tmp_path / "rows"
    path.write_text(content)
    with pytest.raises(RunFolderError, match="remove the file"):
        RowBudget(10, path, SEAL)


def test_a_count_that_was_edited_or_is_of_another_service_opens_nothing(tmp_path, day):
    path = tmp_path / "rows"
    RowBudget(1000, path, SEAL, day).take("a", 7)
    with pytest.raises(RunFolderError, match="belongs to something else"):
        RowBudget(1000, path, replace(SEAL, run="other"), day)
    path.write_text(path.read_text().replace(": 17", ": 0"))
    with pytest.raises(RunFolderError, match="not as it was written"):
        RowBudget(1000, path, SEAL, day)


def test_the_budget_holds_over_http_and_a_restart(local, trained_run):
    client, ids = local(max_rows_per_day=5), list(predicted(trained_run))
    assert client.predict(*ids[:4])[0] == 200
    status, told = client.predict(*ids[:2])
    assert (status, told["code"]) == (429, "rows")
    assert client.predict(ids[0])[0] == 200
    assert client.token not in (trained_run / "serve-rows.json").read_text()
    (trained_run / "serving.stop").touch()
    while (trained_run / "serving.json").exists():
        time.sleep(0.02)
    assert local(max_rows_per_day=5).predict(ids[0])[0] == 429


# Decimals


def test_probabilities_are_rounded_unless_that_is_off(local, trained_run):
    expected = predicted(trained_run)
    client = local(LeadSettings(port=0, explain=True))
    _, told = client.predict(*expected)
    decimals = ServeSettings().probability_decimals
    for answer, (prediction, exact) in zip(told["predictions"], expected.values(), strict=True):
        assert answer["prediction"] == prediction
        assert answer["probabilities"] == [round(float(each), decimals) for each in exact]
    _, explained = client.predict(next(iter(expected)), explain=True)
    for shares in explained["contributions"].values():
        assert shares == [round(each, decimals) for each in shares]
    assert json.loads(client.ask("/model")[1])["decimals"] == decimals


def test_a_regression_is_told_whole():
    (told,) = scores(torch.tensor([[1 / 3]]), None, 1)
    assert told["prediction"] == np.float32(1 / 3)


# Numbers


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"ids": [1e5]}', 422),
        (b'{"ids": [1.0]}', 422),
        (b'{"ids": [true]}', 422),
        (b'{"ids": [' + b"7" * 400 + b"]}", 404),
        (b'{"ids": [' + b"7" * 5000 + b"]}", 422),
        (b'{"ids": ["x"], "columns": {"a": [true]}}', 422),
        (b'{"ids": ["x"], "explain": "true"}', 422),
        (b'{"ids": ["x"], "explain": 1}', 422),
        ('{"ids": ["\u0661"]}'.encode(), 404),
    ],
)
def test_numbers_of_a_body_are_of_their_own_type(local, body, status):
    assert local().ask("/predict", body)[0] == status


@pytest.mark.parametrize("length", ["+1", "1e1", "0x1", " 1_0", "-1", "1" * 30])
def test_a_length_that_is_no_number_reaches_nobody(local, length):
    client = local()
    connection = http.client.HTTPConnection(urlsplit(client.address).netloc, timeout=5)
    connection.putrequest("POST", "/predict", skip_accept_encoding=True)
    connection.putheader("Authorization", f"Bearer {client.token}")
    connection.putheader("Content-Length", length)
    connection.endheaders(b"{}")
    assert connection.getresponse().status in (400, 413)
    connection.close()
    assert isinstance(client, Client)


def test_nobody_else_chooses_whom_it_is_counted_for(local, slow_refill):
    client = local()
    statuses = Counter(
        ask(client, path="/metrics", X_Forwarded_For=f"10.0.0.{each}")[0] for each in range(60)
    )
    assert statuses[429] > 10


def test_a_service_that_ends_in_good_order_counts_exactly(tmp_path, day):
    budget = RowBudget(1000, tmp_path / "rows", SEAL, day)
    budget.take("a", 7)
    budget.take("a", 5)
    budget.give_back("a", 5)
    budget.close()
    again = RowBudget(1000, tmp_path / "rows", SEAL, day)
    assert again.take("a", 993)
    assert not again.take("a", 1)
