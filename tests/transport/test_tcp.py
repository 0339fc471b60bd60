"""Attached links: the contract, many parties, failures told to the other side."""

import time
from dataclasses import replace

import pytest

from vfl.core.errors import (
    AuthenticationError,
    DataError,
    LostPeerError,
    MissingPartyError,
    PeerFailedError,
    ProtocolError,
    UserError,
)
from vfl.core.frame import Frame, Kind
from vfl.testing.link import LinkContract
from vfl.transport import Admission, Credential, Hello, TcpHub, Welcome

#: More than the buffers of two sockets take.
UNBUFFERED_BYTES = 8 << 20


class TestTcpLink(LinkContract):
    @pytest.fixture
    def pair(self, open_hub, attach, secured, fast):
        waits = replace(fast, rejoin_window_s=0.2)
        hub = open_hub(certificate=secured, timeouts=waits)
        feature = attach(hub.port, ca=secured, timeouts=waits)
        hub.wait_all(["bank"], 60)
        return hub.link("bank"), feature


@pytest.fixture
def pair(open_hub, attach, secured):
    hub = open_hub(certificate=secured)
    feature = attach(hub.port, ca=secured)
    hub.wait_all(["bank"], 60)
    return hub.link("bank"), feature


def test_two_ends_that_send_at_once_both_get_through(pair, pool):
    """A secure-computation round: each opens a large share before it reads the other's."""
    shares = (b"l" * UNBUFFERED_BYTES, b"f" * UNBUFFERED_BYTES)

    def exchange(link, share):
        for _ in range(2):
            link.send(Frame(Kind.PROTOCOL, 1, share))
        return [bytes(link.receive().payload) for _ in range(2)]

    ends = [pool.submit(exchange, *end) for end in zip(pair, shares, strict=True)]
    assert ends[0].result(60) == [shares[1]] * 2
    assert ends[1].result(60) == [shares[0]] * 2


def test_eight_parties(open_hub, attach, pool, secured):
    parties = [f"party-{number}" for number in range(8)]
    hub = open_hub(*parties, certificate=secured)

    def feature(party):
        link = attach(hub.port, party, secured)
        total = 0
        for step in range(20):
            link.send(Frame(Kind.CUT, step, party.encode()))
            total += int(link.receive().payload)
        return total

    ends = [pool.submit(feature, party) for party in parties]
    hub.wait_all(parties, 60)
    for step in range(20):
        for number, party in enumerate(parties):
            frame = hub.link(party).receive()
            assert (frame.step, bytes(frame.payload)) == (step, party.encode())
            hub.link(party).send(Frame(Kind.GRAD, step, str(number * step).encode()))
    assert [end.result(60) for end in ends] == [number * 190 for number in range(8)]


def test_terms_and_about_cross_once(open_hub, attach, hello):
    asked = []

    def on_attach(party, about):
        asked.append((party, about))
        return {"codec": "none", "parties": 2}

    hub = open_hub(on_attach=on_attach)
    greeting = hello(about={"rows": 100})
    first = attach(hub.port, greeting=greeting)
    attach(hub.port, greeting=greeting)
    assert first.terms == {"codec": "none", "parties": 2}
    assert asked == [("bank", {"rows": 100})]


def test_a_missing_party_is_named_soon(open_hub, attach):
    hub = open_hub("bank", "shop")
    attach(hub.port, "bank")
    hub.wait_all(["bank"], 60)
    with pytest.raises(MissingPartyError, match="no stream from shop") as caught:
        hub.wait_all(["bank", "shop"], 0.1)
    assert caught.value.got == "bank"
    with pytest.raises(MissingPartyError, match="shop"):
        hub.link("shop")


def test_waiting_polls_and_the_poll_may_raise(open_hub):
    hub = open_hub()
    calls = []

    def poll():
        calls.append(None)
        if len(calls) == 3:
            raise PeerFailedError("a node reported an error")

    with pytest.raises(PeerFailedError, match="a node reported"):
        hub.wait_all(["bank"], 60, poll)


def test_a_silent_party_is_lost_by_name(open_hub, attach, fast):
    hub = open_hub(timeouts=replace(fast, step_s=0.2))
    attach(hub.port)
    hub.wait_all(["bank"], 60)
    with pytest.raises(LostPeerError, match=r"'bank' sent nothing for 0\.2 s"):
        hub.link("bank").receive()


def test_a_party_that_takes_nothing_is_lost_by_name(open_hub, attach, fast):
    hub = open_hub(timeouts=replace(fast, step_s=0.3))
    attach(hub.port)
    hub.wait_all(["bank"], 60)
    with pytest.raises(LostPeerError, match=r"'bank' took nothing for 0\.3 s"):
        hub.link("bank").send(Frame(Kind.GRAD, 0, bytes(UNBUFFERED_BYTES)))


def test_a_silent_label_party_is_lost(open_hub, attach, fast):
    hub = open_hub()
    feature = attach(hub.port, timeouts=replace(fast, idle_s=0.2))
    with pytest.raises(LostPeerError, match=r"label party sent nothing for 0\.2 s"):
        feature.receive()
    with pytest.raises(LostPeerError):
        feature.send(Frame(Kind.CUT))


def test_a_feature_party_says_why_it_stops(pair):
    label, feature = pair
    label.send(Frame(Kind.GRAD, 1, b"unread"))
    feature.send(Frame(Kind.CUT, 1))
    feature.fail(DataError("a table changed", fix="read it again"))
    assert label.receive().kind is Kind.CUT
    for _ in range(2):
        with pytest.raises(
            PeerFailedError, match="party 'bank' stopped with V200: a table changed"
        ):
            label.receive()


def test_the_label_party_says_why_it_stops(open_hub, attach, secured):
    hub = open_hub("bank", "shop", certificate=secured)
    links = [attach(hub.port, party, secured) for party in ("bank", "shop")]
    hub.wait_all(["bank", "shop"], 60)
    links[0].send(Frame(Kind.CUT, 1, b"unread"))
    hub.fail(DataError("labels are missing"))
    for link in links:
        with pytest.raises(PeerFailedError, match="label party stopped with V200: labels are"):
            link.receive()


def test_last_words_are_read_even_after_a_write_failed(pair):
    label, feature = pair
    feature.fail(DataError("a table changed"))
    time.sleep(0.05)
    for step in range(2):  # the first write may still go out; a later one meets a reset
        label.send(Frame(Kind.GRAD, step))
        time.sleep(0.05)
    with pytest.raises(PeerFailedError, match="a table changed"):
        label.receive()


def test_a_party_that_missed_the_failure_is_told_when_it_comes_back(open_hub, attach, open_proxy):
    hub = open_hub()
    proxy = open_proxy(hub.port)
    feature = attach(proxy.port)
    hub.wait_all(["bank"], 60)
    proxy.cut()
    hub.link("bank").fail(ProtocolError("the run was stopped"))
    with pytest.raises(PeerFailedError, match="the run was stopped"):
        feature.receive()


@pytest.mark.parametrize("sender", [0, 1])
def test_a_greeting_out_of_turn(pair, sender):
    stray = (Welcome(0), Hello("s", "n", "t"))[sender]
    pair[sender].send(stray.frame())
    with pytest.raises(ProtocolError, match=r"an unexpected (message|greeting)"):
        pair[1 - sender].receive()


def test_a_closed_hub_takes_nobody(open_hub, attach, fast):
    hub = open_hub()
    feature = attach(hub.port, timeouts=replace(fast, rejoin_window_s=0.2))
    hub.close()
    hub.close()
    with pytest.raises(LostPeerError, match="cannot be reached"):
        feature.receive()
    with pytest.raises(LostPeerError, match="cannot be reached"):
        attach(hub.port, timeouts=replace(fast, rejoin_window_s=0.2))


def test_closing_wakes_a_thread_that_waits(open_hub, attach, pool):
    hub = open_hub()
    attach(hub.port)
    hub.wait_all(["bank"], 60)
    waiting = pool.submit(hub.link("bank").receive)
    time.sleep(0.1)
    hub.close()
    with pytest.raises(LostPeerError, match="was closed"):
        waiting.result(60)


def test_a_replaced_party_starts_anew_with_a_new_token(open_hub, attach, hello):
    hub = open_hub()
    attach(hub.port).send(Frame(Kind.CUT, 1))
    hub.wait_all(["bank"], 60)
    hub.link("bank").send(Frame(Kind.GRAD, 1))
    old = hub.link("bank")
    hub.replace("bank", Credential("node-of-bank", "second-token"))
    with pytest.raises(LostPeerError):
        old.receive()
    with pytest.raises(MissingPartyError):
        hub.wait_all(["bank"], 0)
    with pytest.raises(AuthenticationError):
        attach(hub.port)
    again = attach(hub.port, greeting=hello(token="second-token"))
    hub.wait_all(["bank"], 60)
    again.send(Frame(Kind.CUT, 5))
    assert hub.link("bank").receive().step == 5


def test_a_token_is_worth_nothing_in_the_next_session(open_hub, attach, hello):
    """Not even at the same party, under the name of either session."""
    attach(open_hub().port)
    fresh = {"bank": Credential("node-of-bank", "another-token")}
    later = TcpHub("127.0.0.1", 0, Admission("session-2", fresh))
    try:
        for session in ("session-1", "session-2"):
            with pytest.raises(AuthenticationError):
                attach(later.port, greeting=hello(session=session))
        with pytest.raises(AuthenticationError):
            attach(later.port, greeting=hello(token="another-token"))
        attach(later.port, greeting=hello(session="session-2", token="another-token"))
    finally:
        later.close()


def test_a_port_in_use_is_the_users_mistake(open_hub):
    hub = open_hub()
    with pytest.raises(UserError, match="cannot listen"):
        TcpHub("127.0.0.1", hub.port, Admission("other", {}))


def test_last_words_of_a_closed_hub_are_read_after_a_write_failed(open_hub, attach, secured):
    hub = open_hub(certificate=secured)
    feature = attach(hub.port, ca=secured)
    hub.wait_all(["bank"], 60)
    hub.fail(DataError("labels are missing"))
    for step in range(2):
        feature.send(Frame(Kind.CUT, step))
        time.sleep(0.05)
    with pytest.raises(PeerFailedError, match="labels are missing"):
        feature.receive()


def test_an_old_token_admitted_just_before_the_party_was_replaced(
    open_hub, attach, hello, monkeypatch
):
    hub = open_hub()
    admit = hub._admission.admit

    def admit_slowly(greeting):
        admitted = admit(greeting)
        if greeting.token == "token-of-bank":
            hub.replace("bank", Credential("node-of-bank", "second-token"))
        return admitted

    monkeypatch.setattr(hub._admission, "admit", admit_slowly)
    with pytest.raises(LostPeerError, match="was closed"):
        attach(hub.port)
    attach(hub.port, greeting=hello(token="second-token"))
    hub.wait_all(["bank"], 60)
