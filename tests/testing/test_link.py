"""Links that break the contract, each found by the test that is there for it."""

from queue import SimpleQueue

import pytest

from vfl.core.errors import ProtocolError
from vfl.core.frame import Frame
from vfl.testing import LinkContract
from vfl.transport.link import LocalLink

TESTS = [name for name in dir(LinkContract) if name.startswith("test_")]
REFUSED = (AssertionError, ProtocolError, pytest.fail.Exception)  # the last: nothing was raised


class Unbranched(LocalLink):
    """Has no place for a frame's branch."""

    def send(self, frame):
        super().send(Frame(frame.kind, frame.step, frame.payload))


class Stacking(LocalLink):
    """Gives the last frame first."""

    def receive(self):
        sent = [self._incoming.get_nowait() for _ in range(self._incoming.qsize())]
        for one in sent[-1:] + sent[:-1]:
            self._incoming.put(one)
        return super().receive()


class Padding(LocalLink):
    """Cannot carry nothing."""

    def send(self, frame):
        super().send(Frame(frame.kind, frame.step, frame.payload or b"\0", frame.peer))


class Cutting(LocalLink):
    """Has a longest frame, and does not say so."""

    def send(self, frame):
        super().send(Frame(frame.kind, frame.step, frame.payload[: 2**20], frame.peer))


class WholeBuffers(LocalLink):
    """Sends the memory behind a view of it."""

    def send(self, frame):
        payload = getattr(frame.payload, "obj", frame.payload)
        super().send(Frame(frame.kind, frame.step, payload, frame.peer))


class Unclosed(LocalLink):
    def close(self):
        pass


class Alone(LocalLink):
    """Closes its own end, and tells nobody."""

    def close(self):
        self._closed = True


class Echoing(LocalLink):
    """Hears itself: `ends` gives both ends one queue for both directions."""


def ends(link):
    up = SimpleQueue()
    down = up if link is Echoing else SimpleQueue()
    return link(down.put, up), link(up.put, down)


def run(link, test):
    """One test of the contract; with the label party's end as the closer, where one closes."""
    closer = [0] if "close" in test else []
    getattr(LinkContract(), test)(ends(link), *closer)


@pytest.mark.parametrize("test", TESTS)
def test_the_link_that_all_are_made_of_is_sound(test):
    run(LocalLink, test)


BROKEN = [
    (Unbranched, "frames_keep_every_field"),
    (Echoing, "both_directions_are_separate"),
    (Stacking, "order_is_kept"),
    (Padding, "empty_payload"),
    (Cutting, "large_payload"),
    (WholeBuffers, "memoryview_payload"),
    (Unclosed, "closed_end_refuses_further_use"),
    (Alone, "close_is_reported_to_the_other_end"),
]


def test_every_test_of_the_contract_finds_something():
    assert {f"test_{test}" for _, test in BROKEN} == set(TESTS)


@pytest.mark.parametrize(("broken", "test"), BROKEN)
def test_the_contract_finds_a_link_that_breaks_it(broken, test):
    with pytest.raises(REFUSED):
        run(broken, f"test_{test}")
