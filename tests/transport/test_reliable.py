import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vfl.errors import LostPeerError
from vfl.frame import Frame, Kind
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
    with pytest.raises(LostPeerError, match="started anew"):
        sequence.check_sent(2)
