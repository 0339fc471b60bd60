"""The handshake of a stream: HELLO, answered by WELCOME or ERROR.

Each message is one frame of JSON. Every field is checked for type and size before use; keys we do
not know are ignored, so that a later version may add some. A greeting that breaks a rule is a
`ProtocolError`. Credentials are checked first, then the application is asked.
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

#: The answer to a greeting comes from a hub whose certificate was checked, so it may be larger.
ANSWER_LIMIT_BYTES = 64 * 1024
_LIMIT_BYTES = {
    Kind.HELLO: HANDSHAKE_LIMIT_BYTES,
    Kind.WELCOME: ANSWER_LIMIT_BYTES,
    Kind.ERROR: ANSWER_LIMIT_BYTES,
}
_HEX_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)
#: Of an absolute path, all but its last name; of an address with "://", nothing.
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
#: What the fields of a greeting must be.
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
    """A key of 32 random bytes, as hex."""
    return secrets.token_hex(32)


@dataclass(frozen=True, slots=True)
class Hello:
    """Who wants to attach, and how far it has come.

    Attributes:
        session: name of the session, from the session message.
        node: the control plane's name of this node.
        token: the secret of this node in this session.
        key: a secret this process has made for this session, which no message of the control plane
            holds. The first greeting binds the token to it, so that the token alone is worth
            nothing any more.
        about: what the application wants to say of itself; JSON values only.
        sent, received: frames this end has sent and fully received in this session.
    """

    session: str
    node: str
    token: str = field(repr=False)
    about: Mapping[str, Any] = field(default_factory=dict)
    key: str = field(default_factory=fresh_key, repr=False)
    sent: int = 0
    received: int = 0

    def frame(self) -> Frame:
        """The greeting as a frame."""
        return _frame(Kind.HELLO, {name: getattr(self, name) for name in _HELLO_FIELDS})

    @classmethod
    def of(cls, frame: Frame) -> Hello:
        """The greeting in a frame.

        Raises:
            ProtocolError: another kind of frame, or a field of a wrong type or size.
        """
        return cls(**_fields(_record(frame, Kind.HELLO), *_HELLO_FIELDS))


@dataclass(frozen=True, slots=True)
class Welcome:
    """The hub's consent.

    Attributes:
        received: frames the hub has fully received from this party in this session.
        terms: what the application wants to tell; JSON values only.
    """

    received: int
    terms: Mapping[str, Any] = field(default_factory=dict)

    def frame(self) -> Frame:
        """The consent as a frame."""
        return _frame(Kind.WELCOME, {"received": self.received, "terms": self.terms})

    @classmethod
    def of(cls, frame: Frame) -> Welcome:
        """The consent in a frame.

        Raises:
            ProtocolError: another kind of frame, or a field of a wrong type or size.
        """
        return cls(**_fields(_record(frame, Kind.WELCOME), "received", "terms"))


def error_frame(error: VFLError) -> Frame:
    """What went wrong, for the other end: long texts cut, folders of this machine left out."""
    record = {
        key: printable(_FOLDERS.sub("", text)) for key, text in error.record().items() if text
    }
    return _frame(Kind.ERROR, record)


def read_refusal(frame: Frame, party: str) -> VFLError:
    """The error behind the ERROR that answered a greeting, of its own class where it has one."""
    code, texts = _error_texts(frame, party)
    if code in _REFUSALS:
        return _REFUSALS[code](texts.pop("what"), **texts)
    return read_failure(frame, party)


def read_failure(frame: Frame, party: str) -> PeerFailedError:
    """The error behind an ERROR that came later; `party` is who sent it."""
    code, texts = _error_texts(frame, party)
    what = texts.pop("what")
    failure = PeerFailedError(f"{party} stopped with {code}: {what}", **texts)
    failure.peer_code, failure.peer_what = code, what
    return failure


def in_session(frame: Frame, party: str) -> Frame:
    """A frame that came after the greeting, if it is one for the application.

    Raises:
        PeerFailedError: it says why `party` stopped.
        ProtocolError: it is another greeting.
    """
    if frame.kind is Kind.ERROR:
        raise read_failure(frame, party)
    if frame.kind is Kind.HELLO or frame.kind is Kind.WELCOME:
        raise ProtocolError("a greeting out of turn", where=party, got=frame.kind.name)
    return frame


def _error_texts(frame: Frame, party: str) -> tuple[str, dict[str, str]]:
    texts = read_record(_record(frame, Kind.ERROR), party)
    return texts.pop("code"), texts


def _frame(kind: Kind, record: Mapping[str, Any]) -> Frame:
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    payload = text.encode()
    if len(payload) > _LIMIT_BYTES[kind]:
        raise ProtocolError(
            f"a {kind.name} has too much to say",
            got=f"{len(payload)} bytes",
            want=f"at most {_LIMIT_BYTES[kind]} bytes",
        )
    return Frame(kind, payload=payload)


def _record(frame: Frame, kind: Kind) -> dict[str, Any]:
    if frame.kind is not kind:
        raise ProtocolError("a message out of turn", got=frame.kind.name, want=kind.name)
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
    """Some fields of a greeting, each of the type and size it must have."""
    for name in names:
        want, fits = _RULES[name]
        if not fits(record.get(name)):
            raise ProtocolError("a greeting breaks a rule", where=f"field '{name}'", want=want)
    return {name: record[name] for name in names}
