import pytest

from vfl.errors import OversizedFrameError
from vfl.frame import Frame, Kind
from vfl.trace import EVALUATION, TRAINING, Recorded, Trace

TRAFFIC = [
    ("bank", "up", Frame(Kind.CUT, 0, bytearray(b"first"))),
    ("shop", "up", Frame(Kind.CUT, 0, b"")),
    ("bank", "down", Frame(Kind.GRAD, 0, memoryview(b"grad"))),
    ("bank", "up", Frame(Kind.QUERY, 1, bytes(range(256)))),
    ("bank", "down", Frame(Kind.ACK, 1)),
]


def traced(**settings):
    trace = Trace(**settings)
    for party, direction, frame in TRAFFIC:
        trace(party, direction, frame)
    return trace


def test_frames_are_kept_in_order_as_they_travelled():
    assert list(traced()) == [
        Recorded("bank", "up", Kind.CUT, 0, b"first"),
        Recorded("shop", "up", Kind.CUT, 0, b""),
        Recorded("bank", "down", Kind.GRAD, 0, b"grad"),
        Recorded("bank", "up", Kind.QUERY, 1, bytes(range(256))),
    ]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"kinds": TRAINING}, [Kind.CUT, Kind.CUT, Kind.GRAD]),
        ({"kinds": EVALUATION}, [Kind.QUERY]),
        ({"parties": ["shop"]}, [Kind.CUT]),
        ({"parties": []}, []),
    ],
)
def test_only_what_was_asked_for_is_kept(settings, kept):
    assert [frame.kind for frame in traced(**settings)] == kept


def test_a_buffer_that_is_used_again_does_not_change_the_trace():
    buffer = bytearray(b"first")
    trace = Trace()
    trace("bank", "up", Frame(Kind.CUT, 0, buffer))
    buffer[:] = b"other"
    assert next(iter(trace)).payload == b"first"


def test_a_full_trace_refuses_more():
    assert len(traced(limit_bytes=265)) == 4
    with pytest.raises(OversizedFrameError, match="full") as caught:
        traced(limit_bytes=264)
    assert caught.value.got == "more than 264 bytes"
