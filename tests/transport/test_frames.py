import random
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vfl.core.errors import (
    CorruptFrameError,
    FrameError,
    FrameVersionError,
    OversizedFrameError,
    TruncatedFrameError,
)
from vfl.core.frame import (
    VERSION,
    Frame,
    Kind,
    from_bytes,
    join,
    pack_header,
    parse_header,
    to_bytes,
)

GOOD = to_bytes(Frame(Kind.CUT, 7, b"payload", 2))


def forged(body_bytes, version=VERSION, kind=Kind.CUT, payload=b""):
    """A frame with any header fields and a checksum that fits them."""
    fields = body_bytes.to_bytes(4, "little") + bytes([version, kind]) + bytes(6)
    return fields + zlib.crc32(payload, zlib.crc32(fields)).to_bytes(4, "little") + payload


@pytest.mark.parametrize("length", range(len(GOOD)))
def test_a_truncated_frame(length):
    with pytest.raises(TruncatedFrameError):
        from_bytes(GOOD[:length])


def test_one_byte_too_many():
    with pytest.raises(TruncatedFrameError):
        from_bytes(GOOD + b"x")


@pytest.mark.parametrize("bit", range(8 * len(GOOD)))
def test_a_flipped_bit_anywhere_is_found(bit):
    flipped = bytearray(GOOD)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        from_bytes(flipped)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (forged(0, version=VERSION + 1), FrameVersionError),
        (forged(0, version=0x16), CorruptFrameError),  # the first byte of TLS, the G of GET, ...
        (forged(0, kind=99), CorruptFrameError),
        (forged(9000), OversizedFrameError),
        (b"GET / HTTP/1.1\r\n\r\n", CorruptFrameError),
    ],
)
def test_frames_we_do_not_take(raw, kind):
    with pytest.raises(kind):
        from_bytes(raw, limit_bytes=8192)


def test_ten_thousand_mutated_frames_raise_nothing_but_frame_errors():
    draw = random.Random(0)
    refused = 0
    tracemalloc.start()
    try:
        for _ in range(10_000):
            raw = bytearray(to_bytes(Frame(Kind(draw.randint(1, 9)), 3, draw.randbytes(20))))
            for _ in range(draw.randint(1, 6)):
                raw[draw.randrange(len(raw))] = draw.randrange(256)
            del raw[draw.choice([len(raw), draw.randrange(len(raw))]) :]
            try:
                from_bytes(raw)
            except FrameError:
                refused += 1
        assert refused > 9_900
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@settings(max_examples=500, deadline=None)
@given(raw=st.binary(max_size=64))
def test_any_bytes_are_a_frame_or_a_frame_error(raw):
    try:
        frame = from_bytes(raw)
    except FrameError:
        return
    assert to_bytes(frame) == raw


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(Kind),
    step=st.integers(0, 2**32 - 1),
    branch=st.integers(0, 2**16 - 1),
    payload=st.binary(max_size=200),
)
def test_frames_come_back_as_they_went(kind, step, branch, payload):
    frame = from_bytes(to_bytes(Frame(kind, step, payload, branch)))
    assert (frame.kind, frame.step, frame.branch, bytes(frame.payload)) == (
        kind,
        step,
        branch,
        payload,
    )


def test_over_tls_the_checksum_covers_the_header_alone():
    """TLS authenticates the payload; the header's own check still finds a slip of ours."""
    frame = Frame(Kind.CUT, 7, b"payload", 2)
    header = parse_header(pack_header(frame, payload_checked=False))
    assert join(header, b"PAYLOAD", payload_checked=False).payload == b"PAYLOAD"
    with pytest.raises(CorruptFrameError):
        join(header, b"payload")
    other = bytearray(pack_header(frame, payload_checked=False))
    other[8] ^= 1
    with pytest.raises(CorruptFrameError):
        join(parse_header(other), b"payload", payload_checked=False)
