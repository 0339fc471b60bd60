import json

import pytest

from vfl.errors import DisagreementError, ProtocolError
from vfl.session import SessionMessage
from vfl.version import VERSION

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
        ({"token": [TOKEN]}, "fields token"),
        ({"port": 0, "host": "h" * 256}, "fields host, port"),
        ({"session": "xyz"}, "fields session"),
        ({"idle_timeout_s": float("inf")}, "fields idle_timeout_s"),
        ({"terms": {"mode": "train"}}, "fields terms"),
        ({"more": 1}, "fields more"),
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


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", f'"{TOKEN}"'])
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
    assert caught.value.got == "vfl 9.9 there"
    assert VERSION in caught.value.want
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("version", [9, None, "\x1b[2J", "9" * 33])
def test_a_version_that_is_none_is_not_repeated(message, version):
    content = json.loads(message.model_dump_json())
    content["terms"]["version"] = version
    with pytest.raises(ProtocolError):
        SessionMessage.parse(json.dumps(content | {"more": 1}))
