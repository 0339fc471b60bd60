"""The next frame of whoever sends first, among the parties of a hub."""

import threading
import time

import pytest

from vfl.core.errors import LostPeerError, PeerFailedError, VFLError
from vfl.core.frame import Frame, Kind
from vfl.transport import Admission, Credential, Hello, TcpHub, TcpLink, Timeouts, receive_any

TOKENS = {name: name * 20 for name in ("bank", "shop")}


@pytest.fixture
def streams():
    """A hub and both parties' own ends."""
    credentials = {name: Credential(name, token) for name, token in TOKENS.items()}
    hub = TcpHub("127.0.0.1", 0, Admission("session", credentials),
                 timeouts=Timeouts(step_s=60, rejoin_window_s=60))  # fmt: skip
    ends = {
        name: TcpLink.connect(
            "127.0.0.1", hub.port, Hello("session", name, token), None, Timeouts(retry_s=0.05)
        )
        for name, token in TOKENS.items()
    }
    hub.wait_all(list(TOKENS), 60)
    yield {name: hub.link(name) for name in TOKENS}, ends
    for end in ends.values():
        end.close()
    hub.close()


def test_frames_come_from_either_in_the_order_of_each(streams):
    links, ends = streams
    for step in range(3):
        ends["shop"].send(Frame(Kind.PROTOCOL, step, b"x" * 100_000))
    timer = threading.Timer(0.2, ends["bank"].send, [Frame(Kind.OPENING, 7)])
    timer.start()
    found = [receive_any(links) for _ in range(4)]
    timer.join()
    assert [frame.step for name, frame in found if name == "shop"] == [0, 1, 2]
    assert [frame.step for name, frame in found if name == "bank"] == [7]


def test_a_stream_that_was_cut_comes_back(streams):
    links, ends = streams
    links["bank"]._stream.end()

    def sends():
        for step in range(3):
            ends["bank"].send(Frame(Kind.PROTOCOL, step, b"after the cut"))
            time.sleep(0.1)

    thread = threading.Thread(target=sends)
    thread.start()
    assert [receive_any(links)[1].step for _ in range(3)] == [0, 1, 2]
    thread.join()


def test_nobody_is_waited_for_without_end_and_both_are_named(streams):
    links, _ = streams
    for link in links.values():
        link.patience_s = 0.2
    with pytest.raises(LostPeerError, match="none of the parties bank, shop sent a frame"):
        receive_any(links)


def test_what_went_wrong_at_a_party_ends_the_wait(streams):
    links, ends = streams
    ends["shop"].fail(VFLError("no more"))
    with pytest.raises(PeerFailedError, match="no more"):
        receive_any(links)


def test_who_reads_nothing_delays_nobody(streams):
    """The system's buffers take some 3.5 MB for a party, which is more than a round's gradient.

    A write that waited would end its link, for nothing is ever taken.
    """
    links, ends = streams
    links["bank"].patience_s = 2.0
    for step in range(2):
        links["bank"].send(Frame(Kind.GRAD, step, bytes(1_000_000)))
        links["shop"].send(Frame(Kind.GRAD, step, b"x"))
        assert ends["shop"].receive().step == step
    assert [ends["bank"].receive().step for _ in range(2)] == [0, 1]
