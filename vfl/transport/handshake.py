"""The handshake of a stream: HELLO, answered by WELCOME or ERROR, and whom a hub admits.

Each message is one frame of JSON. Every field is checked for type and size before use; keys we do
not know are ignored, so that a later version may add some. A greeting that breaks a rule is a
`ProtocolError`. Credentials are checked first, then the application is asked.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
import secrets
import threading
import time
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
_REFUSALS: dict[str, type[VFLError]] = {
    kind.code: kind
    for kind in (AuthenticationError, ConsentError, DisagreementError, LostPeerError)
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
    """What went wrong, for the other end; long texts are cut."""
    record = {key: printable(text) for key, text in error.record().items() if text}
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
    failure = PeerFailedError(f"{party} stopped with {code}: {texts.pop('what')}", **texts)
    failure.peer_code = code
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


#: Asked once a party, at its first attach: party and its `about` to the terms it is told.
OnAttach = Callable[[str, dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Credential:
    """What a party must show: the control plane's name of its node, and the node's token."""

    node: str
    token: str = field(repr=False)


@dataclass(slots=True)
class _Ticket:
    """What is kept of a credential: digests, so that the hub's memory holds no token.

    Attributes:
        node, token: SHA-256 of what must be shown.
        expires_at: until when the token may be used first, on the monotonic clock.
        key: SHA-256 of the key that the first greeting came with; None until then.
    """

    node: bytes
    token: bytes
    expires_at: float
    key: bytes | None = None


class Admission:
    """Who may attach in one session; safe to use from several threads.

    A token is bound to the key of the first greeting that shows it: whoever learns the token
    later, from the control plane's database for example, cannot greet with it.

    Args:
        session: name of the session.
        credentials: what each party must show, by party name.
        on_attach: gives the terms of a party or refuses it with a `VFLError`.
        token_s: how long a token waits for its first use.
        clock: seconds that only grow.

    Attributes:
        failure: why a party with good credentials was refused; None if none was.
    """

    def __init__(
        self,
        session: str,
        credentials: Mapping[str, Credential],
        on_attach: OnAttach | None,
        token_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: VFLError | None = None
        self._session = _digest(session)
        self._token_s = token_s
        self._clock = clock
        self._tickets = {party: self._ticket(one) for party, one in credentials.items()}
        self._on_attach = on_attach
        self._terms: dict[str, Mapping[str, Any]] = {}
        self._lock = threading.Lock()

    def admit(self, hello: Hello) -> tuple[str, Mapping[str, Any]]:
        """The party that greets, and its terms.

        Raises:
            AuthenticationError: session, node and token do not belong together.
            VFLError: what `on_attach` raised.
        """
        with self._lock:
            party = self._authenticate(hello)
            if party not in self._terms:
                self._terms[party] = self._ask(party, hello)
            return party, self._terms[party]

    def replace(self, party: str, credential: Credential) -> None:
        """Give a party a new credential; the old one is worth nothing any more."""
        with self._lock:
            self._tickets[party] = self._ticket(credential)
            self._terms.pop(party, None)

    def _authenticate(self, hello: Hello) -> str:
        """Every comparison is made, and the answer is the same, whichever fails."""
        token, node, key = _digest(hello.token), _digest(hello.node), _digest(hello.key)
        session_known, now = _same(_digest(hello.session), self._session), self._clock()
        found = None
        for party, ticket in self._tickets.items():
            unused = ticket.key is None and now <= ticket.expires_at
            is_its_own = _same(key, ticket.key or bytes(len(key)))
            if _same(token, ticket.token) & _same(node, ticket.node) & (unused | is_its_own):
                found = party
        if not session_known or found is None:
            raise AuthenticationError(
                "the hub knows no such session, node and token",
                fix="start the session again; a token is good for one node in one session, and "
                "for the process that used it first",
            )
        self._tickets[found].key = key
        return found

    def _ticket(self, credential: Credential) -> _Ticket:
        expires_at = self._clock() + self._token_s
        return _Ticket(_digest(credential.node), _digest(credential.token), expires_at)

    def _ask(self, party: str, hello: Hello) -> Mapping[str, Any]:
        if self._on_attach is None:
            return {}
        try:
            terms = self._on_attach(party, dict(hello.about))
            Welcome(0, terms).frame()  # terms that cannot be sent are found now
        except VFLError as error:
            self.failure = error
            raise
        except Exception as error:
            self.failure = PeerFailedError(
                "the label party failed while it admitted a party",
                where=f"party '{party}'",
                got=type(error).__name__,
            )
            raise self.failure from error
        return terms


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _same(given: bytes, wanted: bytes) -> bool:
    """Equality in constant time."""
    return hmac.compare_digest(given, wanted)
