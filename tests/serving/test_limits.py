"""What clients and strangers may ask of `vfl serve`: tokens, sources, rows a day, decimals."""

import http.client
import json
import secrets
import shutil
import time
from collections import Counter
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from served import Client, Serving, predicted

from vfl.config import ServeSettings, read_party_file
from vfl.core.errors import RunFolderError, UserError, VFLError
from vfl.serving import clients, front
from vfl.serving.clients import Budgets, Caller, Clients, tokens_in
from vfl.serving.front import LeadSettings, Model
from vfl.serving.local import serve
from vfl.session.store.party_folder import own_ledger
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
    monkeypatch.setattr(front, "RateLimiter", lambda rate, burst: slow())
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
    with pytest.raises(VFLError, match="no token, or a token that is too short"):
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


class Day:
    def __init__(self):
        self.now = 20_000 * 86_400.0 - 3600

    def __call__(self):
        return self.now


@pytest.fixture
def day():
    return Day()


def client(name="a", **limits):
    return Caller(name=name, digest="0" * 64, **limits)


def test_a_client_has_so_many_rows_a_day(tmp_path, day):
    budgets, own = Budgets(tmp_path, "bank", 1000, day), client()
    assert [budgets.take(own, 400) for _ in range(4)] == [None, None, "rows", "rows"]
    assert budgets.take(own, 200) is None
    assert budgets.take(client("b"), 1000) is None
    assert budgets.take(client("c", max_rows_per_day=1001), 1001) is None
    assert budgets.take(client("d", max_rows_per_day=10), 11) == "rows"
    assert budgets.take(own, 1) == "rows"
    assert budgets.resets_in_s == 3600
    day.now += 3600
    assert budgets.take(own, 1000) is None


def test_a_client_has_so_many_requests_a_day_and_no_answer_takes_none(tmp_path, day):
    budgets, own = Budgets(tmp_path, "bank", None, day), client(max_requests_per_day=2)
    assert [budgets.take(own, 10**9) for _ in range(3)] == [None, None, "requests"]
    budgets.give_back(own, 10**9)
    assert [budgets.take(own, 1) for _ in range(2)] == [None, "requests"]
    assert all(budgets.take(client("b"), 5) is None for _ in range(9))


def test_services_of_one_party_count_together(tmp_path, day):
    one, other = (Budgets(tmp_path, "bank", 1000, day) for _ in range(2))
    own, answered = client(max_requests_per_day=700), 0
    for _ in range(600):
        answered += one.take(own, 1) is None
        answered += other.take(own, 1) is None
    assert 690 <= answered <= 700  # what one has noted ahead is not the other's
    one.close()
    other.close()
    assert Budgets(tmp_path, "bank", 1000, day).spent() == {"a": [answered, answered]}


def test_a_restored_store_opens_no_budget_of_its_day(tmp_path):
    """The counts are beside the counters that peers compare; an owner must declare a restore."""
    path = tmp_path / "party.toml"
    path.write_text('party = "bank"\n[data]\nsource = "a.csv"\nid = "id"\nlabel = "paid"\n')
    party, own = read_party_file(path), client()
    assert Budgets.of_party(party, 1000).take(own, 7) is None
    assert Budgets.of_party(party, 1000).spent() == {"a": [10, 0]}
    assert [file.name for file in (tmp_path / "store").rglob("spent.json")] == ["spent.json"]
    assert not (tmp_path / "store" / "clients").exists()  # of which a party may restore a copy

    shutil.rmtree(tmp_path / "store")  # an earlier copy of it, without the counts
    own_ledger(party).restored()
    assert Budgets.of_party(party, 1000).take(own, 1) == "rows"
    limited = client("b", max_requests_per_day=9)
    assert Budgets.of_party(party, None).take(limited, 1) == "requests"
    assert Budgets.of_party(party, None).take(client("c"), 1) is None
    tomorrow = Budgets.of_party(party, 1000)
    tomorrow._now = lambda: time.time() + 86_400
    assert tomorrow.take(own, 1) is None


@pytest.mark.parametrize("restart", [False, True])
def test_a_clock_that_is_set_back_gives_no_budget_again(tmp_path, day, restart):
    budgets, own = Budgets(tmp_path, "bank", 1000, day), client()
    assert budgets.take(own, 1000) is None
    right = day.now
    for now in (right - 86_400, right - 40 * 86_400, right):
        day.now = now
        budgets = Budgets(tmp_path, "bank", 1000, day) if restart else budgets
        assert budgets.take(own, 1) == "rows"
        assert budgets.spent() == {"a": [1000, 0]}
        assert budgets.resets_in_s == right + 3600 - now
    day.now = right + 3600
    assert budgets.take(own, 1000) is None


def test_a_restore_under_a_clock_that_was_set_back_opens_no_budget(tmp_path, day):
    Budgets(tmp_path, "bank", 1000, day).take(client(), 7)
    day.now -= 86_400
    restored = day.now + 60
    budgets = Budgets(tmp_path, "bank", 1000, day, lambda since: restored >= since)
    assert budgets.take(client(), 1) == "rows"


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(0, 60))
def test_a_kill_gives_no_row_back(tmp_path_factory, asked, killed_at):
    path, day, own = tmp_path_factory.mktemp("rows"), Day(), client(max_requests_per_day=30)
    budgets, rows, requests = Budgets(path, "bank", 500, day), 0, 0
    for number, wanted in enumerate(asked):
        if number == killed_at:
            budgets = Budgets(path, "bank", 500, day)
        taken = budgets.take(own, wanted) is None
        rows, requests = rows + taken * wanted, requests + taken
    assert rows <= 500
    assert requests <= 30


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"day": 20000, "spent": {"a": [7, 7]}}', "nonsense"]
)
def test_a_count_that_cannot_be_read_opens_nothing(tmp_path, content):
    (tmp_path / "spent.json").write_text(content)
    with pytest.raises(RunFolderError, match="remove the file"):
        Budgets(tmp_path, "bank", 10)


def test_a_count_that_was_edited_or_is_of_another_party_opens_nothing(tmp_path, day):
    path = tmp_path / "spent.json"
    Budgets(tmp_path, "bank", 1000, day).take(client(), 7)
    with pytest.raises(RunFolderError, match="another kind, party or run"):
        Budgets(tmp_path, "shop", 1000, day)
    path.write_text(path.read_text().replace(" 10,", " 0,"))
    with pytest.raises(RunFolderError, match="not as it was written"):
        Budgets(tmp_path, "bank", 1000, day)


def test_counts_go_on_in_memory_where_the_file_cannot_be_used(tmp_path, day):
    budgets, own = Budgets(tmp_path, "bank", 500, day), client()
    assert budgets.take(own, 100) is None
    (tmp_path / "spent.json").write_text("damaged")
    assert [budgets.take(own, 200) for _ in range(3)] == [None, None, "rows"]
    assert Budgets(tmp_path, "bank", 500, day).take(own, 1) == "rows"


def test_the_budget_holds_over_http_and_a_restart(local, trained_run):
    caller, ids = local(max_rows_per_day=5), list(predicted(trained_run))
    assert caller.predict(*ids[:4])[0] == 200
    status, told = caller.predict(*ids[:2])
    assert (status, told["code"]) == (429, "rows")
    assert caller.predict(ids[0])[0] == 200
    assert caller.token not in (trained_run / "clients/spent.json").read_text()
    (trained_run / "serving.stop").touch()
    while (trained_run / "serving.json").exists():
        time.sleep(0.02)
    assert local(max_rows_per_day=5).predict(ids[0])[0] == 429


# Named clients


def test_named_clients_have_tokens_budgets_and_ends_of_their_own(local, trained_run, monkeypatch):
    monkeypatch.setattr(clients, "_LOOK_EVERY_S", 0.0)
    caller, ids = local(), list(predicted(trained_run))
    named = Clients(trained_run / "clients", "label")
    few, short = named.add("few", rows=3, requests=2), named.add("short", days=3 / 86_400)
    shown = few, short, few + "x"
    assert [caller.ask("/model", token=each)[0] for each in shown] == [200, 200, 401]

    def asked(token, *rows):
        status, text = caller.ask("/predict", {"ids": rows}, token=token)
        return status, json.loads(text).get("code")

    assert asked(few, *ids[:4]) == (429, "rows")
    assert [asked(few, ids[0]) for _ in range(3)] == [(200, None)] * 2 + [(429, "requests")]
    assert asked(short, ids[0]) == (200, None)
    deadline = time.monotonic() + 30
    while asked(short, ids[0]) != (401, "expired"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert caller.ask("/health", token=short)[0] == 200
    # More than a stranger may ask before its address is locked out: that of the others is not.
    tries = {asked(short, ids[0]) for _ in range(60)}
    assert tries <= {(401, "expired"), (429, "rate")}
    assert caller.ask("/health", token="")[0] == 200
    assert 'vfl_expired_requests_total{client="short"}' in caller.ask("/metrics")[1]
    kept = "".join(each.read_text() for each in (trained_run / "clients").glob("*.json"))
    assert not [token for token in (few, short) if token in kept]


@pytest.mark.parametrize("days", [0.0, -1.0, float("nan"), float("inf"), 40_000.0])
def test_a_token_ends_some_day_or_never_by_its_absence(tmp_path, days):
    named = Clients(tmp_path, "label")
    with pytest.raises(UserError, match="number of days until a token expires is not allowed"):
        named.add("one", days=days)
    assert named.entries() == []


def test_a_client_that_is_removed_or_added_counts_at_once(local, trained_run, monkeypatch):
    monkeypatch.setattr(clients, "_LOOK_EVERY_S", 0.0)
    caller, named = local(), Clients(trained_run / "clients", "label")
    token = named.add("later")
    assert caller.ask("/model", token=token)[0] == 200
    named.remove("later")
    assert caller.ask("/model", token=token)[0] == 401
    assert caller.ask("/model", token=named.add("later"))[0] == 200
    (trained_run / "clients/clients.json").write_text("{}")
    assert caller.ask("/model", token=token)[0] == 401
    assert caller.ask("/model")[0] == 200  # the token in a file of the owner's


def test_with_named_clients_no_token_is_left_in_the_open(trained_run, tmp_path):
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    for each in ("serve.token", "clients"):
        shutil.rmtree(run / each, ignore_errors=True)
        (run / each).unlink(missing_ok=True)
    token = tmp_path / "token"
    token.write_text(Clients(run / "clients", "label").add("one"))
    with Serving(run, lambda: serve(run, LeadSettings(port=0)), token=token) as caller:
        assert caller.ask("/model")[0] == 200
    assert not (run / "serve.token").exists()


def test_a_list_of_clients_that_was_edited_opens_nothing(tmp_path):
    named = Clients(tmp_path, "bank")
    token = named.add("one", rows=5).encode()
    path = tmp_path / "clients.json"
    path.write_text(path.read_text().replace(": 5,", ": 50,"))
    with pytest.raises(RunFolderError, match="not as it was written"):
        named.entries()
    assert Clients(tmp_path, "bank").of(token) is None
    with pytest.raises(UserError, match="no client"):
        Clients(tmp_path / "other", "bank").remove("one")


@pytest.mark.parametrize(
    "facts", [{"name": ""}, {"name": "../x"}, {"rows": 0}, {"requests": -1}, {"rows": 2**53}]
)
def test_a_client_that_is_none_is_refused(tmp_path, facts):
    with pytest.raises(UserError, match="this is not a valid client"):
        Clients(tmp_path, "bank").add(**{"name": "one"} | facts)


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
    whole, none = Model("run", None, None, decimals=1).as_json(torch.tensor([[1 / 3], [np.inf]]))
    assert json.loads(whole) == {"prediction": np.float32(1 / 3)}
    assert none is None


@pytest.mark.parametrize("decimals", [None, 3])
@pytest.mark.parametrize("classes", [("no", 'y"\\es\u00e9', "\n"), (3, 1, 2)])
def test_answers_are_json_of_the_first_most_probable_class(classes, decimals):
    outputs = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    outputs[0], outputs[1, 1], outputs[2, 0] = 1.0, -1e4, np.nan
    told = Model("run", None, classes, decimals=decimals).as_json(outputs)
    assert told.pop(2) is None
    outputs = torch.cat([outputs[:2], outputs[3:]])
    for answer, row in zip(told, torch.softmax(outputs, dim=1).tolist(), strict=True):
        shares = row if decimals is None else [round(one, decimals) for one in row]
        expected = {"prediction": classes[int(np.argmax(row))], "probabilities": shares}
        assert answer == json.dumps(expected, ensure_ascii=False, separators=(",", ":"))


# Numbers


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"ids": [1e5]}', 404),
        (b'{"ids": [1.0]}', 404),
        (b'{"ids": [true]}', 422),
        (b'{"ids": [' + b"7" * 400 + b"]}", 404),
        (b'{"ids": [' + b"7" * 5000 + b"]}", 422),
        (b'{"ids": ["x"], "columns": {"a": [true]}}', 422),
        (b'{"ids": ["x"], "explain": "true"}', 422),
        (b'{"ids": ["x"], "explain": 1}', 422),
        (b'{"ids": ["x"], "column": {"a": [1]}}', 422),  # and not an answer without it
        ('{"ids": ["\u0661"]}'.encode(), 404),
    ],
)
def test_numbers_of_a_body_are_of_their_own_type(refusing, body, status):
    assert refusing.ask("/predict", body)[0] == status


@pytest.mark.parametrize("length", ["+1", "1e1", "0x1", " 1_0", "-1", "1" * 30])
def test_a_length_that_is_no_number_reaches_nobody(refusing, length):
    client = refusing
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
    budgets, own = Budgets(tmp_path, "bank", 1000, day), client()
    budgets.take(own, 7)
    budgets.take(own, 5)
    budgets.give_back(own, 5)
    budgets.close()
    again = Budgets(tmp_path, "bank", 1000, day)
    assert again.take(own, 993) is None
    assert again.take(own, 1) == "rows"
