"""The handshake that opens a stream: a HELLO frame, answered by a WELCOME or an ERROR frame.

Each of these frames contains one JSON object. The receiver checks the type and the size of every
field before use, and ignores unknown keys, so that later versions of vfl may add keys. A greeting
(HELLO or WELCOME frame) that breaks a rule raises a `ProtocolError`. The hub (the label party's
server) checks the credentials of a greeting before it passes the greeting to the application.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vfl.core.errors import (
    AuthenticationError,
    ConsentError,
    DisagreementError,
    LostPeerError,
    PeerFailedError,
    ProtocolError,
    RolledBackError,
    VFLError,
    read_record,
)
from vfl.core.frame import HANDSHAKE_LIMIT_BYTES, Frame, Kind
from vfl.core.text import printable

#: Largest answer to a greeting in bytes; the answer comes from a hub with a verified certificate,
#: so it may be larger than a greeting.
ANSWER_LIMIT_BYTES = 64 * 1024
_LIMIT_BYTES = {
    Kind.HELLO: HANDSHAKE_LIMIT_BYTES,
    Kind.WELCOME: ANSWER_LIMIT_BYTES,
    Kind.ERROR: ANSWER_LIMIT_BYTES,
}
_HEX_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)
#: Regular expression for the folders of an absolute path; it does not match an address with "://".
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^/\s'\"]+/)+")
_REFUSALS: dict[str, type[VFLError]] = {
    kind.code: kind
    for kind in (
        AuthenticationError,
        ConsentError,
        DisagreementError,
        LostPeerError,
        RolledBackError,
    )
}

_Rule = tuple[str, Callable[[Any], bool]]
_NAME: _Rule = (
    "1 to 256 ASCII characters",
    lambda value: isinstance(value, str) and value.isascii() and 0 < len(value) <= 256,
)
_KEY: _Rule = (
    "32 bytes as 64 hexadecimal digits",
    lambda value: isinstance(value, str) and _HEX_KEY.fullmatch(value) is not None,
)
_COUNT: _Rule = ("a count of frames", lambda value: type(value) is int and 0 <= value < 2**63)
_OBJECT: _Rule = ("a JSON object", lambda value: isinstance(value, dict))
#: Rules for the fields of a greeting, by field.
_RULES = {
    "session": _NAME,
    "node": _NAME,
    "token": _NAME,
    "key": _KEY,
    "sent": _COUNT,
    "received": _COUNT,
    "about": _OBJECT,
    "terms": _OBJECT,
}
_HELLO_FIELDS = ("session", "node", "token", "about", "key", "sent", "received")


def fresh_key() -> str:
    """Draw a key of 32 random bytes; return it as hexadecimal digits."""
    return secrets.token_hex(32)


@dataclass(frozen=True, slots=True)
class Hello:
    """Greeting that a party sends when it connects.

    The greeting states how many frames the party sent and received.

    Attributes:
        session: identifier of the session, from the session message.
        node: name of this node in Flower.
        token: secret token of this node for this session.
        key: secret that this process draws for this session; no message of Flower contains this
            secret. The first greeting binds the token to this secret, so that an attacker cannot
            use the token alone afterwards.
        about: data of the application, as JSON values only.
        sent, received: number of frames that this party has sent in this session, and number of
            frames that it has completely received.
    """

    session: str
    node: str
    token: str = field(repr=False)
    about: Mapping[str, Any] = field(default_factory=dict)
    key: str = field(default_factory=fresh_key, repr=False)
    sent: int = 0
    received: int = 0

    def frame(self) -> Frame:
        """Encode the greeting as a frame."""
        return _frame(Kind.HELLO, {name: getattr(self, name) for name in _HELLO_FIELDS})

    @classmethod
    def of(cls, frame: Frame) -> Hello:
        """Decode the greeting from a frame.

        Raises:
            ProtocolError: the frame has another kind, or a field has a wrong type or size.
        """
        return cls(**_fields(_record(frame, Kind.HELLO), *_HELLO_FIELDS))


@dataclass(frozen=True, slots=True)
class Welcome:
    """The hub's answer to a greeting, which admits a party.

    Attributes:
        received: number of frames that the hub has completely received from this party in this
            session.
        terms: data that the application answers, as JSON values only.
    """

    received: int
    terms: Mapping[str, Any] = field(default_factory=dict)

    def frame(self) -> Frame:
        """Encode the answer as a frame."""
        return _frame(Kind.WELCOME, {"received": self.received, "terms": self.terms})

    @classmethod
    def of(cls, frame: Frame) -> Welcome:
        """Decode the answer from a frame.

        Raises:
            ProtocolError: the frame has another kind, or a field has a wrong type or size.
        """
        return cls(**_fields(_record(frame, Kind.WELCOME), "received", "terms"))


def error_frame(error: VFLError) -> Frame:
    """Encode an error for the peer.

    Long texts are shortened, and paths of local folders are removed.
    """
    record = {
        key: printable(_FOLDERS.sub("", text)) for key, text in error.record().items() if text
    }
    return _frame(Kind.ERROR, record)


def read_refusal(frame: Frame, party: str) -> VFLError:
    """Return the error in an ERROR frame that answered a greeting, as the peer's class if known."""
    code, texts = _error_texts(frame, party)
    if code in _REFUSALS:
        return _REFUSALS[code](texts.pop("what"), **texts)
    return read_failure(frame, party)


def read_failure(frame: Frame, party: str) -> PeerFailedError:
    """Decode the error in an ERROR frame that arrived after the greeting; `party` sent it."""
    code, texts = _error_texts(frame, party)
    what = texts.pop("what")
    failure = PeerFailedError(f"{party} stopped with {code}: {what}", **texts)
    failure.peer_code, failure.peer_what = code, what
    return failure


def in_session(frame: Frame, party: str) -> Frame:
    """Return a frame of the application.

    Raise an error if the frame is an ERROR frame or a second greeting.

    Raises:
        PeerFailedError: the frame reports the error that ended the session at `party`.
        ProtocolError: the frame is a second greeting.
    """
    if frame.kind is Kind.ERROR:
        raise read_failure(frame, party)
    if frame.kind is Kind.HELLO or frame.kind is Kind.WELCOME:
        raise ProtocolError(
            "an unexpected greeting inside a session", where=party, got=frame.kind.name
        )
    return frame


def _error_texts(frame: Frame, party: str) -> tuple[str, dict[str, str]]:
    texts = read_record(_record(frame, Kind.ERROR), party)
    return texts.pop("code"), texts


def _frame(kind: Kind, record: Mapping[str, Any]) -> Frame:
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    payload = text.encode()
    if len(payload) > _LIMIT_BYTES[kind]:
        raise ProtocolError(
            f"the content of a {kind.name} is too large",
            got=f"{len(payload)} bytes",
            want=f"at most {_LIMIT_BYTES[kind]} bytes",
        )
    return Frame(kind, payload=payload)


def _record(frame: Frame, kind: Kind) -> dict[str, Any]:
    if frame.kind is not kind:
        raise ProtocolError("an unexpected message", got=frame.kind.name, want=kind.name)
    if len(frame.payload) > _LIMIT_BYTES[kind]:
        raise ProtocolError(
            f"a {kind.name} is too large",
            got=f"{len(frame.payload)} bytes",
            want=f"{_LIMIT_BYTES[kind]} bytes",
        )
    try:
        record = json.loads(bytes(frame.payload).decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ProtocolError(f"a {kind.name} is not JSON") from None
    if not isinstance(record, dict):
        raise ProtocolError(f"a {kind.name} is not a JSON object", got=type(record).__name__)
    return record


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


def _fields(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return these fields of a greeting or its answer, after a check of their types and sizes."""
    for name in names:
        want, fits = _RULES[name]
        if not fits(record.get(name)):
            raise ProtocolError(
                "a field of a greeting breaks a rule", where=f"field '{name}'", want=want
            )
    return {name: record[name] for name in names}
