"""Who may attach to a hub: credentials first, then the application's consent."""

from __future__ import annotations

import hmac
import threading
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


class Admission:
    """The door of one session; safe to use from several threads.

    Args:
        session: name of the session.
        credentials: what each party must show, by party name.
        on_attach: gives the terms of a party or refuses it with a `VFLError`.

    Attributes:
        failure: why a party with good credentials was refused; None if none was.
    """

    def __init__(
        self, session: str, credentials: Mapping[str, Credential], on_attach: OnAttach | None
    ) -> None:
        self.failure: VFLError | None = None
        self._session = session
        self._credentials = dict(credentials)
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
            self._credentials[party] = credential
            self._terms.pop(party, None)

    def _authenticate(self, hello: Hello) -> str:
        """Every comparison is made, and the answer is the same, whichever fails."""
        found = None
        for party, credential in self._credentials.items():
            if _same(hello.token, credential.token) & _same(hello.node, credential.node):
                found = party
        if not _same(hello.session, self._session) or found is None:
            raise AuthenticationError(
                "the hub knows no such session, node and token",
                fix="start the session again; a token is good for one node in one session",
            )
        return found

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


def _same(given: str, wanted: str) -> bool:
    """Equality in constant time."""
    return hmac.compare_digest(given.encode(), wanted.encode())
