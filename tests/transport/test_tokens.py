"""A token is worth something to the process that used it first, and to nobody after that."""

import gc
from dataclasses import replace

import pytest

from vfl.errors import AuthenticationError
from vfl.frame import Frame, Kind
from vfl.transport import Credential, Hello
from vfl.transport.admission import Admission

TOKEN = "token-that-rests-in-a-database-000000000000"
HELLO = Hello("session", "7", TOKEN)


@pytest.fixture
def door():
    now = [0.0]
    admission = Admission("session", {"bank": Credential("7", TOKEN)}, None, 60.0, lambda: now[0])
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
    hub.wait_all(["bank"], 2)
    with pytest.raises(AuthenticationError):
        attach(hub.port, greeting=hello())  # the same session, node and token
    link._stream.end()  # the party itself comes back after a cut
    link.send(Frame(Kind.CUT, 0))
    link.send(Frame(Kind.CUT, 1))
    assert [hub.link("bank").receive().step for _ in range(2)] == [0, 1]
