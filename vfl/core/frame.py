"""Frames, the messages between parties (a header of 16 bytes and a payload), and their `Link`.

All numbers are little-endian:

    offset  bytes  type  field         value
    0       4      u32   `body_bytes`  bytes after this header of 16 bytes
    4       1      u8    `version`     0x51: high nibble 5 marks a frame of vfl, low nibble is
                                       version 1
    5       1      u8    `kind`        see below
    6       2      u16   `peer`        a party's number in a frame that the label party relays, or 0
    8       4      u32   `step`        number of the exchange, the same on both sides
    12      4      u32   `crc32`       CRC-32 (zlib) of bytes 0 to 11 and the payload; over TLS
                                       only of bytes 0 to 11, because TLS detects errors too

A receiver checks the version, the kind, and `body_bytes` against the agreed limit of the kind,
before it allocates memory for the payload. It then checks the checksum. The parties agree on codec,
cut-layer width and rows in the handshake, so frames do not repeat them.

A `Link` is one party's end of an ordered, authenticated stream of frames between two parties. The
label party has one link for each feature party (`vfl.transport.hub`, which hides reconnections).
The code of a protocol uses no socket: it receives a `Link` of `vfl.transport` as an argument.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from vfl.core.errors import (
    CorruptFrameError,
    FrameVersionError,
    OversizedFrameError,
    TruncatedFrameError,
)

Payload = bytes | bytearray | memoryview

HEADER_BYTES = 16
VERSION = 0x51  # high nibble: this is a vfl frame; low nibble: version 1
#: Largest payload of a frame without a smaller agreed limit: in a three-party computation, in
#: measurements, and as the maximum of agreed limits.
LIMIT_BYTES = 512 * 1024 * 1024
HANDSHAKE_LIMIT_BYTES = 8192

_FIELDS = struct.Struct("<IBBHI")
_CRC = struct.Struct("<I")


class Kind(IntEnum):
    """Kind of a frame; it determines the content of the payload.

    Attributes:
        HELLO: JSON of at most 8192 bytes: a connecting party introduces itself with its token
        WELCOME: JSON: the answer to HELLO
        CUT: encoded cut-layer activations of training rows
        GRAD: the gradient of these activations
        QUERY: encoded cut-layer activations of rows outside training
        ACK: confirms that the label party has read a QUERY; at most one byte, its verdict on early
            stopping
        DONE: end of a session: a party's report as JSON; empty if the label party sends it
        ERROR: a JSON record: code, what, where, got, want, fix
        PROTOCOL: a message of a secure protocol between several parties
        OPENING: masked operands of layers on additive shares, in training; in the secure mode
            `permuted`, any relayed message
        QUERY_OPENING: masked operands of layers on additive shares, for rows outside training
        ASK: row positions of the next prediction query; empty if the sender only checks which
            parties are connected
        REFUSAL: reason why a party does not answer an ASK for these rows
    """

    HELLO = 1
    WELCOME = 2
    CUT = 3
    GRAD = 4
    QUERY = 5
    ACK = 6
    DONE = 7
    ERROR = 8
    PROTOCOL = 9
    OPENING = 10
    QUERY_OPENING = 11
    ASK = 12
    REFUSAL = 13


_KINDS: Mapping[int, Kind] = {int(kind): kind for kind in Kind}

#: Largest accepted payload in bytes: one number for all kinds, or a number for each kind; a kind
#: without a number must then have an empty payload.
PayloadLimit = int | Mapping[Kind, int]


@dataclass(frozen=True, slots=True)
class Frame:
    """One message that travels over a link.

    Attributes:
        kind: kind of the message, which determines the payload's content.
        step: number of the training step or query, the same at both parties.
        payload: encoded bytes; a resend repeats the same bytes.
        peer: number of the receiver or sender, if the label party relays the frame between two
            other parties (`vfl.session.relay`); otherwise 0.
    """

    kind: Kind
    step: int = 0
    payload: Payload = b""
    peer: int = 0

    @property
    def wire_bytes(self) -> int:
        """Bytes of this frame on a stream, including the 16-byte header."""
        return HEADER_BYTES + len(self.payload)


class Header(NamedTuple):
    """The first 16 bytes of a frame, parsed and checked."""

    body_bytes: int
    kind: Kind
    peer: int
    step: int
    crc: int
    fields: bytes


def pack_header(frame: Frame, *, payload_checked: bool = True) -> bytes:
    """Encode the 16 header bytes of `frame`.

    Args:
        frame: frame whose header to encode.
        payload_checked: whether the checksum also covers the payload. Over TLS, which already
            authenticates every byte, the checksum covers only the header.
    """
    fields = _FIELDS.pack(len(frame.payload), VERSION, frame.kind, frame.peer, frame.step)
    return fields + _CRC.pack(_checksum(fields, frame.payload if payload_checked else b""))


def to_bytes(frame: Frame) -> bytes:
    """Encode the whole frame as one byte string."""
    return pack_header(frame) + bytes(frame.payload)


def parse_header(raw: Payload, limit_bytes: PayloadLimit = LIMIT_BYTES) -> Header:
    """Parse and check the 16 header bytes, before the caller allocates memory for the payload.

    Args:
        raw: exactly 16 bytes.
        limit_bytes: largest payload in bytes that the receiver accepts now (8,192 before a peer is
            authenticated): one number for all kinds, or a number for each kind.

    Raises:
        TruncatedFrameError: there are fewer bytes than a header has.
        FrameVersionError: the frame has another version of the frame format.
        CorruptFrameError: the bytes are not a vfl frame, or the frame has an unknown kind.
        OversizedFrameError: the announced payload is larger than the limit.
    """
    if len(raw) < HEADER_BYTES:
        raise TruncatedFrameError(
            "a frame ended inside its header", got=f"{len(raw)} bytes", want=f"{HEADER_BYTES} bytes"
        )
    fields = bytes(raw[: _FIELDS.size])
    body_bytes, version, kind, peer, step = _FIELDS.unpack(fields)
    if version != VERSION:
        if version >> 4 != VERSION >> 4:
            raise CorruptFrameError("these bytes are not a vfl frame")
        raise FrameVersionError(
            "the peer speaks another frame version",
            got=f"version {version & 15}",
            want=f"version {VERSION & 15}",
            fix="install the same vfl version at every party",
        )
    most = limit_bytes if isinstance(limit_bytes, int) else limit_bytes.get(kind, 0)
    if body_bytes > most:
        raise OversizedFrameError(
            "a frame announces more than the agreed limit",
            got=f"{body_bytes} bytes",
            want=f"at most {most} bytes",
        )
    known = _KINDS.get(kind)
    if known is None:
        raise CorruptFrameError("a frame of unknown kind", got=f"kind {kind}")
    (crc,) = _CRC.unpack_from(raw, _FIELDS.size)
    return Header(body_bytes, known, peer, step, crc, fields)


def join(header: Header, payload: Payload, *, payload_checked: bool = True) -> Frame:
    """Join header and payload to a frame, and check the frame's checksum; see `pack_header`.

    Raises:
        TruncatedFrameError: the payload is shorter or longer than the header announces.
        CorruptFrameError: the checksum differs from the computed one.
    """
    if len(payload) != header.body_bytes:
        raise TruncatedFrameError(
            "a frame's length differs from its header",
            got=f"{len(payload)} bytes",
            want=f"{header.body_bytes} bytes",
        )
    if _checksum(header.fields, payload if payload_checked else b"") != header.crc:
        raise CorruptFrameError("a frame's checksum does not match its bytes")
    return Frame(header.kind, header.step, payload, header.peer)


def _checksum(fields: bytes, payload: Payload) -> int:
    return zlib.crc32(payload, zlib.crc32(fields))


def from_bytes(raw: Payload, limit_bytes: int = LIMIT_BYTES) -> Frame:
    """Decode one whole frame from bytes; see `parse_header` and `join` for its errors."""
    header = parse_header(raw, limit_bytes)
    return join(header, memoryview(raw)[HEADER_BYTES:])


class Link(Protocol):
    """One party's end of a stream of frames to another party."""

    def send(self, frame: Frame) -> None:
        """Send one frame.

        Raises:
            LostPeerError: the connection is lost and was not restored in time.
        """

    def receive(self) -> Frame:
        """Wait for the next frame.

        Raises:
            LostPeerError: no frame arrived in time, or the connection is lost and was not restored
                in time.
            FrameError: the received bytes are not a frame.
        """

    def close(self) -> None:
        """Close the link; a second call has no effect."""


#: Function that observes every frame of a link; its arguments are the feature party's name, the
#: direction ("up" = towards the label party) and the frame.
Observer = Callable[[str, str, Frame], None]
