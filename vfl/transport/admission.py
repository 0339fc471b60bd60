"""Who may attach to a hub: credentials first, then the application's consent."""

from __future__ import annotations

import hashlib
import hmac
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vfl.errors import AuthenticationError, PeerFailedError, VFLError
from vfl.transport.messages import Hello, Welcome

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
    """The door of one session; safe to use from several threads.

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
