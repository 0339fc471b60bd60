"""Contract tests for a link between two parties; subclass the contract to test another transport.

class TestMyLink(LinkContract):
    @pytest.fixture
    def pair(self):
        ...
        yield label_end, feature_end
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from vfl.core.errors import LostPeerError
from vfl.core.frame import Frame, Kind, Link

Pair = tuple[Link, Link]

#: Number of bytes that exceeds the buffers of a socket, so that a write has to wait for its reader.
LARGE_BYTES = 24 * 1024 * 1024


class LinkContract:
    """Properties of every pair of connected links.

    A subclass provides the fixture `pair`: (the label party's link, a feature party's link), both
    ready for use. A link that waits for lost peers should be configured to wait for at most two
    seconds in these tests.
    """

    @pytest.fixture
    def pair(self) -> Pair:
        """Return the two connected links (label party's, feature party's)."""
        raise NotImplementedError("a subclass provides the fixture `pair`")

    def test_frames_keep_every_field(self, pair: Pair) -> None:
        label, feature = pair
        for sent in (Frame(Kind.CUT, 2**32 - 1, b"cut", 2**16 - 1), Frame(Kind.DONE)):
            feature.send(sent)
            assert _fields(label.receive()) == _fields(sent)

    def test_both_directions_are_separate(self, pair: Pair) -> None:
        label, feature = pair
        label.send(Frame(Kind.GRAD, 1, b"down"))
        feature.send(Frame(Kind.CUT, 1, b"up"))
        assert bytes(label.receive().payload) == b"up"
        assert bytes(feature.receive().payload) == b"down"

    def test_order_is_kept(self, pair: Pair) -> None:
        label, feature = pair
        steps = list(range(100))
        frames = [Frame(Kind.CUT, step, b"x" * step) for step in steps]
        _beside(feature.send, *frames)
        received = [label.receive() for _ in steps]
        assert [frame.step for frame in received] == steps
        assert [len(frame.payload) for frame in received] == steps

    def test_empty_payload(self, pair: Pair) -> None:
        label, feature = pair
        label.send(Frame(Kind.ACK, 3))
        assert bytes(feature.receive().payload) == b""

    def test_large_payload(self, pair: Pair) -> None:
        label, feature = pair
        payload = bytes(range(256)) * (LARGE_BYTES // 256)
        sender = _beside(feature.send, Frame(Kind.CUT, 0, payload))
        assert bytes(label.receive().payload) == payload
        sender.join(timeout=30)
        assert not sender.is_alive()

    def test_memoryview_payload(self, pair: Pair) -> None:
        label, feature = pair
        feature.send(Frame(Kind.CUT, 0, memoryview(b"abcdef")[2:5]))
        assert bytes(label.receive().payload) == b"cde"

    @pytest.mark.parametrize("closer", [0, 1])
    def test_closed_end_refuses_further_use(self, pair: Pair, closer: int) -> None:
        pair[closer].close()
        pair[closer].close()
        with pytest.raises(LostPeerError):
            pair[closer].send(Frame(Kind.DONE))
        with pytest.raises(LostPeerError):
            pair[closer].receive()

    @pytest.mark.parametrize("closer", [0, 1])
    def test_close_is_reported_to_the_other_end(self, pair: Pair, closer: int) -> None:
        pair[closer].close()
        with pytest.raises(LostPeerError):
            pair[1 - closer].receive()


def _fields(frame: Frame) -> tuple[Kind, int, bytes, int]:
    return frame.kind, frame.step, bytes(frame.payload), frame.peer


def _beside(send: Callable[[Frame], None], *frames: Frame) -> threading.Thread:
    """Send frames in a separate thread, because a send may wait until the calling thread reads.

    With a transport that supports a single thread only, the sending thread ends at once, before the
    caller receives.
    """

    def work() -> None:
        for frame in frames:
            send(frame)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=0.3)
    return thread
