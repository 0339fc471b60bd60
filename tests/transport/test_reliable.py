"""A stream that is cut anywhere carries the same computation as one that is not."""

import hashlib
import random
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vfl.core.errors import LostPeerError
from vfl.core.frame import Frame, Kind
from vfl.transport import Hello, HubLink, Timeouts, Welcome
from vfl.transport.reliable import Sequence


@settings(max_examples=200, deadline=None)
@given(sent=st.integers(0, 20), received=st.integers(0, 25), window=st.integers(1, 8))
def test_missing_frames_are_the_tail_the_peer_has_not_counted(sent, received, window):
    frames = [Frame(Kind.CUT, step) for step in range(sent)]
    sequence = Sequence(window)
    for frame in frames:
        sequence.store(frame)
    wanted = frames[received:]
    if received > sent or len(wanted) > window:
        with pytest.raises(LostPeerError):
            sequence.missing(received)
    else:
        missing = sequence.missing(received)
        assert [id(frame) for frame in missing] == [id(frame) for frame in wanted]


def test_a_peer_that_sent_fewer_frames_than_arrived_is_another_process():
    sequence = Sequence()
    sequence.received = 3
    sequence.check_sent(3)
    sequence.check_sent(5)
    with pytest.raises(LostPeerError, match="started again"):
        sequence.check_sent(2)


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
    sender.join(60)
    assert new.written[0].kind is Kind.WELCOME
    assert new.written[1:] == frames[1:]


def test_counts_that_do_not_fit_leave_the_attached_stream_alone(link):
    good = Scripted(Frame(Kind.CUT, 0), Frame(Kind.CUT, 1))
    link.attach(good, hello(), {})
    link.receive()
    for stranger in (hello(sent=0), hello(sent=1, received=1)):
        with pytest.raises(LostPeerError, match="started again"):
            link.attach(Scripted(), stranger, {})
    assert not good.ended
    assert link.receive().step == 1


def test_an_ended_link_takes_no_stream(link):
    link.attach(Scripted(), hello(), {})
    with pytest.raises(LostPeerError, match="did not reconnect"):
        link.receive()
    with pytest.raises(LostPeerError, match="did not reconnect"):
        link.attach(Scripted(), hello(), {})


STEPS = 12
LAST = STEPS - 1


def chain(state, payload):
    """The next state: it depends on every payload so far and on their order."""
    return hashlib.sha256(state + payload).digest()


def expected(steps, size):
    """Both parties' last states without any link."""
    feature, label = b"f", b"l"
    for _ in range(steps):
        label = chain(label, feature * size)
        feature = chain(feature, label * size)
    return feature, label


def play_label(link, steps, size, sent=None):
    state = b"l"
    for step in range(steps):
        frame = link.receive()
        assert (frame.kind, frame.step) == (Kind.CUT, step)
        state = chain(state, bytes(frame.payload))
        link.send(Frame(Kind.GRAD, step, state * size))
        if sent is not None:
            sent.release()
    link.send(Frame(Kind.DONE, steps))
    return state


def play_feature(link, steps, size, before_send, before_read):
    state = b"f"
    for step in range(steps):
        before_send(step)
        link.send(Frame(Kind.CUT, step, state * size))
        before_read(step)
        frame = link.receive()
        assert (frame.kind, frame.step) == (Kind.GRAD, step)
        state = chain(state, bytes(frame.payload))
    assert link.receive().kind is Kind.DONE
    return state


@pytest.fixture
def cut_pair(open_hub, open_proxy, attach, secured):
    """The hub's link, a feature party's link and the proxy between them."""
    hub = open_hub(certificate=secured)
    proxy = open_proxy(hub.port)
    feature = attach(proxy.port, ca=secured)
    hub.wait_all(["bank"], 60)
    return hub.link("bank"), feature, proxy


@pytest.mark.parametrize("size", [40_000])
@pytest.mark.parametrize("lost", [True, False], ids=["lost", "in doubt"])
@pytest.mark.parametrize(
    ("what", "steps"),
    [("CUT", [0]), ("CUT", [5, 6]), ("CUT", [LAST]), ("GRAD", [5]), ("GRAD", [LAST])],
)
def test_a_cut_changes_nothing(cut_pair, pool, what, steps, lost, size):
    """The stream breaks around one frame, which is lost for certain or perhaps not."""
    label, feature, proxy = cut_pair
    sent = threading.Semaphore(0)

    def before_send(step):
        if lost and step in steps:
            proxy.swallowed = "up" if what == "CUT" else "down"

    def before_read(step):
        if step not in steps:
            return
        if what == "GRAD":
            for _ in range(step + 1):
                assert sent.acquire(timeout=60)
        if lost:
            time.sleep(0.02)  # the frame reaches the proxy, and ends there
        proxy.cut()

    other = pool.submit(play_label, label, STEPS, size, sent)
    state = play_feature(feature, STEPS, size, before_send, before_read)
    assert (state, other.result(60)) == expected(STEPS, size)
    if lost:
        assert proxy.connections == 1 + len(steps)


@pytest.mark.parametrize("seed", range(2))
def test_cuts_at_any_moment_change_nothing(cut_pair, pool, seed):
    """Cuts from a third thread meet every state of send, receive and attach."""
    label, feature, proxy = cut_pair
    draw = random.Random(seed)
    over = threading.Event()

    def saboteur():
        while not over.wait(draw.expovariate(40)):  # long enough for a handshake now and then
            proxy.cut()

    steps = 60
    other = pool.submit(play_label, label, steps, 2000)
    cutter = pool.submit(saboteur)

    def pace(step):
        time.sleep(0.005)

    def calm(step):
        if step == steps - 1:
            over.set()

    try:
        state = play_feature(feature, steps, 2000, calm, pace)
    finally:
        over.set()
    cutter.result(60)
    assert (state, other.result(60)) == expected(steps, 2000)
    assert proxy.connections > 3


def test_frames_in_flight_both_ways_arrive_once_and_in_order(cut_pair):
    label, feature, proxy = cut_pair
    for step in range(3):
        feature.send(Frame(Kind.CUT, step))
        label.send(Frame(Kind.GRAD, step))
    proxy.cut()
    feature.send(Frame(Kind.CUT, 3))
    label.send(Frame(Kind.GRAD, 3))
    assert [feature.receive().step for _ in range(4)] == [0, 1, 2, 3]
    assert [label.receive().step for _ in range(4)] == [0, 1, 2, 3]


def test_a_deep_pipeline_of_large_frames_gets_through_both_ways(open_hub, attach, pool):
    """Both ends send more than the sockets hold before either reads."""
    hub = open_hub(window=20)
    feature = attach(hub.port, window=20)
    hub.wait_all(["bank"], 60)
    label = hub.link("bank")

    def send_all(link, kind):
        for step in range(17):
            link.send(Frame(kind, step, bytes(500_000)))
        return [link.receive().step for _ in range(17)]

    ends = [pool.submit(send_all, feature, Kind.CUT), pool.submit(send_all, label, Kind.GRAD)]
    assert [end.result(60) for end in ends] == [list(range(17))] * 2


def test_more_frames_missing_than_kept_is_a_loss_at_both_ends(open_hub, open_proxy, attach, fast):
    hub = open_hub(timeouts=replace(fast, rejoin_window_s=0.4))
    proxy = open_proxy(hub.port)
    feature = attach(proxy.port)
    hub.wait_all(["bank"], 60)
    label = hub.link("bank")
    proxy.swallowed = "down"
    for step in range(6):
        label.send(Frame(Kind.GRAD, step, bytes(1000)))
    time.sleep(0.1)
    proxy.cut()
    with pytest.raises(LostPeerError, match="lacks more frames") as caught:
        feature.receive()
    assert caught.value.got == "6 frames missing"
    with pytest.raises(LostPeerError, match="did not reconnect"):
        label.receive()


def test_a_party_that_stays_away_is_lost_by_name(open_hub, open_proxy, attach, fast):
    waits = replace(fast, rejoin_window_s=0.3)
    hub = open_hub(timeouts=waits)
    proxy = open_proxy(hub.port)
    feature = attach(proxy.port, timeouts=waits)
    hub.wait_all(["bank"], 60)
    label = hub.link("bank")
    proxy.close()
    time.sleep(0.05)
    for step in range(2):  # both may still be taken by buffers; the connection is reset then
        label.send(Frame(Kind.GRAD, step))
        time.sleep(0.02)
    with pytest.raises(LostPeerError, match="'bank' disconnected"):
        label.send(Frame(Kind.GRAD, 2))
    with pytest.raises(LostPeerError, match="cannot be reached"):
        feature.receive()
