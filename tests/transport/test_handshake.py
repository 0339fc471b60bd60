"""Greetings as messages, and what a token is worth: to the process that used it first."""

import gc
import json
from dataclasses import replace

import pytest

from vfl.core.errors import (
    AuthenticationError,
    ConsentError,
    DisagreementError,
    LostPeerError,
    PeerFailedError,
    ProtocolError,
    WidthError,
)
from vfl.core.frame import HANDSHAKE_LIMIT_BYTES, Frame, Kind
from vfl.transport import Admission, Credential, Hello
from vfl.transport.handshake import (
    Welcome,
    error_frame,
    read_failure,
    read_refusal,
)

KEY = "0f" * 32
GOOD = {
    "session": "s",
    "node": "n",
    "token": "t",
    "about": {},
    "key": KEY,
    "sent": 0,
    "received": 0,
}


def hello_of(**changes):
    return Frame(Kind.HELLO, payload=json.dumps(GOOD | changes).encode())


def test_greetings_come_back_as_they_went():
    hello = Hello("s", "n", "t", {"rows": 3, "names": ["ä"]}, sent=4, received=5)
    assert Hello.of(hello.frame()) == hello
    welcome = Welcome(7, {"codec": "topk:k=3", "none": None})
    assert Welcome.of(welcome.frame()) == welcome


def test_a_token_is_not_printed():
    assert "secret-token" not in repr(Hello("s", "n", "secret-token"))
    assert KEY not in repr(Hello("s", "n", "t", key=KEY))


@pytest.mark.parametrize(
    "value", [None, 1, "", "0f" * 31, "0F" * 32, "0f" * 33, "0f" * 32 + "\n", ["0f" * 32]]
)
def test_keys_are_32_bytes(value):
    with pytest.raises(ProtocolError) as caught:
        Hello.of(hello_of(key=value))
    assert "key" in caught.value.where


def test_unknown_keys_are_ignored():
    assert Hello.of(hello_of(later="x")) == Hello("s", "n", "t", key=KEY)


@pytest.mark.parametrize("key", ["session", "node", "token"])
@pytest.mark.parametrize("value", [None, 1, "", "x" * 257, "\u00e9", "\ud800", ["s"]])
def test_names_are_short_ascii_text(key, value):
    with pytest.raises(ProtocolError) as caught:
        Hello.of(hello_of(**{key: value}))
    assert key in caught.value.where


@pytest.mark.parametrize("key", ["sent", "received"])
@pytest.mark.parametrize("value", [None, -1, 2**63, 1.0, "1", True])
def test_counts_are_whole_numbers(key, value):
    with pytest.raises(ProtocolError) as caught:
        Hello.of(hello_of(**{key: value}))
    assert key in caught.value.where


@pytest.mark.parametrize("value", [None, [], "x", 1])
def test_what_the_application_says_is_an_object(value):
    with pytest.raises(ProtocolError):
        Hello.of(hello_of(about=value))
    with pytest.raises(ProtocolError):
        Welcome.of(
            Frame(Kind.WELCOME, payload=json.dumps({"received": 0, "terms": value}).encode())
        )


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"3",
        b"{",
        b'{"sent": NaN}',
        b"[" * 8000,
        b'{"sent": ' + b"9" * 5000,
    ],
)
def test_what_is_not_a_json_object_is_refused(payload):
    with pytest.raises(ProtocolError):
        Hello.of(Frame(Kind.HELLO, payload=payload))


def test_a_greeting_of_another_kind_or_size_is_refused():
    with pytest.raises(ProtocolError):
        Hello.of(Frame(Kind.CUT, payload=hello_of().payload))
    with pytest.raises(ProtocolError):
        Hello.of(hello_of(later="x" * HANDSHAKE_LIMIT_BYTES))
    with pytest.raises(ProtocolError):
        Hello("s", "n", "t", {"long": "x" * HANDSHAKE_LIMIT_BYTES}).frame()


@pytest.mark.parametrize(
    "kind", [AuthenticationError, ConsentError, DisagreementError, LostPeerError]
)
def test_a_refusal_keeps_its_class_and_facts(kind):
    error = kind("no", where="here", got="a", want="b", fix="c")
    refusal = read_refusal(error_frame(error), "the label party")
    assert type(refusal) is kind
    assert refusal.record() == error.record()


def test_any_other_failure_names_the_party_and_the_code():
    error = WidthError("too narrow", fix="widen it")
    for read in (read_refusal, read_failure):
        failure = read(error_frame(error), "party 'bank'")
        assert type(failure) is PeerFailedError
        assert failure.what == "party 'bank' stopped with V104: too narrow"
        assert failure.fix == "widen it"


def test_folders_of_a_machine_do_not_leave_it():
    error = ConsentError("no", where="/home/ann/bank/party.toml, [consent]", fix="see docs/x.md")
    refusal = read_refusal(error_frame(error), "the label party")
    assert refusal.where == "party.toml, [consent]"
    assert refusal.fix == "see docs/x.md"


def test_texts_of_an_error_are_cut_and_harmless_on_a_terminal():
    error = ConsentError("\x1b[2Jwiped", got="😀" * 100_000)
    refusal = read_refusal(error_frame(error), "the label party")
    assert refusal.what == "?[2Jwiped"
    assert refusal.got == "😀" * 1997 + "..."
    rough = Frame(Kind.ERROR, payload=json.dumps({"code": "V403", "what": "\x07\x1b"}).encode())
    assert read_refusal(rough, "x").what == "??"


TOKEN = "token-that-rests-in-a-database-000000000000"
HELLO = Hello("session", "7", TOKEN)


@pytest.fixture
def door():
    now = [0.0]
    admission = Admission(
        "session", {"bank": Credential("7", TOKEN)}, token_s=60.0, clock=lambda: now[0]
    )
    return admission, now


def test_the_first_greeting_binds_the_token(door):
    admission, _ = door
    assert admission.admit(HELLO)[0] == "bank"
    assert admission.admit(replace(HELLO, sent=5))[0] == "bank", "a rejoin has the same key"
    with pytest.raises(AuthenticationError):
        admission.admit(Hello("session", "7", TOKEN))
    assert admission.admit(HELLO)[0] == "bank", "the thief kept nobody out"


@pytest.mark.parametrize("change", [{"token": "x" * 43}, {"node": "8"}, {"session": "other"}])
def test_a_greeting_that_is_refused_binds_nothing(door, change):
    admission, _ = door
    with pytest.raises(AuthenticationError):
        admission.admit(Hello(**({"session": "session", "node": "7", "token": TOKEN} | change)))
    assert admission.admit(HELLO)[0] == "bank"


def test_an_unused_token_expires_and_a_used_one_does_not(door):
    admission, now = door
    now[0] = 60.5
    with pytest.raises(AuthenticationError):
        admission.admit(HELLO)
    admission.replace("bank", Credential("7", "another-" + TOKEN))
    now[0] = 120.0
    later = replace(HELLO, token="another-" + TOKEN)
    assert admission.admit(later)[0] == "bank"
    now[0] = 1e6
    assert admission.admit(later)[0] == "bank"


def test_a_new_token_is_bound_anew(door):
    admission, _ = door
    admission.admit(HELLO)
    admission.replace("bank", Credential("7", "another-" + TOKEN))
    with pytest.raises(AuthenticationError):
        admission.admit(HELLO)
    assert admission.admit(Hello("session", "7", "another-" + TOKEN))[0] == "bank"


def test_the_door_keeps_no_token(door):
    admission, _ = door
    admission.admit(HELLO)
    kept = [repr(one) for one in gc.get_referents(admission._tickets)]
    assert kept
    assert not any(TOKEN in one or HELLO.key in one for one in kept)


def test_who_reads_the_token_later_cannot_take_a_link_over(open_hub, attach, hello):
    hub = open_hub()
    link = attach(hub.port)
    hub.wait_all(["bank"], 60)
    with pytest.raises(AuthenticationError):
        attach(hub.port, greeting=hello())  # the same session, node and token
    link._stream.end()  # the party itself comes back after a cut
    link.send(Frame(Kind.CUT, 0))
    link.send(Frame(Kind.CUT, 1))
    assert [hub.link("bank").receive().step for _ in range(2)] == [0, 1]
