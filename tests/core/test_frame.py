"""The layout of a frame, decoded here without the package, and the bytes that are refused."""

import struct
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
    HEADER_BYTES,
    Frame,
    Kind,
    from_bytes,
    join,
    pack_header,
    parse_header,
    to_bytes,
)

FRAME = Frame(Kind.GRAD, step=0x01020304, payload=b"values", peer=0x0506)


def bitwise_crc32(data):
    """CRC-32 of IEEE 802.3, a bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xEDB88320 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def resealed(raw):
    """The same bytes with a checksum that fits them."""
    return raw[:12] + struct.pack("<I", zlib.crc32(raw[:12] + raw[16:])) + raw[16:]


def changed(offset, value):
    raw = bytearray(to_bytes(FRAME))
    raw[offset] = value
    return resealed(bytes(raw))


def test_the_layout():
    raw = to_bytes(FRAME)
    body, version, kind, peer, step, crc = struct.unpack_from("<IBBHII", raw)
    assert struct.calcsize("<IBBHII") == HEADER_BYTES == 16
    assert (body, version, kind, peer, step) == (6, 0x51, 4, 0x0506, 0x01020304)
    assert raw[16:] == b"values"
    assert crc == bitwise_crc32(raw[:12] + b"values")


def test_wire_bytes_are_what_a_stream_carries():
    assert FRAME.wire_bytes == len(to_bytes(FRAME)) == 22


def test_another_version_names_both():
    with pytest.raises(FrameVersionError) as caught:
        from_bytes(changed(4, 0x52))
    assert (caught.value.got, caught.value.want) == ("version 2", "version 1")


@pytest.mark.parametrize(
    ("offset", "value", "told"),
    [(4, 0x16, "not a vfl frame"), *((5, kind, "unknown kind") for kind in (0, 14, 255))],
)
def test_other_programs_and_unknown_kinds(offset, value, told):
    with pytest.raises(CorruptFrameError, match=told):
        from_bytes(changed(offset, value))


def test_the_limit_itself_is_accepted_and_one_byte_more_is_not():
    raw = to_bytes(Frame(Kind.HELLO, payload=bytes(100)))
    assert len(from_bytes(raw, limit_bytes=100).payload) == 100
    with pytest.raises(OversizedFrameError) as caught:
        parse_header(raw[:16], limit_bytes=99)
    assert (caught.value.got, caught.value.want) == ("100 bytes", "at most 99 bytes")


def test_a_header_can_be_refused_before_its_payload_exists():
    announced = struct.pack("<IBBHII", 2**32 - 1, 0x51, 3, 0, 0, 0)
    with pytest.raises(OversizedFrameError):
        parse_header(announced)


def test_a_frame_of_another_length_is_truncated():
    raw = to_bytes(FRAME)
    for wrong in (*(raw[:length] for length in range(len(raw))), raw + b"x"):
        with pytest.raises(TruncatedFrameError):
            from_bytes(wrong)


def test_a_flipped_bit_anywhere_is_found():
    raw = to_bytes(FRAME)
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            from_bytes(flipped)


@settings(max_examples=200)
@given(raw=st.binary(max_size=64))
def test_any_bytes_are_a_frame_or_a_frame_error(raw):
    try:
        frame = from_bytes(raw)
    except FrameError:
        return
    assert to_bytes(frame) == raw


@settings(max_examples=200)
@given(
    kind=st.sampled_from(Kind),
    step=st.integers(0, 2**32 - 1),
    peer=st.integers(0, 2**16 - 1),
    payload=st.binary(max_size=200),
)
def test_frames_come_back_as_they_went(kind, step, peer, payload):
    sent = Frame(kind, step, payload, peer)
    assert from_bytes(to_bytes(sent)) == sent


def test_over_tls_the_checksum_covers_the_header_alone():
    """TLS authenticates the payload; the header's own check still finds a slip of ours."""
    header = parse_header(pack_header(FRAME, payload_checked=False))
    assert join(header, b"VALUES", payload_checked=False).payload == b"VALUES"
    with pytest.raises(CorruptFrameError):
        join(header, b"values")
    other = bytearray(pack_header(FRAME, payload_checked=False))
    other[8] ^= 1
    with pytest.raises(CorruptFrameError):
        join(parse_header(other), b"values", payload_checked=False)
