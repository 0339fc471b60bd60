"""The layout of a frame, decoded here without the package; test_frames.py has the refusals."""

import struct
import zlib

import pytest

from vfl.core.errors import (
    CorruptFrameError,
    FrameVersionError,
    OversizedFrameError,
    TruncatedFrameError,
)
from vfl.core.frame import HEADER_BYTES, Frame, Kind, from_bytes, join, parse_header, to_bytes

FRAME = Frame(Kind.GRAD, step=0x01020304, payload=b"values", branch=0x0506)


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
    body, version, kind, branch, step, crc = struct.unpack_from("<IBBHII", raw)
    assert struct.calcsize("<IBBHII") == HEADER_BYTES == 16
    assert (body, version, kind, branch, step) == (6, 0x51, 4, 0x0506, 0x01020304)
    assert raw[16:] == b"values"
    assert crc == bitwise_crc32(raw[:12] + b"values")


def test_wire_bytes_are_what_a_stream_carries():
    assert FRAME.wire_bytes == len(to_bytes(FRAME)) == 22


@pytest.mark.parametrize("offset", [0, 5, 6, 7, 8, 11])
def test_the_checksum_covers_the_header(offset):
    raw = bytearray(to_bytes(FRAME))
    raw[offset] ^= 1
    with pytest.raises((CorruptFrameError, TruncatedFrameError)):
        from_bytes(raw)


def test_a_header_of_another_frame_does_not_fit_the_payload():
    other = to_bytes(Frame(Kind.GRAD, step=8, payload=b"valueS", branch=0x0506))
    with pytest.raises(CorruptFrameError, match="checksum"):
        from_bytes(other[:16] + b"values")


def test_another_version_names_both():
    with pytest.raises(FrameVersionError) as caught:
        from_bytes(changed(4, 0x52))
    assert (caught.value.got, caught.value.want) == ("version 2", "version 1")


def test_other_programs_are_no_peers_of_another_version():
    with pytest.raises(CorruptFrameError, match="not a vfl frame"):
        from_bytes(changed(4, 0x16))


@pytest.mark.parametrize("kind", [0, 14, 255])
def test_an_unknown_kind(kind):
    with pytest.raises(CorruptFrameError, match="unknown kind"):
        from_bytes(changed(5, kind))


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


@pytest.mark.parametrize("payload", [b"value", b"values!"])
def test_a_payload_of_another_length(payload):
    with pytest.raises(TruncatedFrameError, match="length"):
        join(parse_header(to_bytes(FRAME)[:16]), payload)


def test_a_resent_frame_is_the_same_bytes():
    assert to_bytes(FRAME) == to_bytes(from_bytes(to_bytes(FRAME)))
