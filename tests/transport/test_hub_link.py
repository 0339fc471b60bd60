"""The races of a hub's link, each forced to happen."""

import threading

import pytest

from vfl.errors import LostPeerError
from vfl.frame import Frame, Kind
from vfl.transport import Hello, HubLink, Timeouts, Welcome


class Scripted:
    """A stream that gives scripted frames, keeps what is written, and can act while it does."""

    def __init__(self, *frames, on_read=None, on_write=None):
        self.frames = list(frames)
        self.written = []
        self.ended = False
        self._on_read = on_read
        self._on_write = on_write

    def read(self, deadline):
        if self._on_read:
            self._on_read()
        if not self.frames:
            raise ConnectionError
        return self.frames.pop(0)

    def write(self, frame, deadline):
        if self._on_write:
            self._on_write()
        self.written.append(frame)

    def end(self, linger_s=0.0):
        self.ended = True


@pytest.fixture
def link():
    return HubLink("bank", Timeouts(step_s=2, rejoin_window_s=0.2))


def hello(sent=0, received=0):
    return Hello("s", "n", "t", sent=sent, received=received)


def test_a_frame_read_while_its_stream_is_replaced_counts_once(link):
    """The old stream still delivers frame 0 when the new one was told that it is missing."""
    frames = [Frame(Kind.CUT, step) for step in range(2)]
    new = Scripted(*frames)
    old = Scripted(frames[0], on_read=lambda: link.attach(new, hello(sent=2), {}))
    link.attach(old, hello(), {})
    assert [link.receive().step for _ in range(2)] == [0, 1]
    assert Welcome.of(new.written[0]).received == 0
    assert old.ended


def test_a_frame_sent_while_a_stream_attaches_follows_the_resent_ones(link):
    frames = [Frame(Kind.GRAD, step) for step in range(3)]
    sender = threading.Thread(target=lambda: link.send(frames[2]))

    def send_meanwhile():
        if not sender.ident:
            sender.start()
            sender.join(0.1)

    link.attach(Scripted(), hello(), {})
    for frame in frames[:2]:
        link.send(frame)
    new = Scripted(on_write=send_meanwhile)
    link.attach(new, hello(received=1), {})
    sender.join(2)
    assert new.written[0].kind is Kind.WELCOME
    assert new.written[1:] == frames[1:]


def test_resent_frames_are_the_stored_ones(link):
    payload = bytearray(b"once encoded")
    link.attach(Scripted(), hello(), {})
    link.send(Frame(Kind.GRAD, 0, payload))
    new = Scripted()
    link.attach(new, hello(), {})
    assert new.written[1].payload is payload


def test_counts_that_do_not_fit_leave_the_attached_stream_alone(link):
    good = Scripted(Frame(Kind.CUT, 0), Frame(Kind.CUT, 1))
    link.attach(good, hello(), {})
    link.receive()
    for stranger in (hello(sent=0), hello(sent=1, received=1)):
        with pytest.raises(LostPeerError, match="started anew"):
            link.attach(Scripted(), stranger, {})
    assert not good.ended
    assert link.receive().step == 1


def test_an_ended_link_takes_no_stream(link):
    link.attach(Scripted(), hello(), {})
    with pytest.raises(LostPeerError, match="did not come back"):
        link.receive()
    with pytest.raises(LostPeerError, match="did not come back"):
        link.attach(Scripted(), hello(), {})
