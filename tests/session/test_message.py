import json

import pytest

from vfl.core.errors import DisagreementError, ProtocolError
from vfl.core.version import VERSION
from vfl.session import SessionMessage

TOKEN = "t0ken-" * 7


@pytest.fixture
def message(terms):
    return SessionMessage(
        session="0" * 32,
        token=TOKEN,
        node="17",
        host="lender.example",
        port=9443,
        ca_pem="-----BEGIN CERTIFICATE-----",
        idle_timeout_s=60,
        rejoin_window_s=8,
        terms=terms,
    )


def test_a_message_comes_back(message):
    received = SessionMessage.parse(message.model_dump_json())
    assert received == message
    assert received.terms.digest() == message.terms.digest()


def test_the_token_is_not_shown(message):
    assert TOKEN not in repr(message)
    assert "CERTIFICATE" not in str(message)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"token": TOKEN[:31]}, "fields token"),
        ({"token": TOKEN * 4}, "fields token"),
        ({"port": 0, "host": "h" * 256}, "fields host, port"),
        ({"session": "xyz"}, "fields session"),
        ({"terms": {"mode": "train"}}, "fields terms"),
        ({"idle_timeout_s": 1e308}, "fields idle_timeout_s"),
        ({"rejoin_window_s": 86_401, "attempt": 1001}, "fields attempt, rejoin_window_s"),
        ({"ca_pem": "-----BEGIN CERTIFICATE-----\x1b[2J"}, "fields ca_pem"),
        ({"host": "a b"}, "fields host"),
        ({"host": "999.1.1.1"}, "fields host"),
        ({"token": "t" * 42 + "\u202e"}, "fields token"),
        ({"start": -1, "attempt": 10**400}, "fields attempt, start"),
        ({"ca_pem": None, "node": "n" * 65, "rejoin_window_s": 0}, "fields ca_pem, node, rejoin"),
    ],
)
def test_messages_of_another_form_name_their_fields(message, changes, fields):
    text = json.dumps(json.loads(message.model_dump_json()) | changes)
    with pytest.raises(ProtocolError) as caught:
        SessionMessage.parse(text)
    assert caught.value.where.startswith(fields)
    assert caught.value.__cause__ is None
    assert TOKEN[:31] not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "2001:db8::7", "a", "a-b.example."])
def test_hosts_are_names_or_addresses(message, host):
    content = json.loads(message.model_dump_json()) | {"host": host}
    assert SessionMessage.parse(json.dumps(content)).host == host


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("seed", 10**400),
        ("seed", 2**31),
        ("validation", 0.8),
        ("codec", "x" * 513),
        ("defense", "none\x1b[2J"),
        ("parties", {f"p{i}": {"width": 1, "bottom": "mlp"} for i in range(65)}),
        ("parties", {"lender": {"width": 1, "bottom": "mlp"}}),
        ("run", "../x"),
        ("train.learning_rate", 1e308),
        ("train.epochs", 10**6),
        ("parties.bank.bottom", "mlp:hidden=" + "9-" * 300 + "9"),
    ],
)
def test_every_field_of_the_terms_has_a_range(message, path, value):
    content = json.loads(message.model_dump_json())
    table = content["terms"]
    *tables, name = path.split(".")
    for key in tables:
        table = table[key]
    table[name] = value
    with pytest.raises(ProtocolError) as caught:
        SessionMessage.parse(json.dumps(content))
    assert caught.value.where == "fields terms"


def test_a_long_message_is_refused_before_it_is_parsed(message, monkeypatch):
    text = message.model_dump_json()[:-1] + ', "more": ' + "9" * 10_000_000 + "}"
    monkeypatch.setattr(SessionMessage, "model_validate_json", None)
    with pytest.raises(ProtocolError, match="too long") as caught:
        SessionMessage.parse(text)
    assert caught.value.want == "at most 65536 bytes"


@pytest.mark.parametrize("text", ["", "{", "\ud800", "[]", "3", "null", f'"{TOKEN}"'])
def test_texts_that_are_no_message(text):
    with pytest.raises(ProtocolError) as caught:
        SessionMessage.parse(text)
    assert caught.value.where == "the whole message"
    assert TOKEN not in str(caught.value)


def test_a_message_of_another_form_and_version_names_both_versions(message):
    content = json.loads(message.model_dump_json()) | {"more": 1}
    content["terms"]["version"] = "9.9"
    with pytest.raises(DisagreementError, match="the label party runs another version") as caught:
        SessionMessage.parse(json.dumps(content))
    assert caught.value.got == "vfl 9.9 at the other party"
    assert VERSION in caught.value.want
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("version", [9, None, "\x1b[2J", "9" * 33])
def test_a_version_that_is_none_is_not_repeated(message, version):
    content = json.loads(message.model_dump_json())
    content["terms"]["version"] = version
    with pytest.raises(ProtocolError):
        SessionMessage.parse(json.dumps(content | {"more": 1}))
